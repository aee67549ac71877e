"""The reference engine against loops written out by hand."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fedproto import FedAvg, FedProto, FedProx, FedRep, with_features
from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.setting import fitted
from fedproto.equations import class_prototypes, local_margin
from fedproto.errors import ConfigError, TrainingError
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from helpers import begin, config_of, engine_for, planned, same_tensors, train


def first_job(strategy, federation, model, **options):
    run = begin(config_of(strategy, delta=0, **options), model)
    return planned(run, federation).jobs[0]


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"optimizer": "adam", "lr": 0.01}],
    ids=str,
)
def test_training_is_the_plain_loop(small_federation, small_model, options):
    job = first_job(FedProx(mu=0.3), small_federation, small_model, **options)
    (update,) = engine_for(small_federation, small_model).train([job])

    model = copy.deepcopy(small_model)
    received = [parameter.detach().clone() for parameter in model.parameters()]
    common = {"lr": job.lr, "weight_decay": options.get("weight_decay", 0)}
    optimizer = (
        torch.optim.Adam(model.parameters(), **common)
        if "optimizer" in options
        else torch.optim.SGD(model.parameters(), momentum=options.get("momentum", 0), **common)
    )
    indices = small_federation.clients[job.client].train
    for epoch in range(3):
        losses = []
        order = job.batches.epoch(epoch)
        for start in range(0, len(order), 4):
            chosen = torch.from_numpy(indices[order[start : start + 4]])
            x = small_federation.samples.inputs[chosen].float()
            loss = F.cross_entropy(model(x), small_federation.samples.targets[chosen])
            losses.append(loss.item() * len(chosen))
            distance = sum(
                (p - r).square().sum() for p, r in zip(model.parameters(), received, strict=True)
            )
            optimizer.zero_grad()
            (loss + 0.15 * distance).backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(update.params[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    assert update.train_loss == pytest.approx(sum(losses) / len(order), rel=1e-5)
    assert update.num_examples == len(indices)


def test_prototypes_are_taken_before_and_after_training(small_federation, small_model):
    job = first_job(FedProto(), small_federation, small_model)
    (update,) = engine_for(small_federation, small_model, eval_batch_size=3).train([job])
    x, y = small_federation.samples.batch(small_federation.clients[job.client].train)
    trained = copy.deepcopy(small_model)
    trained.load_state_dict(update.params)
    with torch.no_grad():
        before = class_prototypes(small_model.features(x.float()), y, 4)
        after = class_prototypes(trained.features(x.float()), y, 4)
    torch.testing.assert_close(update.payload[SUM], after.sum)
    torch.testing.assert_close(update.payload[MARGIN], local_margin(before, after))


def test_without_epochs_the_received_weights_come_back(small_federation, small_model):
    run = begin(config_of(FedProto(), epochs=1, delta=1), small_model)
    updates = engine_for(small_federation, small_model).train(planned(run, small_federation).jobs)
    for update in updates:
        assert same_tensors(update.params, run.state.params)
        assert (update.train_loss, update.epochs_done) == (None, 0)
        # nothing moved, so every class that can be compared has margin 1
        seen = update.payload[COUNT] > 0
        comparable = seen & (seen.sum() > 1)
        assert torch.equal(update.payload[MARGIN], comparable.float())


def test_accuracy_and_loss_are_over_all_samples_whatever_the_batches(small_federation, small_model):
    run = begin(config_of(FedAvg()), small_model)
    indices = small_federation.test_indices
    (one,) = engine_for(small_federation, small_model).evaluate([run.state], indices)
    (two,) = engine_for(small_federation, small_model, eval_batch_size=2).evaluate(
        [run.state], indices
    )
    x, y = small_federation.samples.batch(indices)
    with torch.no_grad():
        scores = small_model(x.float())
    assert one["accuracy"] == two["accuracy"] == float((scores.argmax(1) == y).double().mean())
    assert one["loss"] == pytest.approx(two["loss"])
    assert one["loss"] == pytest.approx(float(F.cross_entropy(scores, y)), rel=1e-5)


def batch_norm_case() -> tuple[Federation, nn.Module]:
    torch.manual_seed(0)
    clients = [(torch.randn(10, 4), torch.randint(0, 3, (10,))) for _ in range(3)]
    model = with_features(
        nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
        )
    )
    return Federation.from_clients(clients, num_classes=3), model


def test_batch_norm_statistics_are_averaged_and_counters_stay_integers():
    federation, model = batch_norm_case()
    run = train(FedAvg(weights="uniform"), federation, model, cohort=3, delta=0, rounds=2)
    counter = run.state.buffers["1.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert int(counter) == 2 * 3 * 2  # rounds × epochs × batches of 8 samples by 4
    assert not torch.equal(run.state.buffers["1.running_mean"], torch.zeros(6))


def test_dropout_depends_on_the_seed_and_not_on_the_global_generator():
    federation, model = batch_norm_case()
    runs = []
    for _ in range(2):
        torch.rand(5)
        runs.append(train(FedAvg(), federation, model, cohort=3))
    assert same_tensors(runs[0].state.params, runs[1].state.params)


def test_a_model_that_does_not_fit_the_data_is_a_clear_error(small_federation):
    model = with_features(nn.Sequential(nn.Linear(99, 3), nn.Linear(3, 4)))
    with pytest.raises(
        TrainingError, match=r"training client \d+ in round 0 failed: mat1 and mat2"
    ):
        train(FedAvg(), small_federation, model, delta=0)


@pytest.mark.parametrize(("each", "refused"), [(0.25, True), (1.0, False)])
def test_probabilities_are_told_from_logits_in_double_precision(small_federation, each, refused):
    model = nn.Linear(5, 4).double()
    nn.init.zeros_(model.weight)
    nn.init.constant_(model.bias, each)
    with pytest.raises(TrainingError, match="its softmax") if refused else nullcontext():
        fitted(model, small_federation, task_named("classification"))


@pytest.mark.parametrize(("strategy", "fixed"), [(FedAvg(), 2), (FedRep(), 1)])
def test_a_phase_without_parameters_to_train_is_a_clear_error(small_federation, strategy, fixed):
    layers = [nn.Linear(5, 6), nn.Linear(6, 4)]
    for layer in layers[:fixed]:
        layer.requires_grad_(False)
    model = with_features(nn.Sequential(*layers))
    with pytest.raises(TrainingError, match=f"{type(strategy).__name__} trains no parameter"):
        train(strategy, small_federation, model)


def test_a_model_without_features_is_refused_only_where_a_method_needs_them(small_federation):
    model = nn.Sequential(nn.Linear(5, 4), nn.LogSoftmax(dim=1))
    assert train(FedAvg(), small_federation, model, delta=0).records
    with pytest.raises(TrainingError, match=r"with_features|prototypes need"):
        train(FedProto(), small_federation, model, delta=0)


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there_is_refused(small_federation, small_model, device):
    with pytest.raises(ConfigError, match=f"engine.device '{device}'"):
        engine_for(small_federation, small_model, device=device)


def test_double_precision(small_federation, small_model):
    job = first_job(FedProto(), small_federation, small_model)
    (update,) = engine_for(small_federation, small_model, dtype="float64").train([job])
    assert update.params["dense1.weight"].dtype == torch.float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_cpu(small_federation, small_model):
    job = first_job(FedProto(), small_federation, small_model)
    (cpu,) = engine_for(small_federation, small_model, device="cpu").train([job])
    (cuda,) = engine_for(small_federation, small_model, device="cuda").train([job])
    for name, tensor in cpu.params.items():
        torch.testing.assert_close(cuda.params[name].cpu(), tensor, rtol=1e-3, atol=1e-4)
