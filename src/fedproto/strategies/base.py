"""What a strategy is: a frozen dataclass of options with a few small pure hooks.

The training loop, the choice of clients, the combining of weights, the keeping of memory and the
transport are written once elsewhere, for all strategies. A new strategy overrides only the hooks in
which it differs, and declares what it keeps and sends: `fedproto.strategies.contract`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedproto.equations import sample_shares
from fedproto.options import Options, option
from fedproto.options.registry import Registry
from fedproto.strategies.aggregation import MEAN, AggregateOptions, as_remembered, combine, summed
from fedproto.strategies.contract import (
    Declarations,
    Local,
    Looks,
    Objective,
    Report,
    Seen,
    Setting,
)
from fedproto.types import ClientUpdate, ClientWeights, ServerState, Tensors, Updates


@dataclass(frozen=True)
class Strategy(Options):
    """A federated method.

    Attributes:
        pooled: Whether the data of all clients is trained on as one (no federation at all).
        plain_sgd: Whether the method holds for local gradient descent without momentum alone.
    """

    pooled: ClassVar[bool] = False
    plain_sgd: ClassVar[bool] = False

    sampling: Literal["size", "uniform"] = option(
        "size", "chance of a client to be in the cohort: by its number of samples, or equal"
    )
    tolerate_partial_work: bool = option(
        False, "use the updates of clients that finish only part of their epochs"
    )

    @property
    def looks(self) -> Looks:
        """What clients look up in their own data; subclasses may give a class attribute."""
        return Looks()

    @property
    def weighs_tensors(self) -> bool:
        """Whether clients are weighed tensor by tensor, or row by row; likewise."""
        return False

    def server_memory(self, setting: Setting) -> Declarations:
        """Tensors that the server keeps from round to round; clients get those to be broadcast."""
        del setting
        return {}

    def client_memory(self, setting: Setting) -> Declarations:
        """Tensors that a client keeps between its own rounds; they never leave it."""
        del setting
        return {}

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Tensors that a client of so many samples adds to its update."""
        del setting, num_examples
        return {}

    def objective(self, local: Local) -> Objective:
        """What is added to a client's loss, in the forms that every engine runs by itself."""
        del local
        return Objective()

    def penalty(self, params: Tensors, received: Tensors) -> Tensor | None:
        """Any other term of the local loss, given the current and the received weights.

        Differentiated automatically, which the fast engines do more slowly than an `objective`.
        """
        del params, received
        return None

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """What a client adds to its update and keeps for itself.

        `before` and `after` are what it looked up under the received and the trained model.
        """
        del local, trained, before, after
        return Report()

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """How much each update counts: by number of samples, unless overridden."""
        del state
        return ClientWeights(size_weights(updates))

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """The new values of server memory; what is not named stays as it is.

        Parameters come as the rule of aggregation leaves them.
        """
        del state, updates, setting
        return {}

    def adds(self, state: ServerState, update: ClientUpdate, setting: Setting) -> Tensors:
        """What an update adds to server memory; the rule of aggregation bounds it.

        For memory that is a sum over clients, in place of `remember`.
        """
        del state, update, setting
        return {}

    def aggregate(
        self,
        state: ServerState,
        updates: Updates,
        weights: ClientWeights,
        setting: Setting,
        options: AggregateOptions = MEAN,
    ) -> tuple[ServerState, Tensor]:
        """The next state before the server's step, and what each client counted, ``[K]``.

        Override only for rules that are no weighting at all.
        """
        combined, counted = combine(options, state, updates, weights)
        if not self.server_memory(setting):
            return combined, counted
        seen = as_remembered(options, state, updates)
        memory = {**state.memory, **self.remember(state, seen, setting)}
        parts = [self.adds(state, update, setting) for update in updates]
        memory |= {
            name: memory[name] + one for name, one in summed(options, updates, parts).items()
        }
        return replace(combined, memory=memory), counted

    def sent(self, state: ServerState) -> ServerState:
        """The state that clients go on with, made of the one that is `served`."""
        return state

    def served(
        self, following: ServerState, received: ServerState, setting: Setting
    ) -> ServerState:
        """The state after a round and the server's step, as it is tested, kept and given away.

        `received` is what clients began the round with. Where training goes on with other weights
        than those served, they are kept in memory for `sent`.
        """
        del received, setting
        return following

    def metrics(self, updates: Updates) -> dict[str, float]:
        """Numbers for the round's record."""
        del updates
        return {}


STRATEGIES: Registry[Strategy] = Registry("strategy", "fedproto.strategies")


def size_weights(updates: Updates) -> Tensor:
    """Weights by number of samples, ``[K]``."""
    return sample_shares(torch.tensor([update.num_examples for update in updates]))


def equal_weights(updates: Updates) -> Tensor:
    """The same weight for every client, ``[K]``."""
    return torch.full((len(updates),), 1 / len(updates), dtype=torch.float64)
