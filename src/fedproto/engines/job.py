"""A job: what an engine is given to train."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedproto.engines.training import TrainOptions
from fedproto.engines.training.augment import AugmentOptions
from fedproto.rng.schedule import BatchOrder
from fedproto.strategies.base import PERSONAL, Strategy
from fedproto.strategies.sections import Method
from fedproto.types import ServerState, Tensors, part


@dataclass(frozen=True)
class LocalJob:
    """Train this client from this state with this strategy for these epochs.

    Attributes:
        state: The received state; its memory stays with the server.
        method: The strategy and sections, which give the local objective and the report.
        batches: The epochs to do and the order of the samples in each.
        seed: For randomness inside the model (dropout).
        secret: For the client's own draws, the same in every round; over a network a client has a
            secret of its own instead.
        augment: How training images are varied; None for not at all.
        broadcast: Tensors that the strategy sends beside the weights.
        memory: Tensors that the client kept; empty where the client itself keeps them.
        run: Digest of the run's configuration, by which a client that remembers tells runs apart.
        last_round: The last round whose update of this client was accepted; None for none.
        keep_from: The earliest round to which the run may go back.
    """

    client: int
    state: ServerState
    method: Method
    batches: BatchOrder
    train: TrainOptions
    lr: float
    seed: int
    secret: int = 0
    augment: AugmentOptions | None = None
    broadcast: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    run: str = ""
    last_round: int | None = None
    keep_from: int = 0

    @property
    def strategy(self) -> Strategy:
        """The method's strategy."""
        return self.method.strategy

    def personalised(self) -> LocalJob:
        """The same job from the received model with the client's personal parameters over it."""
        own = {} if self.method.needs.personal_model else part(PERSONAL, self.memory)
        return replace(self, state=laid_over(self.state, own)) if own else self

    @property
    def personal_model(self) -> ServerState:
        """The client's own model: as received, with all that stays on the client over it."""
        return laid_over(self.state, part(PERSONAL, self.memory))


def laid_over(state: ServerState, own: Tensors) -> ServerState:
    """A model with a client's own tensors in place of some of its own."""
    if not own:
        return state
    return replace(
        state,
        params={name: own.get(name, one) for name, one in state.params.items()},
        buffers={name: own.get(name, one) for name, one in state.buffers.items()},
    )
