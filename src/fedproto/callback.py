"""Callbacks: how programs, progress bars and logs follow training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedproto.errors import ConfigError

if TYPE_CHECKING:
    from fedproto.config import RunConfig
    from fedproto.types import RoundRecord


class Callback:
    """Follows training; a subclass overrides the methods it needs.

    An exception raised in a callback stops the training. Rounds that were finished before are kept.
    """

    def on_notice(self, text: str) -> None:
        """A notice for the user, such as how jobs are run; one sentence."""

    def on_progress(self, name: str, done: int, total: int | None) -> None:
        """Part of a data set is here: of a preparation in files, of a download in bytes."""

    def on_pass(self, num_jobs: int) -> None:
        """A pass over all unfinished runs begins: one round each, with this many jobs in all."""

    def on_job(self) -> None:
        """A job is finished."""

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """A round of a run is finished and, where the run has a directory, on disk."""

    def on_end(self) -> None:
        """Training has ended: all runs are finished, or an error interrupts them."""


class CallbackList(Callback):
    """Several callbacks as one, called in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        listed = isinstance(callbacks, Sequence)
        if not listed or not all(isinstance(one, Callback) for one in callbacks):
            raise ConfigError(f"callbacks must be a list of fedproto.Callback, not {callbacks!r}")
        self._callbacks = callbacks


def _forwarded(name: str) -> Callable[..., None]:
    def forward(self: CallbackList, *arguments: Any) -> None:
        for each in self._callbacks:
            getattr(each, name)(*arguments)

    return forward


for _name in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(CallbackList, _name, _forwarded(_name))
