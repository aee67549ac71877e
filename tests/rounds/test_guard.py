"""The guard in the simulator, what it knows of a model's features, and the cap on attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto import FedAvg, FedProto
from fedproto.config import read_config
from fedproto.config.options import DEFENCES
from fedproto.data.samples import TensorSamples
from fedproto.data.tasks import task_named
from fedproto.engines.setting import setting_of
from fedproto.errors import ConfigError
from fedproto.rounds import run_rounds
from fedproto.rounds.aggregate import outliers, reason_to_refuse
from fedproto.rounds.jobs import prepare
from fedproto.rounds.loop import finish_round
from fedproto.strategies.aggregation import cap_attention, combine
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Setting
from fedproto.types import ServerState
from helpers import (
    begin,
    config_of,
    engine_for,
    job_of,
    make_setting,
    make_state,
    make_update,
    planned,
    train,
)


def test_the_shape_of_features_is_asked_of_the_model(small_federation, small_model):
    small_model.train()
    engine = engine_for(small_federation, small_model)
    assert setting_of(engine.workload, {}).features == (6, 1)
    assert small_model.training


def test_a_model_that_cannot_be_asked_is_not_guarded_by_shape(small_federation, small_model):
    engine = engine_for(small_federation, small_model)
    samples = TensorSamples(torch.zeros(3, 9), torch.zeros(3, dtype=torch.int64))
    wrong = replace(small_federation, input_shape=(9,), samples=samples)
    assert setting_of(replace(engine.workload, federation=wrong), {}).features is None


def test_the_simulator_refuses_what_a_server_would(small_federation, small_model):
    class Lies(type(engine_for(small_federation, small_model))):
        def train(self, jobs):
            first, *others = super().train(jobs)
            return [replace(first, num_examples=10**6), *others]

    engine = Lies(engine_for(small_federation, small_model).workload)
    run = begin(config_of(FedProto(), delta=0), small_model)
    for _, record in run_rounds([run], engine):
        liar = record.cohort[0]
        assert list(record.failures) == [liar]
        assert "claims 1000000 samples" in record.failures[liar]
        assert liar not in record.attention


def test_an_update_in_anothers_place_is_refused(small_federation, small_model):
    run = begin(config_of(FedProto(), delta=0), small_model)
    engine = engine_for(small_federation, small_model)
    setting = prepare([run], engine)
    plan = planned(run, small_federation)
    updates = engine.train(plan.jobs)
    closed = finish_round(run, plan, [updates[0], updates[0], *updates[2:]], setting)
    assert closed.failures == {plan.cohort[1]: f"the update is of client {plan.cohort[0]}"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e35, -1e35])
def test_a_single_value_out_of_range_is_seen(value, small_federation, small_model):
    job = planned(begin(config_of(FedAvg(), delta=0), small_model), small_federation).jobs[0]
    (update,) = engine_for(small_federation, small_model).train([job])
    setting = Setting(job.state.params, 4, 6)
    assert reason_to_refuse(update, job, setting) is None
    update.params["classifier.weight"][1, 2] = value
    assert "'classifier.weight' is NaN" in (reason_to_refuse(update, job, setting) or "")


@pytest.mark.parametrize("loss", [float("nan"), -float("inf"), 1e305, -1e305])
def test_a_loss_that_no_record_can_keep_is_refused(loss, small_federation, small_model):
    """Numbers this large are refused when a run's records are read."""
    job = planned(begin(config_of(FedAvg(), delta=0), small_model), small_federation).jobs[0]
    (update,) = engine_for(small_federation, small_model).train([job])
    setting = Setting(job.state.params, 4, 6)
    for one, refused in ((loss, True), (None, False), (9.0, False)):
        reason = reason_to_refuse(replace(update, train_loss=one), job, setting) or ""
        assert ("training loss is NaN, infinite or implausibly large" in reason) is refused


