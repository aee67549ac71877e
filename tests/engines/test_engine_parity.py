"""Every engine gives the reference engine's records and weights."""

import functools
import itertools

import pytest
import torch
from torch import nn

from engine_cases import (
    CLASSES,
    MODELS,
    STRATEGIES,
    Combined,
    Everything,
    Outcome,
    Phases,
    TwoModels,
    check_same,
    distance,
    engine_for,
    jobs_of,
    small_federation,
    sweep,
)
from fedproto import (
    AggregateOptions,
    FedAvg,
    FedProto,
    FedProx,
    Scaffold,
    ServeOptions,
    ServerOptions,
)
from fedproto.config.options import ScheduleOptions
from fedproto.engines.base import ENGINES
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.models.small import CNN4Options, CNNOptions
from fedproto.options import Options
from helpers import same_tensors
from paper.baselines import FedRS

TOLERANCE = {"float64": 1e-9, "float32": 1e-4}
RULES = {
    "sgd": TrainOptions(epochs=3, batch_size=5, lr=0.05),
    "momentum": TrainOptions(epochs=2, batch_size=4, lr=0.02, momentum=0.9, weight_decay=0.01),
    "decay": TrainOptions(epochs=2, batch_size=7, lr=0.05, weight_decay=0.1),
    "adam": TrainOptions(epochs=2, batch_size=5, lr=0.003, optimizer="adam", weight_decay=0.01),
    "sam": TrainOptions(epochs=2, batch_size=5, lr=0.05, optimizer="sam", rho=0.1),
    "clip": TrainOptions(epochs=2, batch_size=5, lr=0.05, clip_norm=0.5, weight_decay=0.1),
    "centralize": TrainOptions(
        epochs=2, batch_size=5, lr=0.003, optimizer="adam", centralize=True, clip_norm=0.5
    ),
}
KINDS = [
    *(FedAvg(), FedProx(mu=1.0), FedProto(), Scaffold(), FedRS(scale=0.3)),
    *(Everything(), Phases(), TwoModels()),
]
"""One of each kind of local objective: what an optimizer or an image's shape can go wrong with."""
OTHERS = [name for name in ENGINES.names() if name != "reference"]


@functools.cache
def _truth(model: str, rule: str, dtype: str) -> Outcome:
    strategies = STRATEGIES if rule == "sgd" else kinds_for(rule)
    return sweep("reference", MODELS[model], strategies=strategies, train=RULES[rule], dtype=dtype)


def kinds_for(rule: str) -> list:
    """The kinds that an optimizer suits."""
    return [one for one in KINDS if RULES[rule].memoryless or not one.plain_sgd]


CASES = [
    case
    for case in itertools.product(OTHERS, MODELS, TOLERANCE)
    if case[0] != "captured" or case[1:] == ("mlp", "float64")
]
"""Engine, model and type; of `captured` one, whose jobs the reference engine trains on a CPU."""


@pytest.mark.parametrize(("engine", "model", "dtype"), CASES)
def test_every_strategy_after_one_and_two_rounds(engine, model, dtype):
    truth = _truth(model, "sgd", dtype)
    moved = distance(
        truth.states[-1].params["classifier.weight"], truth.states[0].params["classifier.weight"]
    )
    assert moved > 1e-3, "nothing was learned, so nothing is compared"
    found = sweep(engine, MODELS[model], train=RULES["sgd"], dtype=dtype)
    check_same(found, truth, TOLERANCE[dtype])


def with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(168, CLASSES)
    )


@pytest.mark.parametrize("engine", ENGINES.names())
def test_an_average_is_served_and_training_stays_as_it_is(engine):
    model = with_batch_norm()
    plain = sweep(engine, model, strategies=[Scaffold()])
    for average in ("ema", "window", "all"):
        case = Combined(Scaffold(), {"serve": ServeOptions(average=average)})
        found = sweep(engine, model, strategies=[case])
        for one, other in zip(found.states, plain.states, strict=True):
            assert same_tensors(one.params, other.params)
            assert same_tensors(one.buffers, other.buffers)
        assert not same_tensors(found.states[-1].served.params, plain.states[-1].params)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda one: type(one).__name__)
def test_every_strategy_by_itself(strategy):
    """What others in the same stack need must not be what makes it work."""
    truth = sweep("reference", MODELS["cnn"], strategies=[strategy])
    found = sweep("stacked", MODELS["cnn"], strategies=[strategy])
    check_same(found, truth, TOLERANCE["float64"])


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "sgd"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_every_optimizer(engine, model, rule):
    found = sweep(engine, MODELS[model], strategies=kinds_for(rule), train=RULES[rule])
    check_same(found, _truth(model, rule, "float64"), TOLERANCE["float64"])


SERVER_STEPS: dict[str, dict[str, Options]] = {
    name: {"server": ServerOptions(optimizer=name, lr=0.1, momentum=0.5 if name == "sgd" else 0.0)}
    for name in ("sgd", "adam")
}
WHOLE = ScheduleOptions(rounds=2, cohort=5, delta=0.7)
AGGREGATIONS: dict[str, dict[str, Options]] = {
    rule: {"aggregate": AggregateOptions(rule=rule, clip_norm="median"), "schedule": WHOLE}
    for rule in ("mean", "median")
}


@pytest.mark.parametrize(
    "sections", [*SERVER_STEPS.values(), *AGGREGATIONS.values()], ids=[*SERVER_STEPS, *AGGREGATIONS]
)
def test_every_server_step_and_aggregation(sections):
    """With a strategy that only weighs, one that has payload and one with all kinds of memory."""
    found = {
        engine: sweep(
            engine,
            MODELS["mlp"],
            strategies=[FedAvg(), FedProto(), Scaffold()],
            sections=sections,
        )
        for engine in ENGINES.names()
    }
    for engine in OTHERS:
        check_same(found[engine], found["reference"], TOLERANCE["float64"])


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        ((3, 8, 8), CNNOptions(channels1=3, channels2=5, features=7)),
        ((2, 5, 4), CNNOptions(channels1=3, channels2=5, features=7)),
        ((3, 35, 16), CNN4Options(channels=4)),
        ((3, 35, 16), CNN4Options(channels=4, batch_norm=True)),
        ((3, 35, 22), CNN4Options(channels=4, pooling="same", init="glorot")),
        (
            (3, 21, 22),
            CNN4Options(channels=4, pooling="same", batch_norm=True, statistics="batch"),
        ),
    ],
)
def test_stacked_images_of_other_shapes(shape, model):
    federation = small_federation(shape)
    truth, found = (
        sweep(engine, model, federation=federation, strategies=KINDS)
        for engine in ("reference", "stacked")
    )
    check_same(found, truth, TOLERANCE["float64"])


def test_jobs_of_different_options_train_in_one_round():
    """A sweep over batch sizes and rates: jobs that cannot share a stack get their own."""
    federation = small_federation()
    model = build_model(MODELS["mlp"], federation.input_shape, CLASSES, seed=0).double()
    jobs = [
        job
        for strategy, rule in ((FedAvg(), "sgd"), (FedProx(), "momentum"), (FedAvg(), "adam"))
        for job in jobs_of(federation, model, strategy, RULES[rule])
    ]
    results = [
        engine_for(name, federation, model, []).train(jobs) for name in ("reference", "stacked")
    ]
    for theirs, ours in zip(*results, strict=True):
        assert ours.client == theirs.client
        assert ours.train_loss == pytest.approx(theirs.train_loss, abs=1e-6)
        for name, tensor in theirs.params.items():
            assert distance(ours.params[name], tensor) <= TOLERANCE["float64"]
