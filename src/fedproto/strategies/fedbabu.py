"""FedBABU (Oh et al. 2022): the body alone is trained; the head stays as it was drawn."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.values import Local


@STRATEGIES.register("fedbabu")
@dataclass(frozen=True)
class FedBABU(Strategy):
    """Clients train everything but the last layer, which keeps its random initial values.

    All clients thus classify by the same directions, and the body learns to serve them. Clients get
    models of their own afterwards, by fine-tuning the head on their data; as in the paper that is
    part of the evaluation (``evaluate.finetune_epochs``), never of the rounds. The paper draws the
    head as PyTorch does; taken: as the model was built.
    """

    finetunes_head: ClassVar[bool] = True
    splits_head: ClassVar[bool] = True

    def trainable(self, local: Local, epoch: int, epochs: int) -> Collection[str]:
        """All parameters but the last layer's."""
        return [name for name in local.params if name not in local.head]
