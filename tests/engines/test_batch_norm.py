"""Batch-norm statistics in a federation: averaged, frozen or local, with clients of one image."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedproto import FedAvg, Federation, FedProto, extend, run, with_features
from fedproto.data.federation import Client
from fedproto.data.samples import TensorSamples
from fedproto.engines.base import ENGINES
from fedproto.engines.layers import estimate, statistics_names, tolerate_single_values
from fedproto.engines.reference import by_client, read_state
from fedproto.errors import ConfigError
from fedproto.models.base import build_model
from fedproto.models.deeplab import SmallDeepLabOptions
from fedproto.rounds import Run
from fedproto.types import ServerState
from helpers import begin, config_of, engine_for, planned, run_from, same_tensors, train_runs


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Three clients, two of them with a single image; one image of each class is held back."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(8, 3, 16, 16, generator=generator)
    masks = (images[:, 0] > 0.5).long()
    masks[:, 0] = 255
    shares = ([0], [1], [2, 3, 4])
    tests = ([], [5], [6, 7])
    return Federation(
        name="tiny",
        samples=TensorSamples(images, masks),
        clients=tuple(
            Client(torch.tensor(train).numpy(), torch.tensor(test, dtype=torch.int64).numpy())
            for train, test in zip(shares, tests, strict=True)
        ),
        num_classes=2,
        input_shape=(3, 16, 16),
        task="segmentation",
    )


@pytest.fixture
def model(federation) -> nn.Module:
    return build_model(SmallDeepLabOptions(), federation.input_shape, 2, seed=1)


def trained(federation, model, policy: str, strategy=None) -> Run:
    config = config_of(
        strategy or FedProto(),
        rounds=2,
        cohort=3,
        delta=0.0,
        epochs=1,
        batch_size=1,
        optimizer="adam",
        lr=1e-3,
        batch_norm=policy,
    )
    params, buffers = read_state(model)
    run = run_from(config, ServerState(0, params, config.train.shared_buffers(model, buffers)))
    train_runs([run], federation, model)
    return run


@pytest.mark.parametrize("policy", ["average", "frozen", "local"])
@pytest.mark.parametrize("strategy", [FedAvg(), FedProto()], ids=["fedavg", "fedproto"])
def test_clients_of_one_image_and_batches_of_one_train(federation, model, policy, strategy):
    run = trained(federation, model, policy, strategy)
    assert not any(record.failures for record in run.records)
    assert 0 <= run.records[-1].metrics["miou"] <= 1
    assert all(torch.isfinite(value).all() for value in run.state.params.values())
    assert not same_tensors(run.state.params, read_state(model)[0])


def test_frozen_models_need_statistics_that_are_sent(tmp_path):
    own = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    data = Federation.from_clients([(np.random.rand(9, 4), np.arange(9) % 3)] * 3)
    with pytest.raises(ConfigError, match="compares with frozen models"):
        run(
            data, own, "fedntd", rounds=1, cohort=2, train={"batch_norm": "local"},
            out=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_statistics_are_averaged_by_the_clients_weights(federation, model):
    run = begin(config_of(FedAvg(), rounds=1, cohort=3, delta=0.0, epochs=1, batch_size=4), model)
    ((_, record),) = train_runs([run], federation, model)
    engine = engine_for(federation, model)
    start = ServerState(0, *read_state(model))
    jobs = planned(run_from(run.config, start), federation).jobs
    updates = [engine.train_client(job) for job in jobs]
    name = "backbone.features.0.1.running_mean"
    expected = sum(
        record.attention[update.client] * update.buffers[name].double() for update in updates
    )
    assert torch.allclose(run.state.buffers[name].double(), expected, atol=1e-6)
    assert record.attention[2] == pytest.approx(3 / 5)


def test_frozen_statistics_stay_while_scale_and_shift_learn(federation, model):
    run = trained(federation, model, "frozen")
    params, buffers = read_state(model)
    for name, value in buffers.items():
        assert torch.allclose(run.state.buffers[name], value, atol=1e-6), name
    name = "backbone.features.0.1.weight"
    assert not torch.equal(run.state.params[name], params[name])


def test_local_statistics_are_never_sent(federation, model):
    local, average = (trained(federation, model, policy) for policy in ("local", "average"))
    assert not local.state.buffers
    assert average.state.buffers.keys() == statistics_names(model)
    assert local.records[0].bytes_up < average.records[0].bytes_up


def test_local_statistics_do_not_depend_on_the_models_own(federation, model):
    """Whatever statistics the engine's module happens to hold, those of the data are used."""
    config = config_of(FedProto(), rounds=1, cohort=3, delta=0.0, batch_norm="local")
    params, _ = read_state(model)
    states = ServerState(0, params, {})
    engine = engine_for(federation, model)
    first = engine.evaluate([states], federation.test_indices)
    for layer in engine._model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.fill_(9.0)
    assert engine.evaluate([states], federation.test_indices) == first
    assert config.train.shared_buffers(model, read_state(model)[1]) == {}


