"""The round loop: sweeps, stragglers, evaluation, stopping, failures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedproto import Centralized, FedAvg, FedProto, FedProx, Scaffold
from fedproto.callback import Callback
from fedproto.config import read_config
from fedproto.config.options import EvaluateOptions, StopOptions
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError, DataError
from fedproto.rounds import Run, run_rounds
from fedproto.rounds.jobs import participants
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord, num_bytes
from helpers import begin, config_of, engine_for, planned, same_tensors, train, train_runs


def test_runs_of_a_sweep_share_cohorts_and_equal_single_runs(small_federation, small_model):
    strategies = [FedAvg(), FedProx(), FedProto()]
    runs = [begin(config_of(strategy), small_model) for strategy in strategies]
    train_runs(runs, small_federation, small_model)
    for run, strategy in zip(runs, strategies, strict=True):
        alone = train(strategy, small_federation, small_model)
        assert same_tensors(run.state.params, alone.state.params)
        assert [record.cohort for record in run.records] == [
            record.cohort for record in runs[0].records
        ]
        assert [record.stragglers for record in run.records] == [
            record.stragglers for record in runs[0].records
        ]


def test_stragglers_are_dropped_or_tolerated(small_federation, small_model):
    strict = train(FedAvg(), small_federation, small_model)
    tolerant = train(FedAvg(), small_federation, small_model, partial_work=True)
    for record in strict.records:
        assert record.dropped == record.stragglers
        assert set(record.attention) == set(record.cohort) - set(record.dropped)
        assert set(record.epochs.values()) == {3}
    for record in tolerant.records:
        assert record.dropped == []
        assert set(record.attention) == set(record.cohort)
        assert all(record.epochs[client] < 3 for client in record.stragglers)


def test_with_all_clients_dropped_the_model_stays_and_the_record_says_why(
    small_federation, small_model
):
    run = train(FedAvg(), small_federation, small_model, delta=1.0)
    assert same_tensors(run.state.params, dict(small_model.state_dict()))
    for record in run.records:
        assert record.note == "the model did not move: every client was dropped as a straggler"
        assert (record.attention, record.bytes_up) == ({}, 0)
        assert record.bytes_down > 0
        assert "accuracy" in record.metrics


def test_evaluation_every_n_rounds_and_at_the_end(small_federation, small_model):
    config = replace(config_of(FedAvg(), rounds=5), evaluate=EvaluateOptions(every=2))
    run = begin(config, small_model)
    train_runs([run], small_federation, small_model)
    tested = [record.round for record in run.records if "accuracy" in record.metrics]
    assert tested == [1, 3, 4]
    assert all("train_loss" in record.metrics for record in run.records)


def test_a_validation_part_is_scored_beside_the_test_part(small_federation, small_model):
    federation = replace(small_federation, validation=small_federation.clients[0].train)
    run = train(FedAvg(), federation, small_model)
    assert {"accuracy", "validation_accuracy"} <= run.records[0].metrics.keys()


def test_the_validation_part_can_be_left_out_unless_it_decides_when_to_stop(
    small_federation, small_model
):
    federation = replace(small_federation, validation=small_federation.clients[0].train)
    without = replace(config_of(FedAvg()), evaluate=EvaluateOptions(validation=False))
    run = begin(without, small_model)
    train_runs([run], federation, small_model)
    assert "validation_accuracy" not in run.records[0].metrics
    stopping = begin(replace(without, stop=StopOptions(patience=9)), small_model)
    train_runs([stopping], federation, small_model)
    assert "validation_accuracy" in stopping.records[0].metrics


def records_with(values: list[float | None], name: str = "accuracy") -> list[RoundRecord]:
    return [
        RoundRecord(t, [], [], [], {}, {}, {} if v is None else {name: v}, 0, 0, 0.0)
        for t, v in enumerate(values)
    ]


def test_stopping_by_target():
    options = StopOptions(target=0.9)
    assert options.reason(records_with([0.5, None, 0.8])) is None
    assert options.reason(records_with([0.5, 0.95])) == "accuracy reached the target 0.9"


def test_stopping_by_patience():
    options = StopOptions(patience=2)
    assert options.reason(records_with([0.5, 0.6, 0.6])) is None
    assert options.reason(records_with([0.5, 0.6, 0.6, 0.55])) == ("no better accuracy in 2 tests")


def test_stopping_looks_at_the_validation_part_where_there_is_one():
    records = records_with([0.5, 0.95], "validation_accuracy")
    assert "validation_accuracy" in StopOptions(target=0.9).reason(records)


def test_a_loss_is_better_when_it_is_lower():
    falling = records_with([2.0, 1.0, 0.5], "loss")
    assert StopOptions(metric="loss", patience=2).reason(falling) is None
    assert StopOptions(metric="loss", target=0.6).reason(falling) is not None
    rising = records_with([0.5, 1.0, 2.0], "loss")
    assert StopOptions(metric="loss", patience=2).reason(rising) is not None
    assert StopOptions(metric="loss", target=0.4).reason(rising) is None


def test_without_being_asked_nothing_stops():
    assert StopOptions().reason(records_with([1.0] * 50)) is None


def test_a_run_ends_early_when_asked(small_federation, small_model):
    config = replace(config_of(FedAvg(), rounds=50), stop=StopOptions(target=0.01))
    run = begin(config, small_model)
    train_runs([run], small_federation, small_model)
    assert len(run.records) < 50
    assert run.stop_reason == "accuracy reached the target 0.01"


def test_a_run_that_ends_early_is_fine_tuned_on_new_clients_too(small_federation, small_model):
    evaluate = EvaluateOptions(finetune_epochs=1)
    config = replace(config_of(FedAvg(), rounds=50), stop=StopOptions(target=0.01))
    run = begin(replace(config, evaluate=evaluate), small_model)
    train_runs([run], small_federation, small_model)
    assert ["finetuned_accuracy" in record.metrics for record in run.records] == [
        *[False] * (len(run.records) - 1),
        True,
    ]


def test_a_run_without_a_directory_goes_on_where_it_stands(small_federation, small_model):
    """Its state began anew, beside the records of before, when it was trained a second time."""

    def new() -> Run:
        return Run(config_of(Scaffold(), rounds=4), small_federation, lambda: small_model)

    at_once, in_parts = new(), new()
    at_once.train()
    in_parts.pause = 2
    in_parts.train()
    assert len(in_parts.records) == 2
    in_parts.pause = None
    in_parts.train()
    in_parts.train()  # nothing is left to do
    assert [one.round for one in in_parts.records] == [0, 1, 2, 3]
    assert same_tensors(in_parts.state.params, at_once.state.params)


def test_the_jobs_of_a_round_share_one_model(small_federation, small_model):
    """With a served model there was a copy per job."""
    config = replace(config_of(FedAvg(), delta=0.0), serve=ServeOptions(average="ema"))
    run = begin(config, small_model)
    next(run_rounds([run], engine_for(small_federation, small_model)))
    assert run.state.served_model is not None
    states = {id(job.state): job.state for job in planned(run, small_federation).jobs}
    (sent,) = states.values()
    assert sent.params is run.state.params
    assert sent.served_model is None


def test_bytes_are_those_of_the_tensors(small_federation, small_model):
    weights = num_bytes(dict(small_model.state_dict()))
    avg = train(FedAvg(), small_federation, small_model, delta=0).records[0]
    assert avg.bytes_down == avg.bytes_up == 4 * weights
    proto = train(FedProto(), small_federation, small_model, delta=0).records[0]
    prototypes = 4 * (4 * 6 * 4 + 4 * 8 + 4 * 4)  # clients × (sums + counts + margins)
    assert proto.bytes_up == 4 * weights + prototypes


def test_an_update_that_is_not_finite_is_refused_and_recorded(small_federation, small_model):
    run = begin(config_of(FedAvg(), rounds=1, delta=0), small_model)
    engine = engine_for(small_federation, small_model)

    class Broken(type(engine)):
        def train(self, jobs):
            updates = super().train(jobs)
            updates[1].params["dense1.bias"][0] = torch.nan
            return updates

    engine.__class__ = Broken
    ((_, record),) = run_rounds([run], engine)
    refused = record.cohort[1]
    assert "dense1.bias" in record.failures[refused]
    assert refused not in record.attention
    assert sum(record.attention.values()) == pytest.approx(1)
    assert all(torch.isfinite(tensor).all() for tensor in run.state.params.values())


def test_a_learning_rate_that_explodes_leaves_the_model_as_it_was(small_federation, small_model):
    run = train(FedAvg(), small_federation, small_model, delta=0, lr=1e30, rounds=1)
    assert run.records[0].note == "the model did not move: no client sent a usable update"
    assert len(run.records[0].failures) == 4
    assert same_tensors(run.state.params, dict(small_model.state_dict()))


def test_a_cohort_larger_than_the_federation_is_refused(small_federation, small_model):
    with pytest.raises(ConfigError, match=r"schedule.cohort must be at most 6, .* not 7"):
        train(FedAvg(), small_federation, small_model, cohort=7)


def test_a_client_without_training_samples_is_refused(small_federation, small_model):
    clients = list(small_federation.clients)
    clients[2] = replace(clients[2], train=clients[2].train[:0])
    with pytest.raises(DataError, match="client 2 of own data has no samples to train"):
        train(FedProto(), replace(small_federation, clients=clients), small_model)


def test_the_polynomial_learning_rate_falls_over_the_rounds():
    options = TrainOptions(lr=0.5, lr_schedule="polynomial", lr_power=0.9)
    assert options.lr_at(0, 100) == 0.5
    assert options.lr_at(50, 100) == pytest.approx(0.5 * 0.5**0.9)
    assert 0 < options.lr_at(99, 100) < 0.01
    assert TrainOptions(lr=0.5).lr_at(99, 100) == 0.5


def test_exponential_and_cosine_learning_rates_by_hand():
    decayed = TrainOptions(lr=0.1, lr_schedule="exponential", lr_decay=0.998)
    assert decayed.lr_at(0, 10) == 0.1
    assert decayed.lr_at(500, 1000) == decayed.lr_at(500, 600) == pytest.approx(0.03675, abs=5e-6)
    cosine = TrainOptions(lr=0.4, lr_schedule="cosine")
    assert [cosine.lr_at(round_, 6) for round_ in (0, 2, 3, 4)] == pytest.approx(
        [0.4, 0.3, 0.2, 0.1]
    )
    assert 0 < cosine.lr_at(5, 6) < 0.03
    assert [one.rate_needs_rounds for one in (decayed, cosine)] == [False, True]
    assert decayed.kind == replace(decayed, lr_decay=0.9, lr=0.2).kind


def test_centralized_trains_on_the_pooled_data(small_federation, small_model):
    run = begin(config_of(Centralized()), small_model)
    plan = planned(run, small_federation)
    assert [job.batches.num_examples for job in plan.jobs] == [small_federation.train_sizes.sum()]
    assert (plan.cohort, plan.stragglers) == ([], [])


def test_runs_that_train_together_share_the_time_by_what_their_jobs_took(
    small_federation, small_model
):
    short, long = config_of(FedAvg(), rounds=2), config_of(FedProx(), rounds=2)
    long = replace(long, train=replace(long.train, epochs=40 * long.train.epochs))
    engine = engine_for(small_federation, small_model)
    runs = [begin(config, small_model) for config in (short, long)]
    list(run_rounds(runs, engine))
    for one, other in zip(*(run.records for run in runs), strict=True):
        assert other.seconds > 3 * one.seconds > 0


def test_a_callback_hears_of_passes_and_jobs(small_federation, small_model):
    heard = []

    class Listener(Callback):
        def on_pass(self, num_jobs):
            heard.append(num_jobs)

        def on_job(self):
            heard.append("job")

    runs = [
        begin(config_of(strategy, rounds=1, delta=0), small_model) for strategy in (FedAvg(),) * 2
    ]
    engine = engine_for(small_federation, small_model)
    engine.workload = replace(engine.workload, callback=Listener())
    list(run_rounds(runs, engine))
    assert heard == [8] + ["job"] * 8


def test_a_large_client_counts_once_by_default():
    """Its update has more weight, so it is not drawn more often, too."""
    config = read_config({"strategy": "fedavg", "schedule": {"cohort": 1}})
    assert config.strategy.weights == "size"
    sizes = SimpleNamespace(train_sizes=np.array([1, 1, 98]))
    drawn = [participants(config, number, sizes).cohort for number in range(300)]
    assert 75 < drawn.count([2]) < 125
