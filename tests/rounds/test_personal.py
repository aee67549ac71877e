"""Parameters and models that stay on clients: kept, never sent, tested on the client's own part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from engine_cases import (
    CLASSES,
    MODELS,
    PersonalHead,
    Phases,
    TwoModels,
    engine_for,
    run_config,
    small_federation,
)
from fedproto import FedAvg, FedBABU
from fedproto.config.options import EvaluateOptions
from fedproto.engines.setting import read_state, setting_of
from fedproto.measures.scores import summarize_clients
from fedproto.models.base import build_model
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds import evaluate, run_rounds
from fedproto.rounds.evaluate import _summary
from fedproto.rounds.jobs import plan_round
from fedproto.strategies.base import PERSONAL
from fedproto.types import ServerState, num_bytes, part
from helpers import run_from

HEAD = ("classifier.weight", "classifier.bias")


def trained(strategy, rounds=3, engine="reference", federation=None, **evaluate):
    federation = federation or small_federation()
    model = build_model(MODELS["mlp"], federation.input_shape, CLASSES, seed=5).double()
    running = engine_for(engine, federation, model, [])
    config = run_config(strategy, 0.0)
    schedule = replace(config.schedule, rounds=rounds)
    config = replace(config, schedule=schedule, evaluate=EvaluateOptions(**evaluate))
    run = run_from(config, ServerState(0, *read_state(model)))
    records = [record for _, record in run_rounds([run], running)]
    running.close()
    return run, records, running, federation


def test_personal_parameters_are_never_sent_and_differ_from_client_to_client():
    run, records, engine, _ = trained(PersonalHead())
    begun = {name: one for name, one in engine.workload.model.named_parameters() if name in HEAD}
    for name in HEAD:  # the server's copy never moves
        assert torch.equal(run.state.params[name], begun[name])
    heads = []
    for client, last in run.last_round.items():
        kept = part(PERSONAL, run.memory.load(client, last))
        assert set(kept) == set(HEAD)
        heads.append(kept["classifier.bias"])
    assert len({tuple(head.tolist()) for head in heads}) == len(heads)
    everything = num_bytes(run.state.params) * len(records[0].attention)
    assert records[0].bytes_up == everything - num_bytes(begun) * len(records[0].attention)


def test_a_job_begins_from_the_personal_parameters_of_the_round_before():
    run, _, engine, federation = trained(PersonalHead())
    run.config = replace(run.config, schedule=replace(run.config.schedule, cohort=5, rounds=9))
    setting = setting_of(engine.workload, run.state.params)
    jobs = plan_round(run, federation, setting).jobs
    known = [job for job in jobs if job.client in run.last_round]
    assert known
    for job in known:
        kept = part(PERSONAL, run.memory.load(job.client, run.last_round[job.client]))
        started = job.personalised().state
        assert all(torch.equal(started.params[name], kept[name]) for name in HEAD)
        assert torch.equal(started.params["dense1.weight"], run.state.params["dense1.weight"])


def accuracy(engine, params, indices) -> float:
    return engine.evaluate([ServerState(0, params, {})], indices)[0]["accuracy"]


@pytest.mark.parametrize("strategy", [PersonalHead(), TwoModels()], ids=["head", "model"])
def test_personal_scores_are_means_over_the_clients_own_test_parts(strategy):
    run, records, engine, federation = trained(strategy)
    scores = []
    for client, own in enumerate(federation.clients):
        if not len(own.test):
            continue
        params = dict(run.state.params)
        if client in run.last_round:
            kept = part(PERSONAL, run.memory.load(client, run.last_round[client]))
            params = {name: kept.get(name, one) for name, one in params.items()}
        scores.append(accuracy(engine, params, own.test))
    metrics = records[-1].metrics
    assert metrics["personal_accuracy"] == pytest.approx(np.mean(scores))
    assert metrics["worst_tenth_personal_accuracy"] == pytest.approx(min(scores))


@pytest.mark.parametrize("strategy", [PersonalHead(), TwoModels()], ids=["head", "model"])
def test_own_test_parts_are_left_unread_like_all_others(strategy, monkeypatch):
    monkeypatch.setattr(evaluate, "_tested", lambda _: pytest.fail("the clients' test parts"))
    held_out = replace(small_federation(), validation=np.arange(3))
    _, records, _, _ = trained(
        strategy, rounds=2, federation=held_out, test=False, finetune_epochs=1
    )
    for record in records:
        assert {name.partition("_")[0] for name in record.metrics} == {"train", "validation"}
        assert not record.tables


def test_the_worst_tenth_is_rounded_up_whatever_the_clients_are_tested_with():
    values = [0.1 * number for number in range(11)]
    summary = _summary("personal_", [{"accuracy": value} for value in values])
    assert summary["worst_tenth_personal_accuracy"] == pytest.approx(0.05)
    assert summarize_clients(values)[1] == summary["worst_tenth_personal_accuracy"]


def test_a_client_without_an_object_has_no_part_in_its_score():
    """In segmentation clients have other classes; one with nothing but background has no mIoU."""
    scores = [{"iou_0": 0.9}, {"iou_0": 0.5, "iou_3": 0.2, "miou": 0.2}, {}]
    assert _summary("personal_", scores) == pytest.approx(
        {
            **{"personal_iou_0": 0.7, "personal_iou_3": 0.2},
            **{"personal_miou": 0.2, "worst_tenth_personal_miou": 0.2},
        }
    )
    assert _summary("personal_", scores[:1]) == {"personal_iou_0": 0.9}
    assert _summary("personal_", []) == {}


def test_methods_without_personal_parts_have_no_personal_scores():
    _, records, _, _ = trained(FedAvg())
    assert not any("personal" in name for record in records for name in record.metrics)


def test_phases_train_the_named_parameters_alone():
    federation = small_federation()
    model = build_model(MODELS["mlp"], federation.input_shape, CLASSES, seed=5).double()
    engine = engine_for("reference", federation, model, [])
    run = run_from(run_config(Phases(), 0.0), ServerState(0, *read_state(model)))
    setting = setting_of(engine.workload, run.state.params)
    job = plan_round(run, federation, setting).jobs[0]
    one_epoch = replace(job, batches=replace(job.batches, epochs=1))
    (update,) = engine.train([one_epoch])
    for name, one in update.params.items():
        assert torch.equal(one, run.state.params[name]), name
    assert not torch.equal(
        update.memory[f"{PERSONAL}/classifier.weight"], run.state.params["classifier.weight"]
    )
    (update,) = engine.train([job])
    assert not torch.equal(update.params["dense1.weight"], run.state.params["dense1.weight"])


def test_the_personal_model_leaves_the_shared_one_as_it_is():
    """Training a second model beside changes no bit of the first."""
    plain, _, _, _ = trained(FedAvg())
    both, _, _, _ = trained(TwoModels())
    for name, one in plain.state.params.items():
        assert torch.equal(one, both.state.params[name])


@pytest.mark.parametrize("strategy", [FedAvg(), FedBABU()], ids=["all", "head"])
def test_new_clients_are_tested_after_fine_tuning(strategy):
    """All parameters are fine-tuned; of FedBABU the head alone, as in its paper."""
    epochs = 5
    run, records, engine, federation = trained(strategy, rounds=1, finetune_epochs=epochs)
    new = [one for one in range(len(federation.clients)) if one not in run.last_round]
    assert new
    tuned = HEAD if isinstance(strategy, FedBABU) else tuple(run.state.params)
    options, scores = run.config.train, []
    for client in new:
        model = build_model(MODELS["mlp"], federation.input_shape, CLASSES, seed=5).double()
        model.load_state_dict(dict(run.state.params))
        params = [one for name, one in model.named_parameters() if name in tuned]
        step = torch.optim.SGD(params, lr=options.lr, momentum=options.momentum)
        own = federation.clients[client]
        order = BatchOrder(run.config.seed, 1, client, len(own.train), options.batch_size, epochs)
        for batch in (one for epoch in order for one in epoch):
            inputs, targets = federation.samples.batch(own.train[batch])
            step.zero_grad()
            cross_entropy(model(inputs.double()), targets).backward()
            step.step()
        params = {name: one.detach() for name, one in model.named_parameters()}
        scores.append(engine.evaluate([ServerState(0, params, {})], own.test)[0])
    for name in ("accuracy", "loss"):
        mean = np.mean([one[name] for one in scores])
        assert records[-1].metrics[f"finetuned_{name}"] == pytest.approx(mean), name


@pytest.mark.parametrize(
    ("strategy", "method"), [(TwoModels(), "evaluate_personal"), (FedAvg(), "train")]
)
def test_models_of_all_clients_are_never_in_memory_together(monkeypatch, strategy, method):
    _, truth, engine, _ = trained(strategy, finetune_epochs=1)
    numbers, plain = [], getattr(type(engine), method)

    def counting(self, jobs):
        numbers.append(len(jobs))
        return plain(self, jobs)

    monkeypatch.setattr(type(engine), method, counting)
    monkeypatch.setattr(evaluate, "AT_ONCE", 1)
    run, found, _, federation = trained(strategy, finetune_epochs=1)
    assert max(numbers) == run.config.schedule.cohort < len(federation.clients)
    assert [one.metrics for one in found] == [one.metrics for one in truth]


@pytest.mark.parametrize("engine", ["processes", "stacked"])
def test_engines_agree_on_personal_scores(engine):
    _, truth, _, _ = trained(PersonalHead())
    _, found, _, _ = trained(PersonalHead(), engine=engine)
    for ours, theirs in zip(found, truth, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-6)