def test_clients_that_share_samples_are_tested_alike_in_every_engine():
    clients = [(torch.randn(20, 4), torch.randint(0, 3, (20,))) for _ in range(3)]
    federation = Federation.from_clients(clients, num_classes=3)
    first, second, third = federation.clients
    third = Client(third.train, np.concatenate([second.test, third.test]))
    shared = replace(federation, clients=[first, second, third])
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    engine = engine_for(shared, model.double(), dtype="float64", eval_batch_size=2)
    state, scores = ServerState(0, read_state(model)[0], {}), []
    for name in ("reference", "processes"):
        with contextlib.closing(ENGINES.get(name)(engine.workload)) as engine:
            scores += engine.evaluate([state], shared.test_indices)
    assert scores[0] == pytest.approx(scores[1])
    ((train, tested),) = by_client(shared, third.test)
    assert train is third.train
    assert tested is third.test


def test_estimated_statistics_are_the_mean_over_the_batches():
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5))
    batches = [torch.randn(4, 2, 3, 3) for _ in range(3)]
    estimate(model, batches)
    expected = torch.stack([batch.mean(dim=(0, 2, 3)) for batch in batches]).mean(dim=0)
    assert torch.allclose(model[0].running_mean, expected, atol=1e-6)
    assert model[0].momentum == 0.1
    assert not any(module.training for module in model.modules())


def test_a_single_value_is_normalised_by_the_running_statistics():
    layer = nn.BatchNorm2d(2).train()
    one = torch.tensor([3.0, 4.0]).reshape(1, 2, 1, 1)
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(one)
    layer.running_mean.copy_(torch.tensor([1.0, 2.0]))
    tolerate_single_values(layer)
    assert torch.allclose(layer(one).flatten(), torch.tensor([2.0, 2.0]), atol=1e-4)
    assert layer.running_mean.tolist() == [1.0, 2.0]
    assert layer.training
    layer(torch.cat([one, one + 1]))
    assert layer.running_mean.tolist() != [1.0, 2.0]


@pytest.mark.parametrize("strategy", ["ditto", "steady"])
def test_statistics_that_clients_or_server_keep_have_the_models_precision(tmp_path, strategy):
    clients = [(torch.randn(9, 4), torch.randint(0, 3, (9,))) for _ in range(3)]
    federation = Federation.from_clients(clients, num_classes=3)
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def go(rounds, out):
        options = {"cohort": 3, "epochs": 1, "engine": {"name": "reference", "dtype": "float64"}}
        return run(federation, own, strategy, rounds=rounds, out=out, **options).state

    go(1, tmp_path / "later")
    extend(tmp_path / "later", 2)
    assert same_tensors(go(2, tmp_path / "later").buffers, go(2, tmp_path / "once").buffers)


@pytest.mark.parametrize("strategy", ["fedavg", "fedproto"])
@pytest.mark.parametrize("policy", ["average", "frozen", "local"])
def test_a_last_batch_of_one_trains_in_every_engine_alike(policy, strategy):
    torch.manual_seed(0)
    clients = [(torch.randn(9, 4), torch.randint(0, 3, (9,))) for _ in range(4)]
    federation = Federation.from_clients(clients, num_classes=3, test_fraction=0)
    own = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    weights = []
    for engine in ("reference", "processes"):
        result = run(
            federation,
            with_features(own),
            strategy,
            rounds=2,
            cohort=4,
            epochs=2,
            batch_size=4,
            train={"batch_norm": policy},
            engine={"name": engine, "dtype": "float64", "device": "cpu"},
        )
        weights.append(result.state.params)
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-9), name
