"""What a strategy is: a frozen dataclass of options with a few small pure hooks.

The training loop, the choice of clients, the combining of weights and the transport are written
once elsewhere, for all strategies. A new strategy overrides only the hooks in which it differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedproto.equations import sample_shares, weighted_average
from fedproto.options import Options, option
from fedproto.registry import Registry
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState, Tensors


@dataclass(frozen=True)
class Strategy(Options):
    """A federated method.

    Attributes:
        needs_prototypes: Whether clients compute prototypes before and after training.
        pooled: Whether the data of all clients is trained on as one (no federation at all).
        server_step: How far the aggregate moves from the old weights towards the combined ones.
    """

    needs_prototypes: ClassVar[bool] = False
    pooled: ClassVar[bool] = False

    sampling: Literal["size", "uniform"] = option(
        "size", "chance of a client to be in the cohort: by its number of samples, or equal"
    )
    tolerate_partial_work: bool = option(
        False, "use the updates of clients that finish only part of their epochs"
    )

    @property
    def server_step(self) -> float:
        """1 takes the combined weights as they are."""
        return 1.0

    @property
    def proximal(self) -> float:
        """Strength μ of the term ``μ/2 ‖w − w^t‖²`` in the local loss; 0 for none."""
        return 0.0

    def penalty(self, params: Tensors, received: Tensors) -> Tensor | None:
        """A term added to the local loss, given the current and the received weights.

        The proximal term unless overridden; None where it is 0, so that nothing at all is added.
        """
        if self.proximal == 0:
            return None
        squares = [(params[name] - received[name]).square().sum() for name in params]
        return self.proximal / 2 * torch.stack(squares).sum()

    def summarize(self, before: Prototypes, after: Prototypes) -> Tensor | None:
        """What a client tells about how its prototypes moved in training, ``[..., C]``.

        Prototypes may have leading dimensions, one place per client: an engine that trains many
        clients at once asks for all of them at once.
        """
        del before, after
        return None

    def margin_bounds(self, channels: int) -> tuple[float, float]:
        """Smallest and largest value that `summarize` can give, for features of D channels."""
        del channels
        return -math.inf, math.inf

    def weigh(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ClientWeights:
        """How much each update counts: by number of samples, unless overridden."""
        del state
        return ClientWeights(size_weights(updates))

    def next_prototypes(
        self, state: ServerState, updates: Sequence[ClientUpdate]
    ) -> Prototypes | None:
        """The aggregate prototypes the server keeps for the next round."""
        del state, updates
        return None

    def aggregate(
        self, state: ServerState, updates: Sequence[ClientUpdate], weights: ClientWeights
    ) -> ServerState:
        """The next state. Override only for rules that are no weighting at all."""
        return combine(self, state, updates, weights)


STRATEGIES: Registry[Strategy] = Registry("strategy", "fedproto.strategies")


def size_weights(updates: Sequence[ClientUpdate]) -> Tensor:
    """Weights by number of samples, ``[K]``."""
    return sample_shares(torch.tensor([update.num_examples for update in updates]))


def combine(
    strategy: Strategy,
    state: ServerState,
    updates: Sequence[ClientUpdate],
    weights: ClientWeights,
) -> ServerState:
    """Averages the updates with the given weights.

    Parameters are averaged by the weights of their tensor and moved by the strategy's server step.
    Buffers (batch-norm statistics) are averaged by the clients' weights and never stepped beyond
    the average, which could make a variance negative; integer and boolean buffers (counters) keep
    their type and take the largest value of any client.
    """
    per_tensor = weights.tensor or {}
    params = {}
    for name, old in state.params.items():
        target = weighted_average(
            [update.params[name] for update in updates], per_tensor.get(name, weights.client)
        )
        step = strategy.server_step
        params[name] = target if step == 1 else torch.lerp(old, target, step)
    buffers = {}
    for name, old in state.buffers.items():
        values = [update.buffers[name] for update in updates]
        if old.is_floating_point():
            buffers[name] = weighted_average(values, weights.client)
        else:
            buffers[name] = torch.stack(values).amax(dim=0)
    return ServerState(state.round + 1, params, buffers, strategy.next_prototypes(state, updates))
