"""Small federations, sweeps and helpers that the engines' tests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedproto.config import RunConfig, ScheduleOptions
from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.base import ENGINES, Engine, EngineOptions, Workload
from fedproto.engines.job import LocalJob
from fedproto.engines.reference import read_state
from fedproto.engines.training import TrainOptions
from fedproto.models.base import ModelOptions, build_model
from fedproto.models.cnn import CNNOptions
from fedproto.models.mlp import MLPOptions
from fedproto.options import Options
from fedproto.rounds import run_rounds
from fedproto.rounds.planning import equip, plan_round, remember_all
from fedproto.rounds.runs import Run
from fedproto.strategies import (
    Centralized,
    FedAtt,
    FedAvg,
    FedDisco,
    FedDyn,
    FedLC,
    FedNova,
    FedProto,
    FedProx,
    FedRS,
    Guided,
    ProtoHead,
    QFedAvg,
    Scaffold,
    Strategy,
)
from fedproto.strategies.contract import Declared, Looks, Objective, Report, Virtual
from fedproto.strategies.served import TRAINED
from fedproto.types import ClientWeights, RoundRecord, ServerState, part, under

CLASSES = 4


@dataclass(frozen=True)
class Everything(Strategy):
    """Uses all of the local objective at once, as no method does."""

    looks: ClassVar[Looks] = Looks(
        classes=True, before=frozenset({"features", "loss"}), after=frozenset({"features"})
    )

    def server_memory(self, setting):
        shape = (setting.num_classes, setting.features.channels)
        means = Declared(shape, setting.float_type, initial=0.1, broadcast=True)
        return {"seen/means": means, **setting.like_params("way", broadcast=True)}

    def client_memory(self, setting):
        return {"own/rounds": Declared((), torch.int64), **setting.like_params("own-way")}

    def payload(self, setting, num_examples):
        del num_examples
        shape = (setting.num_classes, setting.features.channels)
        return {
            "seen/sums": Declared(shape, setting.float_type),
            "seen/loss": Declared((), setting.float_type, low=0),
            "seen/rounds": Declared((), torch.int64, low=1),
        }

    def objective(self, local):
        lacking = (local.classes == 0).nonzero().flatten()
        lacking = lacking if len(lacking) else torch.arange(2, device=lacking.device)
        features = local.broadcast["seen/means"][lacking]
        linear = {
            name: one - 0.1 * part("own-way", local.memory)[name]
            for name, one in part("way", local.broadcast).items()
        }
        return Objective(
            proximal=0.3,
            linear=linear,
            scale=torch.where(local.classes > 0, 1.0, 0.6),
            offset=-0.1 * local.classes,
            virtual=Virtual(features, lacking, weight=0.5),
        )

    def report(self, local, trained, before, after):
        ways = {name: trained[name] - one for name, one in local.params.items()}
        rounds = local.memory["own/rounds"] + 1
        payload = {"seen/sums": after.sums, "seen/loss": before.loss, "seen/rounds": rounds}
        return Report(payload, {"own/rounds": rounds, **under("own-way", ways)})

    def weigh(self, state, updates):
        del state
        loss = torch.stack([update.payload["seen/loss"].double().cpu() for update in updates])
        return ClientWeights(loss.softmax(dim=0), scale=1 / (1 + loss))

    def remember(self, state, updates, setting):
        del setting
        means = torch.stack([update.payload["seen/sums"] for update in updates]).mean(dim=0)
        way = {
            name: torch.stack([update.params[name] - old for update in updates]).mean(dim=0)
            for name, old in state.params.items()
        }
        return {"seen/means": means / 10, **under("way", way)}


STRATEGIES: list[Strategy] = [
    FedAvg(),
    FedAvg(weights="uniform", tolerate_partial_work=True, sampling="uniform"),
    FedProx(mu=1.0),
    FedAtt(),
    FedProto(),
    FedProto(measure="same-class-distance", margins="local"),
    Centralized(),
    Scaffold(),
    FedDyn(alpha=0.3),
    FedNova(weights="uniform"),
    FedRS(scale=0.3),
    FedLC(tau=0.5),
    QFedAvg(q=0.5),
    FedDisco(),
    FedAvg(head="by-class", head_weights="counts"),
    FedAvg(weights="balanced", rehearsal=0.5, rehearsed="received"),
    FedRS(head="by-class", rehearsal=0.3, rehearsed="running"),
    FedProto(head="by-class", head_weights="margins", rehearsal=0.2, rehearsed="trained"),
    FedProto(weights="balanced", rehearsal=0.2, rehearsed="received"),
    Guided(),
    Guided(rehearsal=0.0, head="by-class", flip=0.3),
    ProtoHead(fade=2.0),
    FedProto(serve="prototypes", forget=1.0),
    Everything(),
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
    sections: Mapping[str, Options] | None = None,
    **options: object,
) -> Outcome:
    """Two rounds of every strategy, without and with stragglers, all in one sweep.

    `sections` replace those of every run's configuration.
    """
    federation = federation or small_federation()
    outcome = Outcome()
    built = model
    if isinstance(model, ModelOptions):
        built = build_model(model, federation.input_shape, CLASSES, seed=5)
    assert isinstance(built, nn.Module)
    running = engine_for(engine, federation, built, outcome.notices, **options)
    params, buffers = read_state(built.to(running.workload.options.torch_dtype()))
    state = ServerState(0, params, (train or TrainOptions()).shared_buffers(built, buffers))
    state = state.to(running.workload.options.torch_device())
    runs = [
        Run(replace(run_config(strategy, delta, train), **(sections or {})), state)
        for strategy in strategies or strategies_for(train)
        for delta in (0.0, 0.7)
    ]
    try:
        for run, record in run_rounds(runs, federation, running):
            outcome.states.append(run.state)
            outcome.records.append(record)
    finally:
        running.close()
    return outcome


def strategies_for(train: TrainOptions | None) -> list[Strategy]:
    """Those that an optimizer suits."""
    plain = train is None or train.memoryless
    return [one for one in STRATEGIES if plain or not one.plain_sgd]


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
    engine = engine_for("reference", federation, model, [])
    setting = remember_all([run], engine)
    return equip(plan_round(run, federation), run, setting, engine).jobs


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def check_same(found: Outcome, truth: Outcome, tolerance: float) -> None:
    assert len(found.records) == len(truth.records)
    for ours, theirs in zip(found.records, truth.records, strict=True):
        assert ours.cohort == theirs.cohort
        assert ours.stragglers == theirs.stragglers
        assert ours.dropped == theirs.dropped
        assert ours.epochs == theirs.epochs
        assert ours.failures == theirs.failures
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)
        assert ours.attention == pytest.approx(theirs.attention, abs=tolerance)
        # The reference sums an epoch's loss in float32, whatever the weights' type.
        assert ours.metrics == pytest.approx(theirs.metrics, abs=max(tolerance, 1e-6))
    for ours, theirs in zip(found.states, truth.states, strict=True):
        assert list(ours.params) == list(theirs.params)
        computed = list(theirs.params)[-2:] if part(TRAINED, theirs.memory) else []
        for name, tensor in theirs.params.items():
            assert ours.params[name].dtype == tensor.dtype
            # A layer that was computed is as exact as the inverse of a covariance can be.
            times = 100 * max(1.0, float(tensor.abs().max())) if name in computed else 1
            assert distance(ours.params[name], tensor) <= times * tolerance, name
        assert ours.memory.keys() == theirs.memory.keys()
        for name, tensor in theirs.memory.items():
            assert ours.memory[name].dtype == tensor.dtype
            assert distance(ours.memory[name], tensor) <= 100 * tolerance, name


MODELS: dict[str, ModelOptions] = {
    "mlp": MLPOptions(hidden=8, features=6),
    "cnn": CNNOptions(channels1=4, channels2=6, features=10),
}
