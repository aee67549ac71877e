"""A job: what an engine is given to train."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedproto.engines.training import TrainOptions
from fedproto.engines.training.augment import AugmentOptions
from fedproto.rng.schedule import BatchOrder
from fedproto.strategies.base import Strategy
from fedproto.types import ServerState, Tensors


@dataclass(frozen=True)
class LocalJob:
    """Train this client from this state with this strategy for these epochs.

    Attributes:
        state: The received state; its memory stays with the server.
        strategy: Gives the local objective and the report, nothing else.
        batches: The epochs to do and the order of the samples in each.
        seed: For whatever is random inside the model (dropout).
        augment: How training images are varied; None for not at all.
        broadcast: What the strategy sends beside the weights.
        memory: What the client kept for the strategy; empty where the client itself keeps it.
        run: Digest of the run's configuration, by which a client that remembers tells runs apart.
        last_round: The last round whose update of this client was accepted; None for none.
        keep_from: The earliest round to which the run may go back.
    """

    client: int
    state: ServerState
    strategy: Strategy
    batches: BatchOrder
    train: TrainOptions
    lr: float
    seed: int
    augment: AugmentOptions | None = None
    broadcast: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    run: str = ""
    last_round: int | None = None
    keep_from: int = 0
