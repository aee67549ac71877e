"""FedAvg (McMahan et al. 2017), and the paper's "fairness" policy as its option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, equal_weights, size_weights
from fedproto.types import ClientUpdate, ClientWeights, ServerState


@STRATEGIES.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Strategy):
    """Averages the clients' weights by number of samples, or all alike."""

    weights: Literal["size", "uniform"] = option(
        "size", "weigh a client by its number of samples, or all alike ('fairness')"
    )

    def weigh(self, state: ServerState, updates: Sequence[ClientUpdate]) -> ClientWeights:
        """Shares of the samples, or 1/K for everyone."""
        del state
        if self.weights == "size":
            return ClientWeights(size_weights(updates))
        return ClientWeights(equal_weights(updates))
