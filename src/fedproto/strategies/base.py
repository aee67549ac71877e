"""The interface of strategies: a frozen dataclass of options with a few small pure hooks.

The training loop, the choice of clients, the aggregation, the keeping of memory and the transport
are written once elsewhere, for all strategies. A new strategy overrides only the hooks in which it
differs, and declares the tensors that it keeps and sends. Sections that combine with every strategy
(robust rules, server optimizers, rows of the head, the served model) are in
`fedproto.strategies.sections` and `fedproto.strategies.serve`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedproto.equations import sample_shares
from fedproto.errors import TrainingError
from fedproto.options import Options, Registry
from fedproto.strategies.aggregation import equal_shares
from fedproto.strategies.values import (
    Average,
    Batch,
    Declarations,
    Local,
    Needs,
    Objective,
    Report,
    Seen,
    Setting,
)
from fedproto.types import ClientUpdate, ClientWeights, ServerState, Tensors, Updates, part

PERSONAL = "personal"
"""Group of a client's memory that holds its personal parameters, or its whole personal model."""

OUT_OF_THE_SOFTMAX = -1e4
"""Added to a logit, this leaves nothing of its class in any floating type."""

HOOKS = ("objective", "batch_term", "trainable", "report", "personal")
"""The hooks of `fedproto.strategies.base.Strategy` that engines ask for."""


@dataclass(frozen=True)
class Part(Options):
    """What a strategy and the sections beside it have in common; by default nothing is done."""

    @property
    def needs(self) -> Needs:
        """What the engine that runs jobs must be able to do, as a value."""
        return Needs()

    def check(self, setting: Setting) -> None:
        """Refuses a model with which it has no meaning."""

    def server_memory(self, setting: Setting) -> Declarations:
        """Tensors that the server keeps from round to round; clients get those to be broadcast."""
        return {}

    def payload(self, setting: Setting, num_examples: int) -> Declarations:
        """Tensors that a client with this number of samples adds to its update."""
        return {}

    def report(self, local: Local, trained: Tensors, before: Seen, after: Seen) -> Report:
        """Tensors that a client sends and keeps after training.

        `before` and `after` are the statistics of its data under the received and trained model.
        """
        return Report()


