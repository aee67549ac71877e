"""Options of the sections that belong to no other package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedproto.data.tasks import headline, lower_is_better
from fedproto.errors import ConfigError, unknown_name
from fedproto.options import Options, option
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.base import Strategy
from fedproto.strategies.sections import Method
from fedproto.types import RoundRecord


@dataclass(frozen=True)
class ScheduleOptions(Options):
    """Number of rounds, and the clients of each."""

    rounds: int = option(200, "number of rounds", at_least=1)
    cohort: int = option(10, "clients per round K'", at_least=1)
    sampling: Literal["uniform", "size"] = option(
        "uniform", "how cohorts are drawn: uniformly, or in proportion to clients' samples"
    )
    delta: float = option(0.0, "share δ of stragglers in a cohort", at_least=0, at_most=1)
    partial_work: bool | None = option(
        None,
        "use updates of clients that finish part of their epochs; none: the strategy's default",
    )
    least_epochs: int = option(
        0, "minimum epochs F' of a straggler: 0 as in the paper, 1 as in FedProx's code", at_least=0
    )


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """When models are tested."""

    every: int = option(1, "rounds between evaluations; the last round is always one", at_least=1)
    last: int = option(1, "number of final rounds that are all evaluated", at_least=1)
    test: bool = option(
        True,
        "evaluate on test data; false leaves it unread, for tuning on validation data",
    )
    validation: bool = option(True, "also evaluate on the server's validation part, if any")
    finetune_epochs: int = option(
        0,
        "epochs of fine-tuning the served model, after the last round, on each client that was in"
        " no cohort, before it is tested there; 0 for none",
        at_least=0,
    )

    def due(self, round_: int, rounds: int) -> bool:
        """Whether to test after this number of rounds, of this number in all."""
        return round_ % self.every == 0 or round_ > rounds - self.last


@dataclass(frozen=True)
class StopOptions(Options):
    """When to stop before the last round; by default never."""

    metric: str | None = option(
        None,
        "metric to watch, on validation data where there is any; by default the task's main score",
    )
    target: float | None = option(None, "stop once the metric reaches this")
    patience: int | None = option(
        None, "stop after this number of tests without a new best", at_least=1
    )

    def watched(self, records: Sequence[RoundRecord]) -> tuple[str, dict[int, float]]:
        """The watched metric, on validation data where there is any, and its values by round."""
        name = self.metric or headline(metric for record in records for metric in record.metrics)
        if any(f"validation_{name}" in record.metrics for record in records):
            name = f"validation_{name}"
        tested = [record for record in records if name in record.metrics]
        return name, {record.round: record.metrics[name] for record in tested}

    def best_round(self, records: Sequence[RoundRecord]) -> int | None:
        """The first round with the best validation score; None where there is no such score."""
        name, values = self.watched(records)
        if not values or not name.startswith("validation_"):
            return None
        return (min if lower_is_better(name) else max)(values, key=values.__getitem__)

    def reason(self, records: Sequence[RoundRecord]) -> str | None:
        """Why to stop after these rounds, by target or patience; None to continue."""
        if self.target is None and self.patience is None:
            return None
        name, by_round = self.watched(records)
        values = list(by_round.values())
        if not values:
            return None
        lower = lower_is_better(name)
        best = min(values) if lower else max(values)
        reached = self.target is not None and (
            best <= self.target if lower else best >= self.target
        )
        if reached:
            return f"{name} reached the target {self.target:g}"
        if self.patience is not None and len(values) - 1 - values.index(best) >= self.patience:
            return f"no better {name} in {self.patience} tests"
        return None


@dataclass(frozen=True)
class StoreOptions(Options):
    """Checkpoints on disk."""

    checkpoint_every: int = option(
        1, "rounds between checkpoints; one follows the last round as well; 0 for none", at_least=0
    )
    keep: int = option(2, "number of newest checkpoints to keep; 0 for all", at_least=0)
    best: bool = option(
        False, "also keep the served model of the round with the best validation score"
    )

    def earliest_return(self, round_: int) -> int:
        """The earliest round from which a run may have to continue, once this one is done."""
        if self.checkpoint_every == 0:
            return round_  # it can only begin again
        if self.keep == 0:
            return 0
        return max(0, (round_ // self.checkpoint_every - self.keep) * self.checkpoint_every)


CLIP = AggregateOptions(
    drop_beyond=8.0, clip_norm="median", clip_times=3.0, max_share=1.5, max_claim=2.0
)
"""Updates beyond eight times the median norm are rejected, those beyond 1.5 times (3 in cohorts of
ten) are clipped, no client's weight exceeds one and a half equal shares, and its claims twice the
median: honest clients are hardly affected."""

DEFENCES = {
    "none": AggregateOptions(),
    "clip": CLIP,
    "median": replace(CLIP, rule="median"),
}
"""The ``[aggregate]`` options that each value of `FlowerOptions.defence` stands for."""

SUSPENSION_WINDOW = 5
"""Last answers of a client that count for its suspension, at most one of each kind a round."""

LEAST_SAMPLES = 5
"""Samples of a class below which real clients report no feature statistics of it."""


POOLS = (
    "a strategy that pools the clients' data cannot run over Flower: the data stays with the"
    " clients; run it with 'fedproto run'"
)


def defended_method(method: Method | Strategy, defence: str = "clip") -> Method:
    """A method with real clients: with a defence and private statistics, unless it has its own.

    Raises:
        ConfigError: If it is none, or the strategy needs all data in one place.
    """
    if not isinstance(method, Method | Strategy):
        raise ConfigError(f"method must be a strategy such as FedAvg(), not {method!r}")
    method = method if isinstance(method, Method) else Method(method)
    if method.strategy.pooled:
        raise ConfigError(POOLS)
    if defence not in DEFENCES:
        raise ConfigError(unknown_name("defence", defence, DEFENCES))
    aggregate, privacy = method.aggregate, method.privacy
    if aggregate == AggregateOptions():
        aggregate = DEFENCES[defence]
    if privacy.min_samples is None:
        privacy = replace(privacy, min_samples=LEAST_SAMPLES)
    return replace(method, aggregate=aggregate, privacy=privacy)


@dataclass(frozen=True)
class FlowerOptions(Options):
    """Deployment over Flower; ignored by a simulation."""

    deadline: float = option(600.0, "time limit for a client's reply to a job, in seconds", above=0)
    wait: float = option(
        120.0, "time to wait for a client that is not connected, in seconds; once each", at_least=0
    )
    min_clients: int = option(
        1,
        "minimum of connected clients, and of usable replies; with fewer a round is skipped",
        at_least=1,
    )
    suspend_after: int = option(
        2,
        "suspend a client after this number of failures among its last five replies to training or"
        " tests; 0 for never",
        at_least=0,
        at_most=SUSPENSION_WINDOW,
    )
    suspend_rounds: int = option(5, "length of a suspension, in rounds", at_least=1)
    defence: Literal["none", "clip", "median"] = option(
        "clip", "defence against hostile clients, if [aggregate] is not set"
    )
    evaluate_on: Literal["clients", "server"] = option(
        "clients", "who tests the model: every client on its test part, or the server"
    )
    clients: int | None = option(
        None, "number of clients, if the server does not have the data", at_least=1
    )
