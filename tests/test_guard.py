"""The guard in the simulator, what it knows of a model's features, and the cap on attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto import FedAvg, FedProto
from fedproto.aggregation import cap_attention
from fedproto.data.samples import TensorSamples
from fedproto.guard import Expected, reason_to_refuse
from fedproto.planning import plan_round, remember_all
from fedproto.rounds import close_round, run_rounds
from fedproto.setting import feature_shape
from fedproto.strategies.contract import FeatureShape, Setting
from helpers import begin, config_of, engine_for, make_state, make_update


def test_the_shape_of_features_is_asked_of_the_model(small_federation, small_model):
    small_model.train()
    engine = engine_for(small_federation, small_model)
    assert feature_shape(engine.workload) == FeatureShape(channels=6, per_sample=1)
    assert small_model.training


def test_a_model_that_cannot_be_asked_is_not_guarded_by_shape(small_federation, small_model):
    engine = engine_for(small_federation, small_model)
    samples = TensorSamples(torch.zeros(3, 9), torch.zeros(3, dtype=torch.int64))
    wrong = replace(small_federation, input_shape=(9,), samples=samples)
    assert feature_shape(replace(engine.workload, federation=wrong)) is None


def test_the_simulator_refuses_what_a_server_would(small_federation, small_model):
    class Lies(type(engine_for(small_federation, small_model))):
        def train(self, jobs, on_done=None):
            first, *others = super().train(jobs, on_done)
            return [replace(first, num_examples=10**6), *others]

    engine = Lies(engine_for(small_federation, small_model).workload)
    run = begin(config_of(FedProto(), delta=0), small_model)
    for _, record in run_rounds([run], small_federation, engine):
        liar = record.cohort[0]
        assert list(record.failures) == [liar]
        assert "claims 1000000 samples" in record.failures[liar]
        assert liar not in record.attention


def test_an_update_in_anothers_place_is_refused(small_federation, small_model):
    run = begin(config_of(FedProto(), delta=0), small_model)
    engine = engine_for(small_federation, small_model)
    setting = remember_all([run], engine)
    plan = plan_round(run, small_federation)
    updates = engine.train(plan.jobs)
    _, record = close_round(run, plan, [updates[0], updates[0], *updates[2:]], setting)
    assert record.failures == {plan.cohort[1]: f"the update says it is of client {plan.cohort[0]}"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e35, -1e35])
def test_a_single_value_out_of_range_is_seen(value, small_federation, small_model):
    job = plan_round(begin(config_of(FedAvg(), delta=0), small_model), small_federation).jobs[0]
    (update,) = engine_for(small_federation, small_model).train([job])
    expected = Expected.of(job, Setting(job.state.params, 4, 6))
    assert reason_to_refuse(update, expected) is None
    update.params["classifier.weight"][1, 2] = value
    assert "'classifier.weight' is not finite" in (reason_to_refuse(update, expected) or "")


def test_a_tensor_without_values_has_nothing_wrong(small_federation, small_model):
    job = plan_round(begin(config_of(FedAvg(), delta=0), small_model), small_federation).jobs[0]
    (update,) = engine_for(small_federation, small_model).train([job])
    empty = {"none": torch.empty(0)}
    job = replace(job, state=replace(job.state, buffers=empty))
    expected = Expected.of(job, Setting(job.state.params, 4, 6))
    assert reason_to_refuse(replace(update, buffers=empty), expected) is None


def test_incidents_of_an_engine_are_in_the_record(small_federation, small_model):
    class Unlucky(type(engine_for(small_federation, small_model))):
        def take_incidents(self):
            return ["it rained"]

    engine = Unlucky(engine_for(small_federation, small_model).workload)
    run = begin(config_of(FedProto()), small_model)
    assert all(
        record.note == "it rained" for _, record in run_rounds([run], small_federation, engine)
    )


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


def test_the_option_caps_every_round():
    updates = [make_update(client, size) for client, size in enumerate((1000, 10, 10))]
    for state in (make_state(0), make_state(1)):
        weights = FedProto(max_attention=0.4).weigh(state, updates).client
        assert float(weights.max()) <= 0.4 + 1e-9
        assert float(weights.sum()) == pytest.approx(1)