@dataclass(frozen=True)
class Strategy(Part):
    """A federated method.

    Attributes:
        pooled: Whether the data of all clients is trained on as one (no federation at all).
        plain_sgd: Whether the method holds for local gradient descent without momentum alone.
        weighs_tensors: Whether clients are weighed tensor by tensor.
        by_size: Whether clients weigh by number of samples; otherwise they weigh alike.
        partial_work: Whether updates of clients that finish only part of their epochs are used,
            unless ``schedule.partial_work`` says otherwise.
        lookahead: The method's own ``server.lookahead``.
        average: The method's own ``serve.average``.
        splits_head: Whether the last layer is treated apart, so that it must be known.
        finetunes_head: Whether fine-tuning for a new client trains the last layer alone.
        statistics: Statistics that the hooks below need besides the model and the batches.
    """

    pooled: ClassVar[bool] = False
    plain_sgd: ClassVar[bool] = False
    weighs_tensors: ClassVar[bool] = False
    by_size: ClassVar[bool] = True
    partial_work: ClassVar[bool] = False
    lookahead: ClassVar[float] = 0.0
    average: ClassVar[Average] = "none"
    splits_head: ClassVar[bool] = False
    finetunes_head: ClassVar[bool] = False
    statistics: ClassVar[Needs] = Needs()

    _hooks: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._hooks = cls._hooks | {name for name in HOOKS if name in vars(cls)}

    @property
    def needs(self) -> Needs:
        """The capabilities that the strategy needs of an engine, as a value."""
        own = self.personal_method is not None
        return replace(self.statistics, hooks=self._hooks, personal_model=own)

    @property
    def personal_method(self) -> Strategy | None:
        """How each client trains a model of its own beside, on the same batches; None for none."""
        return None

    @property
    def least_epochs(self) -> int:
        """The minimum number of local epochs that the method is defined for."""
        return 1

    def check(self, setting: Setting) -> None:
        """Refuses a model that lacks what the hooks see."""
        if "batch_term" in self._hooks and (not setting.has_head or setting.labels > 1):
            raise TrainingError(
                f"{type(self).__name__} sees features and logits of a batch, which needs a"
                " classifier with features(x) and head(features)"
            )
        if self.splits_head:
            known_head(type(self).__name__, setting)
        self.personal(setting)

    def client_memory(self, setting: Setting) -> Declarations:
        """Tensors that a client keeps between its own rounds; they never leave it."""
        return {}

    def personal(self, setting: Setting) -> Collection[str]:
        """Names of the parameters that stay on the client: kept there, never sent."""
        return ()

    def objective(self, local: Local) -> Objective:
        """Terms of the local loss in closed forms, which every engine runs by itself."""
        return Objective()

    def batch_term(self, local: Local, batch: Batch) -> Tensor | None:
        """A term of the local loss that sees the batch, differentiated automatically."""
        return None

    def trainable(self, local: Local, epoch: int, epochs: int) -> Collection[str] | None:
        """Names of the parameters that train in an epoch; None for all."""
        return None

    def personal_start(self, local: Local, received: Tensors, trained: Tensors) -> Tensors:
        """The personal model before it is trained: where it stood, the received one at first.

        `received` and `trained` are whole models, `trained` the shared one after local training.
        """
        return {**received, **part(PERSONAL, local.memory)}

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """The weight of each update: by number of samples, or equal ones."""
        return ClientWeights(size_weights(updates) if self.by_size else equal_weights(updates))

    def remember(self, state: ServerState, updates: Updates, setting: Setting) -> Tensors:
        """New values of server memory; tensors that are not named stay as they are.

        Statistics come as the aggregation rule leaves them, parameters as they were sent: a sum
        over clients' parameters belongs into `adds`.
        """
        return {}

    def adds(
        self, state: ServerState, update: ClientUpdate, setting: Setting, cohort: int = 1
    ) -> Tensors:
        """A client's addition to server memory; the aggregation rule bounds it.

        For memory that is a sum over clients, in place of `remember`; `cohort` is the number of
        updates that are added up.
        """
        return {}

    def correct(self, combined: ServerState, setting: Setting) -> Tensors:
        """The parameters after aggregation, where the method changes them by its memory."""
        return combined.params

    def metrics(self, updates: Updates) -> dict[str, float]:
        """Numbers for the round's record."""
        return {}


@dataclass(frozen=True)
class HeadAlone(Strategy):
    """Trains the last layer alone, as some methods do for personal or new clients' models."""

    def trainable(self, local: Local, epoch: int, epochs: int) -> Collection[str]:
        """The last layer's parameters."""
        return local.head


STRATEGIES: Registry[Strategy] = Registry("strategy", "fedproto.strategies")


def personal_memory(strategy: Strategy, setting: Setting) -> Declarations:
    """The client memory that holds personal parameters, or the personal model."""
    if strategy.personal_method is not None:
        return setting.like_model(PERSONAL)
    names = strategy.personal(setting)
    own = {name: one for name, one in setting.params.items() if name in names}
    return setting.like(PERSONAL, own, initial=None)


def known_head(wanted_by: str, setting: Setting) -> tuple[str, ...]:
    """Names of the last layer's parameters, for what treats it apart.

    Raises:
        TrainingError: If the model does not tell its last layer.
    """
    if not setting.head:
        raise TrainingError(
            f"{wanted_by} needs a model whose last layer is dense or a convolution with one row per"
            " class; give the model a method last_layer() that returns it"
        )
    return setting.head


def size_weights(updates: Updates) -> Tensor:
    """Weights by number of samples, ``[K]``."""
    return sample_shares(torch.tensor([update.num_examples for update in updates]))


def equal_weights(updates: Updates) -> Tensor:
    """The same weight for every client, ``[K]``."""
    return equal_shares(len(updates))
