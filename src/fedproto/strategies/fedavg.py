"""FedAvg (McMahan et al. 2017), with the paper's "fairness" option, and centralised training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, equal_weights, size_weights
from fedproto.types import ClientWeights, ServerState, Updates


@STRATEGIES.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Strategy):
    """Averages the clients' weights, by number of samples or equally.

    With ``schedule.sampling = "size"`` large clients are drawn more often; together with weights by
    size they count twice. The usual FedAvg draws clients uniformly and weighs them by size.
    """

    weights: Literal["size", "uniform"] = option(
        "size", "weight of a client: by number of samples, or equal ('fairness')"
    )

    def weigh(self, state: ServerState, updates: Updates) -> ClientWeights:
        """Shares of the samples, or 1/K for every client."""
        return ClientWeights(
            size_weights(updates) if self.weights == "size" else equal_weights(updates)
        )


@STRATEGIES.register("centralized")
@dataclass(frozen=True)
class Centralized(Strategy):
    """Trains one model on the pooled training data of all clients.

    Each round makes as many steps as the cohort of that round would make with all its epochs, so
    that its curve shares the x-axis with federated runs. It has no stragglers and sends nothing.
    """

    pooled: ClassVar[bool] = True
