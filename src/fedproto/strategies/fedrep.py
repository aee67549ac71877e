"""FedRep (Collins et al. 2021): personal last layers, trained apart from the shared body."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection
from dataclasses import dataclass

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.fedper import FedPer
from fedproto.strategies.values import Local


@STRATEGIES.register("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    """A client trains its personal layers with the body frozen, then the body with them frozen.

    The head trains in the first ``head_epochs`` of a client's ``train.epochs`` local epochs, the
    body in those that are left; the paper has ten and one to five. Both phases have the same
    learning rate, and momentum of their own. Stragglers are dropped unless
    ``schedule.partial_work`` says otherwise: one that stops early would train no body.
    """

    head_epochs: int = option(1, "local epochs that train the personal layers", at_least=1)

    @property
    def least_epochs(self) -> int:
        """One epoch for the body."""
        return self.head_epochs + 1

    def trainable(self, local: Local, epoch: int, epochs: int) -> Collection[str]:
        """The personal layers first, then all others."""
        own = fnmatch.filter(local.params, self.layers) if self.layers else local.head
        if epoch < self.head_epochs:
            return own
        return [name for name in local.params if name not in own]
