"""Small federations, sweeps and helpers that the engines' tests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedproto import (
    Centralized,
    FedAtt,
    FedAvg,
    FedDisco,
    FedDyn,
    FedNova,
    FedProto,
    FedProx,
    Scaffold,
)
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.base import Engine, EngineOptions, LocalJob, Workload
from fedproto.engines.pool import WorkerPool
from fedproto.engines.processes import make_engine
from fedproto.engines.reference import read_state
from fedproto.engines.stacking.layers import Conv, Dense
from fedproto.engines.training import TrainOptions
from fedproto.models.base import ModelOptions, build_model
from fedproto.models.small import CNNOptions, MLPOptions
from fedproto.options import Options
from fedproto.rounds import run_rounds
from fedproto.rounds.jobs import plan_round, prepare
from fedproto.strategies import Strategy
from fedproto.strategies.sections import HeadOptions, ServerOptions
from fedproto.strategies.serve import ServeOptions
from fedproto.strategies.values import Declared, Needs, Objective, Report
from fedproto.types import ClientWeights, RoundRecord, ServerState, part, under
from helpers import Notices, run_from
from paper.baselines import FedLC, FedRS

CLASSES = 4


def conv_step(
    channels: tuple[int, int], image: tuple[int, int], taps: int, *, kernels=False, **more
) -> Conv:
    """A convolution that keeps the size, with ReLU and pooling unless told otherwise."""
    given = {"bias": True, "relu": True, "pool": "valid", "stride": (1, 1), "inputs": (0,)}
    padding = (taps // 2, taps // 2)
    given |= {"output": 1, "name": "conv", "taps": (taps, taps), "padding": padding}
    return Conv(channels=channels, image=image, kernels=kernels, **given | more)


def dense_step(units_in: int, units: int, **more) -> Dense:
    """A dense layer with ReLU."""
    given = {"inputs": (0,), "output": 1, "name": "dense", "relu": True}
    return Dense(units_in=units_in, units=units, **given | more)


@dataclass(frozen=True)
class Everything(Strategy):
    """Uses all of the local objective at once, as no method does."""

    statistics: ClassVar[Needs] = Needs(
        classes=True,
        before=frozenset({"features"}),
        after=frozenset({"features", "class_products"}),
        frozen=("received", "previous"),
    )

    def server_memory(self, setting):
        shape = (setting.num_classes, setting.features[0])
        means = Declared(shape, setting.float_type, initial=0.1, broadcast=True)
        return {"seen/means": means, **setting.like_params("way", broadcast=True)}

    def client_memory(self, setting):
        return {
            "own/rounds": Declared((), torch.int64),
            **setting.like_params("own-way"),
            **setting.like_params("previous", initial=None),
        }

    def payload(self, setting, num_examples):
        del num_examples
        shape = (setting.num_classes, setting.features[0])
        return {
            "seen/sums": Declared(shape, setting.float_type),
            "seen/size": Declared((), setting.float_type, low=0),
            "seen/rounds": Declared((), torch.int64, low=1),
            "seen/variance": Declared(shape, torch.float64, low=0),
        }

    def objective(self, local):
        linear = {
            name: one - 0.1 * part("own-way", local.memory)[name]
            for name, one in part("way", local.broadcast).items()
        }
        return Objective(
            proximal=0.3,
            linear=linear,
            scale=torch.where(local.classes > 0, 1.0, 0.6),
            offset=-0.1 * local.classes,
        )

    def batch_term(self, local, batch):
        means = local.broadcast["seen/means"][batch.targets]
        rare = 1 / local.classes.clamp(min=1)[batch.targets]
        near = (batch.features - means).square().sum(dim=1) * rare
        previous, received = batch.frozen["previous"], batch.frozen["received"]
        far = (batch.features * previous.features).sum(dim=1)
        same = (batch.logits - received.logits).square().sum(dim=1)
        own = 0.01 * local.memory["own/rounds"]
        return batch.mean(0.1 * near - 0.01 * far + (0.05 + own) * same)

    def report(self, local, trained, before, after):
        ways = {name: trained[name] - one for name, one in local.params.items()}
        rounds = local.memory["own/rounds"] + 1
        payload = {
            "seen/sums": after.sum,
            "seen/size": before.sum.norm() / before.count.sum(),
            "seen/rounds": rounds,
            "seen/variance": after.products.diagonal(dim1=-2, dim2=-1),
        }
        kept = {**under("own-way", ways), **under("previous", trained)}
        return Report(payload, {"own/rounds": rounds, **kept})

    def weigh(self, state, updates):
        del state
        size = torch.stack([update.payload["seen/size"].double().cpu() for update in updates])
        return ClientWeights(size.softmax(dim=0), scale=1 / (1 + size))

    def remember(self, state, updates, setting):
        del setting
        means = torch.stack([update.payload["seen/sums"] for update in updates]).mean(dim=0)
        way = {
            name: torch.stack([update.params[name] - old for update in updates]).mean(dim=0)
            for name, old in state.params.items()
        }
        return {"seen/means": means / 10, **under("way", way)}


@dataclass(frozen=True)
class PersonalHead(Strategy):
    """The last layer stays on the client, and trains before the rest."""

    phases: ClassVar[bool] = False
    partial_work: ClassVar[bool] = True

    def personal(self, setting):
        return setting.head


@dataclass(frozen=True)
class Phases(PersonalHead):
    """The same, the layers one after another."""

    def trainable(self, local, epoch, epochs):
        del epochs
        return local.head if epoch == 0 else set(local.params) - set(local.head)


@dataclass(frozen=True)
class TwoModels(Strategy):
    """Every client trains a model of its own beside."""

    @property
    def personal_method(self):
        return FedProx(mu=0.5)


@dataclass(frozen=True)
class Combined:
    """A strategy with sections."""

    strategy: Strategy
    sections: Mapping[str, Options]

    @property
    def plain_sgd(self) -> bool:
        return self.strategy.plain_sgd


MOMENTUM = ServerOptions(optimizer="sgd", momentum=0.9)
STRATEGIES: list[Strategy | Combined] = [
    FedAvg(),
    FedAvg(weights="uniform"),
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
    FedDisco(),
    Combined(FedAvg(), {"head": HeadOptions(rows="counts")}),
    Combined(FedRS(), {"head": HeadOptions(rows="holders"), "server": MOMENTUM}),
    Combined(Scaffold(), {"head": HeadOptions(rows="holders")}),
    Combined(FedDyn(), {"serve": ServeOptions(head="lda", add=True, fade=2.0)}),
    Combined(FedProto(), {"serve": ServeOptions(head="lda", forget=1.0)}),
    Combined(FedAtt(), {"serve": ServeOptions(head="ridge")}),
    Combined(
        Scaffold(),
        {"serve": ServeOptions(average="ema", head="lda", covariance="diagonal")},
    ),
    Combined(FedProx(), {"serve": ServeOptions(head="ncm"), "server": MOMENTUM}),
    Combined(FedProto(), {"server": ServerOptions(lookahead=0.85)}),
    Combined(FedAvg(), {"serve": ServeOptions(average="ema", decay=0.5)}),
    Combined(Scaffold(), {"serve": ServeOptions(average="window", window=2)}),
    Everything(),
    PersonalHead(),
    Phases(),
    TwoModels(),
]


def sections_of(case: Strategy | Combined) -> dict[str, object]:
    """A case as parts of a configuration."""
    if isinstance(case, Strategy):
        return {"strategy": case}
    return {"strategy": case.strategy, **case.sections}


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


def pids(pool: WorkerPool) -> list[int]:
    """The process ids of a pool's workers."""
    return [worker.process.pid for worker in pool._workers]


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
    return make_engine(name, Workload(federation, model, task, chosen, Notices(notices)))


