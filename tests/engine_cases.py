"""Small federations, sweeps and helpers that the engines' tests share."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from fedproto.config import RunConfig, ScheduleOptions
from fedproto.data.federation import Federation
from fedproto.engines.base import ENGINES, Engine, EngineOptions, Workload
from fedproto.engines.reference import read_state
from fedproto.models.base import ModelOptions, build_model
from fedproto.rounds import Run, plan_round, run_rounds
from fedproto.strategies import Centralized, FedAtt, FedAvg, FedProto, FedProx, Strategy
from fedproto.tasks import task_named
from fedproto.training import TrainOptions
from fedproto.types import LocalJob, RoundRecord, ServerState

CLASSES = 4
STRATEGIES: list[Strategy] = [
    FedAvg(),
    FedAvg(weights="uniform", tolerate_partial_work=True, sampling="uniform"),
    FedProx(mu=1.0),
    FedAtt(),
    FedProto(),
    FedProto(measure="same-class-distance", margins="local"),
    Centralized(),
]


def small_federation(
    shape: tuple[int, ...] = (1, 8, 9), sizes: tuple[int, ...] = (4, 9, 31, 17, 24)
) -> Federation:
    """Clients of unequal sizes, most of which end an epoch with a smaller batch."""
    generator = torch.Generator().manual_seed(3)
    return Federation.from_clients(
        [
            (
                torch.randn(size, *shape, generator=generator),
                torch.randint(0, CLASSES, (size,), generator=generator),
            )
            for size in sizes
        ],
        num_classes=CLASSES,
    )


@dataclass
class Outcome:
    """What a sweep gave: the state and record of every run after every round."""

    states: list[ServerState] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def engine_for(
    name: str, federation: Federation, model: nn.Module, notices: list[str], **options: object
) -> Engine:
    chosen = EngineOptions(name=name, **{"device": "cpu", "dtype": "float64", **options})
    task = task_named("classification")
    return ENGINES.get(name)(Workload(federation, model, task, chosen, notices.append))


def sweep(
    engine: str,
    model: ModelOptions | nn.Module,
    *,
    federation: Federation | None = None,
    strategies: list[Strategy] | None = None,
    train: TrainOptions | None = None,
    **options: object,
) -> Outcome:
    """Two rounds of every strategy, without and with stragglers, all in one sweep."""
    federation = federation or small_federation()
    outcome = Outcome()
    built = model
    if isinstance(model, ModelOptions):
        built = build_model(model, federation.input_shape, CLASSES, seed=5)
    assert isinstance(built, nn.Module)
    running = engine_for(engine, federation, built, outcome.notices, **options)
    state = ServerState(0, *read_state(built.to(running.workload.options.torch_dtype())))
    runs = [
        Run(run_config(strategy, delta, train), state)
        for strategy in strategies or STRATEGIES
        for delta in (0.0, 0.7)
    ]
    try:
        for run, record in run_rounds(runs, federation, running):
            outcome.states.append(run.state)
            outcome.records.append(record)
    finally:
        running.close()
    return outcome


def run_config(strategy: Strategy, delta: float, train: TrainOptions | None = None) -> RunConfig:
    return RunConfig(
        strategy=strategy,
        train=train or TrainOptions(epochs=3, batch_size=5, lr=0.05),
        schedule=ScheduleOptions(rounds=2, cohort=3, delta=delta),
    )


def jobs_of(
    federation: Federation, model: nn.Module, strategy: Strategy, train: TrainOptions | None = None
) -> list[LocalJob]:
    """The jobs of a first round."""
    run = Run(run_config(strategy, 0.0, train), ServerState(0, *read_state(model)))
    return plan_round(0, run, federation).jobs