def test_a_tensor_without_values_has_nothing_wrong(small_federation, small_model):
    job = planned(begin(config_of(FedAvg(), delta=0), small_model), small_federation).jobs[0]
    (update,) = engine_for(small_federation, small_model).train([job])
    empty = {"none": torch.empty(0)}
    job = replace(job, state=replace(job.state, buffers=empty))
    setting = Setting(job.state.params, 4, 6)
    assert reason_to_refuse(replace(update, buffers=empty), job, setting) is None


def test_incidents_of_an_engine_are_in_the_record(small_federation, small_model):
    class Unlucky(type(engine_for(small_federation, small_model))):
        def take_incidents(self):
            return ["it rained"]

    engine = Unlucky(engine_for(small_federation, small_model).workload)
    run = begin(config_of(FedProto()), small_model)
    assert all(record.note == "it rained" for _, record in run_rounds([run], engine))


@pytest.mark.parametrize(
    ("shares", "cap", "expected"),
    [
        ([0.7, 0.2, 0.1], 0.5, [0.5, 1 / 3, 1 / 6]),
        ([0.6, 0.3, 0.1], 0.35, [0.35, 0.35, 0.3]),
        ([0.5, 0.3, 0.2], 0.1, [1 / 3, 1 / 3, 1 / 3]),
        ([0.4, 0.3, 0.3], 0.5, [0.4, 0.3, 0.3]),
        ([1.0, 0.0, 0.0], 0.6, [0.6, 0.2, 0.2]),
        ([1.0], 0.2, [1.0]),
    ],
)
def test_a_cap_shares_out_what_it_cuts_off(shares, cap, expected):
    capped = cap_attention(torch.tensor(shares, dtype=torch.float64), cap)
    assert capped.tolist() == pytest.approx(expected)


@given(
    st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=9).filter(sum),
    st.floats(0.01, 1),
)
def test_capped_shares_sum_to_one_below_the_cap_and_keep_their_order(raw, cap):
    shares = torch.tensor(raw, dtype=torch.float64)
    shares = shares / shares.sum()
    capped = cap_attention(shares, cap)
    assert float(capped.sum()) == pytest.approx(1)
    assert float(capped.max()) <= max(cap, 1 / len(raw)) * (1 + 1e-9)
    order = shares.argsort(stable=True)
    assert bool((capped[order].diff() >= -1e-12).all())


def test_absurd_but_finite_updates_are_refused_by_what_the_cohort_does():
    updates = [make_update(client, seed=7) for client in range(5)]
    sent = {name: tensor * 0 for name, tensor in updates[0].params.items()}
    assert outliers(updates, sent) == {}
    huge = replace(
        updates[2], params={name: tensor * 1e5 for name, tensor in updates[2].params.items()}
    )
    found = outliers([*updates[:2], huge, *updates[3:]], sent)
    assert list(found) == [2]
    assert "times as long as the cohort's median" in found[2]
    near = replace(
        updates[2], params={name: tensor * 10 for name, tensor in updates[2].params.items()}
    )
    assert outliers([*updates[:2], near, *updates[3:]], sent) == {}
    assert list(outliers([*updates[:2], near, *updates[3:]], sent, times=3.0)) == [2]


def test_clients_that_did_not_move_do_not_make_the_others_outliers():
    updates = [make_update(client, seed=7) for client in range(3)]
    sent = {name: tensor * 0 for name, tensor in updates[0].params.items()}
    still = [replace(make_update(client), params=sent) for client in range(3, 10)]
    assert outliers([*updates, *still], sent) == {}