def sweep(
    engine: str,
    model: ModelOptions | nn.Module,
    *,
    federation: Federation | None = None,
    strategies: list[Strategy | Combined] | None = None,
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
        run_from(replace(run_config(strategy, delta, train), **(sections or {})), state)
        for strategy in strategies or strategies_for(train)
        for delta in (0.0, 0.7)
    ]
    try:
        for run, record in run_rounds(runs, running):
            outcome.states.append(run.state)
            outcome.records.append(record)
    finally:
        running.close()
    return outcome


def strategies_for(train: TrainOptions | None) -> list[Strategy | Combined]:
    """Those that an optimizer suits."""
    plain = train is None or train.memoryless
    return [one for one in STRATEGIES if plain or not one.plain_sgd]


def run_config(
    case: Strategy | Combined, delta: float, train: TrainOptions | None = None
) -> RunConfig:
    return RunConfig(
        **sections_of(case),
        train=train or TrainOptions(epochs=3, batch_size=5, lr=0.05),
        schedule=ScheduleOptions(rounds=2, cohort=3, delta=delta),
    )


def jobs_of(
    federation: Federation, model: nn.Module, strategy: Strategy, train: TrainOptions | None = None
) -> list[LocalJob]:
    """The jobs of a first round."""
    run = run_from(run_config(strategy, 0.0, train), ServerState(0, *read_state(model)))
    engine = engine_for("reference", federation, model, [])
    setting = prepare([run], engine)
    return plan_round(run, federation, setting).jobs


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
        assert (ours.served_model is None) == (theirs.served_model is None)
        for name, tensor in theirs.params.items():
            assert ours.params[name].dtype == tensor.dtype
            assert distance(ours.params[name], tensor) <= tolerance, name
        for name, tensor in theirs.served.params.items():
            # A layer that was computed is as exact as the inverse of a covariance can be.
            times = 100 * max(1.0, float(tensor.abs().max()))
            assert distance(ours.served.params[name], tensor) <= times * tolerance, name
        assert ours.memory.keys() == theirs.memory.keys()
        for name, tensor in theirs.memory.items():
            assert ours.memory[name].dtype == tensor.dtype
            assert distance(ours.memory[name], tensor) <= 100 * tolerance, name


MODELS: dict[str, ModelOptions] = {
    "mlp": MLPOptions(hidden=8, features=6),
    "cnn": CNNOptions(channels1=4, channels2=6, features=10),
}
