"""What the clients of a stack say and keep after training, computed for all of them at once.

A strategy's `report` is written for one client. Where `torch.vmap` can run it, it is called once
for all clients of the strategy; otherwise once for each.

Shapes: J jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.engines.base import LocalJob
from fedproto.strategies.base import Local, Observation, Report
from fedproto.strategies.sections import Method
from fedproto.types import Tensors

Observations = Mapping[int, Observation]
"""What was looked up, by place of the job."""


class StackReports:
    """Asks strategies for reports; remembers which of them `torch.vmap` cannot run."""

    def __init__(self) -> None:
        self._one_by_one: set[Method] = set()

    def of(
        self,
        jobs: Sequence[LocalJob],
        locals_: Sequence[Local | None],
        trained: Tensors,
        before: Observations,
        after: Observations,
    ) -> dict[int, Report]:
        """Reports by place, of those jobs whose strategy gives any."""
        groups: dict[Method, list[int]] = {}
        for index, job in enumerate(jobs):
            if job.method.reports:
                groups.setdefault(job.method, []).append(index)
        reports: dict[int, Report] = {}
        for method, indices in groups.items():
            own = [one for index in indices if (one := locals_[index]) is not None]
            found = None
            if method not in self._one_by_one:
                try:
                    found = _together(method, indices, own, trained, before, after)
                except (RuntimeError, TypeError, ValueError):
                    self._one_by_one.add(method)
            if found is None:
                found = [
                    method.report(
                        local,
                        {name: tensor[index] for name, tensor in trained.items()},
                        before.get(index),
                        after.get(index),
                    )
                    for index, local in zip(indices, own, strict=True)
                ]
            reports |= zip(indices, found, strict=True)
        return reports


# Long: what is mapped over jobs has to be one function.
def _together(
    method: Method,
    indices: Sequence[int],
    own: Sequence[Local],
    trained: Tensors,
    before: Observations,
    after: Observations,
) -> list[Report]:
    device = next(iter(trained.values())).device
    number = next(iter(trained.values())).dtype

    def report(
        row: Tensor,
        among: Tensor,
        numbers: tuple[Tensor, Tensor, Tensor],
        secret: Tensor,
        classes: Tensor,
        old: tuple[Tensor, ...] | None,
        new: tuple[Tensor, ...] | None,
    ) -> tuple[Tensors, Tensors]:
        local = Local(
            *numbers,
            classes,
            _Row(lambda name: _stacked(one.params[name] for one in own), own[0].params, among),
            _Row(
                lambda name: _stacked(one.broadcast[name] for one in own), own[0].broadcast, among
            ),
            _Row(lambda name: _stacked(one.memory[name] for one in own), own[0].memory, among),
            head=own[0].head,
            secret=secret,
        )
        found = method.report(
            local,
            _Row(trained.__getitem__, trained, row),
            None if old is None else Observation(*old),
            None if new is None else Observation(*new),
        )
        return dict(found.payload), dict(found.memory)

    payload, memory = vmap(report, in_dims=(0, 0, 0, 0, 0, _in_dims(before), _in_dims(after)))(
        torch.tensor(indices, device=device),
        torch.arange(len(indices), device=device),
        (
            torch.tensor([int(one.num_examples) for one in own], device=device),
            torch.tensor([int(one.steps) for one in own], device=device),
            torch.tensor([float(one.lr) for one in own], device=device, dtype=number),
        ),
        torch.tensor([int(one.secret) for one in own], device=device),
        _stacked(one.classes for one in own),
        _observations(before, indices),
        _observations(after, indices),
    )
    return [
        Report(
            {name: tensor[index] for name, tensor in payload.items()},
            {name: tensor[index] for name, tensor in memory.items()},
        )
        for index in range(len(indices))
    ]


class _Row(Mapping[str, Tensor]):
    """A job's tensors out of stacked ones, taken out when they are asked for.

    Args:
        stacked: Gives the tensors of a name of all jobs.
        names: What there is.
        row: Which job; inside of `torch.vmap` this is every one of them.
    """

    def __init__(self, stacked: Callable[[str], Tensor], names: Tensors, row: Tensor) -> None:
        self._stacked, self._names, self._row = stacked, names, row

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        stacked = self._stacked(name)
        row = self._row.to(stacked.device)
        return torch.index_select(stacked, 0, row.unsqueeze(0)).squeeze(0)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _stacked(tensors: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(tensors))


def _in_dims(observations: Observations) -> int | None:
    return 0 if observations else None


def _observations(observations: Observations, indices: Sequence[int]) -> tuple[Tensor, ...] | None:
    found = [observations[index] for index in indices if index in observations]
    if not found:
        return None
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))
