"""FedAvg (McMahan et al. 2017), and the paper's "fairness" policy as its option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, equal_weights, size_weights
from fedproto.strategies.guidance import Guidance
from fedproto.types import ClientWeights, ServerState, Updates


@STRATEGIES.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Guidance):
    """Averages the clients' weights by number of samples, all alike, or for balanced classes."""

    weights: Literal["size", "uniform", "balanced"] = option(
        "size",
        "weigh a client by its number of samples, all alike ('fairness'), or so that the cohort's"
        " classes are balanced",
    )

    @property
    def balances(self) -> bool:
        """Whether clients are weighed so that classes are balanced."""
        return self.weights == "balanced"

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """Shares of the samples, 1/K for everyone, or those that balance the classes."""
        del state
        if self.weights == "size":
            return ClientWeights(size_weights(updates))
        equal = self.weights == "uniform"
        return ClientWeights(equal_weights(updates) if equal else self.balanced(updates))