def test_clients_that_did_not_move_do_not_get_the_others_clipped():
    updates = [make_update(client, seed=7) for client in range(3)]
    sent = {name: tensor * 0 for name, tensor in updates[0].params.items()}
    still = [replace(make_update(client), params=sent) for client in range(3, 10)]
    state = ServerState(0, sent, {})
    everyone = [replace(one, buffers={}) for one in (*updates, *still)]
    weights = FedAvg(weights="uniform").weigh(state, everyone)
    following, _ = combine(DEFENCES["clip"], state, everyone, weights)
    for name, moved in following.params.items():
        told = sum(one.params[name] for one in everyone) / len(everyone)
        torch.testing.assert_close(moved, told)


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        ("params", "weight", 1e20, "implausibly large"),
        ("params", "weight", 1e29, "implausibly large"),
        ("buffers", "running_var", -1000.0, "running_var"),
        ("buffers", "running_var", 1e29, "running_var"),
    ],
)
def test_absurd_values_are_refused_even_from_a_client_alone(where, name, value, reason):
    update = make_update(1)
    state, setting = ServerState(0, update.params, update.buffers), make_setting()
    job = job_of(Method(FedProto()), state, 1, update.num_examples)
    assert reason_to_refuse(update, job, setting) is None
    tensors = getattr(update, where)
    absurd = replace(update, **{where: {**tensors, name: torch.full_like(tensors[name], value)}})
    assert reason in reason_to_refuse(absurd, job, setting)


def test_what_combines_to_no_number_leaves_the_model_as_it_was(small_federation, small_model):
    """Nobody hostile: a learning rate at which distances overflow in an attention."""

    @dataclass(frozen=True)
    class Overflowing(FedAvg):
        def weigh(self, state, updates):
            weights = super().weigh(state, updates)
            return replace(weights, client=weights.client * torch.nan)

    run = train(Overflowing(), small_federation, small_model, rounds=2)
    for record in run.records:
        assert "not finite" in record.note
        assert record.attention == {}
    before = dict(small_model.named_parameters())
    assert all(torch.equal(run.state.params[name], before[name]) for name in before)


def test_tallies_must_fit_the_samples_a_client_holds():
    segmentation = task_named("segmentation")
    shape, classes = (3, 4, 4), 2
    good = torch.tensor([10.0, 6, 8, 8, 3.5])
    check = partial(segmentation.reason_to_refuse_tally, num_classes=classes, input_shape=shape)
    assert check(good, 2) is None
    assert "shape" in check(good[:-1], 2)
    assert "shape" in check(torch.ones(2), 2)
    assert "counts" in check(good, 1)
    assert "counts" in check(torch.tensor([1e6, 0, 0, 1e6, 0]), 2)
    assert "counts" in check(torch.tensor([0.5, 0, 0, 0.5, 0]), 2)
    assert "loss" in check(torch.tensor([1.0, 0, 0, 1, 1e30]), 2)
    classification = task_named("classification")
    check = partial(classification.reason_to_refuse_tally, num_classes=10, input_shape=(1, 8, 8))
    assert check(torch.tensor([20.0, 11, 4.5]), 20) is None
    assert "shape" in check(torch.ones(4), 20)
    assert "loss" in check(torch.tensor([20.0, 11, 1e30]), 20)


def test_no_client_counts_for_more_than_its_cap():
    """A client with 9,999,999 invented samples, beside nine with a hundred each."""
    updates = [make_update(client, 9_999_999 if client == 0 else 100) for client in range(10)]
    state = make_state()
    weights = FedAvg().weigh(state, updates)
    assert float(weights.client[0]) > 0.9999
    _, counted = combine(DEFENCES["clip"], state, updates, weights)
    assert counted.max() <= 0.2 + 1e-9
    assert float(counted.sum()) == pytest.approx(1)


def test_a_defence_is_part_of_a_runs_own_description():
    config = read_config({"strategy": {"name": "fedavg"}})
    assert config.flower.defence == "clip"
    assert config.defended().aggregate == DEFENCES["clip"]
    own = read_config({"strategy": {"name": "fedavg"}, "aggregate": {"rule": "median"}})
    assert own.defended().aggregate == own.aggregate
    pooled = read_config({"strategy": {"name": "centralized"}})
    with pytest.raises(ConfigError, match="cannot run over Flower"):
        pooled.defended()
    assert config.defended().digest() != config.digest()
