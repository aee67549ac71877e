"""The recommended settings: equal weights, toleration and momentum, and what classes tell."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from fedproto.options import option
from fedproto.strategies.aggregation import MEAN, AggregateOptions
from fedproto.strategies.base import STRATEGIES
from fedproto.strategies.contract import Declarations, Setting
from fedproto.strategies.fedavg import FedAvg
from fedproto.strategies.server import ServerOptions
from fedproto.types import ClientWeights, ServerState, Updates, part, under

OWN = "guided"
"""Name in memory, where ``[server]`` may keep a momentum beside it."""


@STRATEGIES.register("guided")
@dataclass(frozen=True)
class Guided(FedAvg):
    """What docs/guidance.md recommends for any model; nothing needs to be chosen.

    Row c of the last layer is averaged over the clients that hold class c, all alike, and the
    server steps with momentum as FedAvgM does. Its own step comes before that of ``[server]``.
    """

    tolerate_partial_work: bool = True
    weights: Literal["size", "uniform", "balanced"] = option(
        "uniform", "weigh a client by its number of samples, all alike, or for balanced classes"
    )
    head: Literal["average", "by-class"] = "by-class"
    momentum: float = option(0.9, "m ← momentum·m + g on the server", at_least=0, at_most=1)

    @property
    def _own_step(self) -> ServerOptions:
        return ServerOptions(optimizer="sgd", momentum=self.momentum)

    def server_memory(self, setting: Setting) -> Declarations:
        """The momentum, besides what guidance keeps."""
        momentum = under(OWN, self._own_step.memory(setting))
        return {**super().server_memory(setting), **momentum}

    def aggregate(
        self,
        state: ServerState,
        updates: Updates,
        weights: ClientWeights,
        setting: Setting,
        options: AggregateOptions = MEAN,
    ) -> tuple[ServerState, Tensor]:
        """The averages, and a step with momentum towards them."""
        combined, counted = super().aggregate(state, updates, weights, setting, options)
        before = replace(state, memory=part(OWN, state.memory))
        after = self._own_step.step(before, replace(combined, memory={}))
        memory = {**combined.memory, **under(OWN, after.memory)}
        return replace(after, memory=memory), counted


@STRATEGIES.register("protohead")
@dataclass(frozen=True)
class ProtoHead(Guided):
    """What docs/guidance.md recommends to classify; nothing needs to be chosen.

    Clients train as with FedAvgM. The model that is tested and kept adds to its own last layer the
    one that prototypes give, which counts less and less as the trained one grows up.
    """

    head: Literal["average", "by-class"] = "average"
    serve: Literal["trained", "prototypes", "both"] = "both"
    fade: float = 50.0
