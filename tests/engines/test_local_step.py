"""Local steps with SAM, clipping and centralisation: against NumPy, and alike in every engine."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from engine_cases import (
    CLASSES,
    Outcome,
    check_same,
    distance,
    engine_for,
    jobs_of,
    small_federation,
    sweep,
)
from fedproto import FedAvg, FedProto, FedProx, Scaffold, Strategy, with_features
from fedproto.engines.base import ENGINES
from fedproto.engines.training import TrainOptions, take_step
from fedproto.models.small import CNN4Options
from fedproto.strategies.values import Objective

PULL, SLOPE = 0.4, 0.05
PLAIN = TrainOptions(epochs=2, batch_size=5, lr=0.2)
RULES = {
    "sam": {"optimizer": "sam", "rho": 0.3},
    "sam with momentum": {"optimizer": "sam", "momentum": 0.9, "weight_decay": 0.02},
    "clip": {"clip_norm": 0.3},
    "clip rarely": {"clip_norm": 0.7, "weight_decay": 0.5, "momentum": 0.5},
    "centralize": {"centralize": True, "weight_decay": 0.1},
    "all": {
        "optimizer": "sam",
        "rho": 0.2,
        "clip_norm": 0.3,
        "centralize": True,
        "momentum": 0.5,
        "weight_decay": 0.1,
    },
}


@dataclass(frozen=True)
class Pulled(Strategy):
    """A proximal and a linear term."""

    def objective(self, local):
        linear = {name: torch.full_like(one, SLOPE) for name, one in local.params.items()}
        return Objective(proximal=PULL, linear=linear)


def small_model() -> nn.Module:
    torch.manual_seed(4)
    return with_features(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, CLASSES))).double()


def objective_gradient(weights, received, x, y):
    """Cross-entropy of the small model with the strategy's terms, differentiated by hand."""
    w1, b1, w2, b2 = weights
    hidden = np.tanh(x @ w1.T + b1)
    logits = hidden @ w2.T + b2
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(y)), y]).mean()
    dz = (p - np.eye(CLASSES)[y]) / len(y)
    da = (dz @ w2) * (1 - hidden**2)
    plain = [da.T @ x, da.sum(axis=0), dz.T @ hidden, dz.sum(axis=0)]
    terms = [PULL * (w - r) + SLOPE for w, r in zip(weights, received, strict=True)]
    return loss, [g + term for g, term in zip(plain, terms, strict=True)]


def norm_of(gradients) -> float:
    return np.sqrt(sum((g**2).sum() for g in gradients))


def trained_by_hand(job, federation):
    """The weights after a job's steps, the last epoch's mean loss, and which steps were clipped."""
    train = job.train
    received = [one.numpy().copy() for one in job.state.params.values()]
    weights = [one.copy() for one in received]
    velocity = [np.zeros_like(one) for one in weights]
    inputs, targets = (one.numpy() for one in federation.samples.batch(
        federation.train_indices(job.client)
    ))  # fmt: skip
    clipped = []
    for batches in job.batches:
        losses = []
        for batch in batches:
            x, y = inputs[batch].astype(np.float64), targets[batch]
            loss, g = objective_gradient(weights, received, x, y)
            losses.append(loss * len(y))
            if train.optimizer == "sam":
                scale = train.rho / norm_of(g)
                nearby = [w + scale * d for w, d in zip(weights, g, strict=True)]
                _, g = objective_gradient(nearby, received, x, y)
            if train.centralize:
                g = [d - d.mean(axis=1, keepdims=True) if d.ndim > 1 else d for d in g]
            if train.clip_norm is not None:
                clipped.append(norm_of(g) > train.clip_norm)
                # PyTorch adds a little to the norm.
                factor = min(1.0, train.clip_norm / (norm_of(g) + 1e-6))
                g = [d * factor for d in g]
            g = [d + train.weight_decay * w for d, w in zip(g, weights, strict=True)]
            velocity = [train.momentum * v + d for v, d in zip(velocity, g, strict=True)]
            weights = [w - job.lr * v for w, v in zip(weights, velocity, strict=True)]
    return weights, sum(losses) / len(inputs), clipped


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("engine", ENGINES.names())
def test_steps_are_those_computed_by_hand(engine, rule):
    federation, model = small_federation((3,)), small_model()
    train = replace(PLAIN, **RULES[rule])
    jobs = jobs_of(federation, model, Pulled(), train)
    running = engine_for(engine, federation, model, notices := [])
    plain = engine_for("reference", federation, model, []).train(
        [replace(job, train=PLAIN) for job in jobs]
    )
    every_clipped = []
    try:
        for job, update, other in zip(jobs, running.train(jobs), plain, strict=True):
            weights, loss, clipped = trained_by_hand(job, federation)
            every_clipped += clipped
            for name, expected in zip(update.params, weights, strict=True):
                found = update.params[name]
                assert distance(found, torch.from_numpy(expected)) <= 1e-10, name
                assert distance(found, other.params[name]) > 1e-4, "the rule changes nothing"
            assert update.train_loss == pytest.approx(loss, abs=1e-6)
    finally:
        running.close()
    assert bool(notices) == (engine == "captured")  # which is for CUDA
    assert any(every_clipped) == (train.clip_norm is not None)
    if rule == "clip rarely":
        assert not all(every_clipped)


def normed_module() -> nn.Module:
    """Batch norm, and dropout, which both passes share."""
    torch.manual_seed(6)
    return with_features(
        nn.Sequential(
            nn.Flatten(),
            nn.Linear(72, 10),
            nn.BatchNorm1d(10, momentum=0.3),
            nn.ReLU(),
            nn.Dropout(0.4),
            nn.Linear(10, 6),
            nn.BatchNorm1d(6),
            nn.Tanh(),
            nn.Linear(6, CLASSES),
        )
    )


NORMED = {"module": normed_module, "cnn4": lambda: CNN4Options(channels=4, batch_norm=True)}


def normed_sweep(engine: str, model: str, train: TrainOptions) -> Outcome:
    return sweep(
        engine,
        NORMED[model](),
        federation=small_federation((1, 8, 9) if model == "module" else (3, 20, 16)),
        strategies=[FedAvg(), FedProx(mu=0.5), FedProto(), Scaffold()],
        train=train,
    )


@pytest.mark.parametrize("policy", ["average", "frozen", "local"])
@pytest.mark.parametrize("model", NORMED)
def test_batch_norm_and_dropout_in_a_stack(model, policy):
    train = TrainOptions(
        epochs=2,
        batch_size=5,
        lr=0.05,
        optimizer="sam",
        rho=0.2,
        clip_norm=1.0,
        centralize=True,
        batch_norm=policy,
    )
    truth, found = (normed_sweep(name, model, train) for name in ("reference", "stacked"))
    check_same(found, truth, 1e-9)
    assert all(policy == "local" and "local batch norm" in text for text in found.notices)
    for ours, theirs in zip(found.states, truth.states, strict=True):
        assert ours.buffers.keys() == theirs.buffers.keys()
        for name, tensor in theirs.buffers.items():
            assert distance(ours.buffers[name], tensor) <= 1e-9, name


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_only_the_first_pass_of_sam_moves_the_statistics(engine):
    """After one step they are those of the received weights, as without SAM."""
    federation, model = small_federation(sizes=(8, 8, 8)), normed_module().double()
    trained = []
    for rule in ({}, {"optimizer": "sam", "rho": 5.0}):
        train = TrainOptions(epochs=1, batch_size=8, lr=0.1, **rule)
        jobs = jobs_of(federation, model, FedAvg(), train)
        trained.append(engine_for(engine, federation, model, []).train(jobs))
    for plain, sam in zip(*trained, strict=True):
        assert plain.buffers
        for name, tensor in plain.buffers.items():
            torch.testing.assert_close(sam.buffers[name], tensor, rtol=0, atol=1e-12)
        assert distance(plain.params["1.weight"], sam.params["1.weight"]) > 1e-4


@dataclass(frozen=True)
class OwnTerm(Strategy):
    """Evaluated, as all terms are, at SAM's perturbed weights."""

    def batch_term(self, local, batch):
        return 0.1 * batch.mean(batch.logits.square().sum(dim=1))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-4)])
def test_a_strategys_own_batch_term_in_a_stack(dtype, tolerance):
    train = replace(PLAIN, **RULES["all"])
    truth, found = (
        sweep(
            engine,
            small_model(),
            federation=small_federation((3,)),
            strategies=[OwnTerm(), FedAvg()],
            train=train,
            dtype=dtype,
        )
        for engine in ("reference", "stacked")
    )
    check_same(found, truth, tolerance)
    assert not found.notices


def test_without_a_gradient_sam_stays_where_it_is():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    train = TrainOptions(optimizer="sam", clip_norm=1.0)

    def compute_gradient():
        model.zero_grad()
        loss = 0.0 * model(torch.ones(1, 3)).sum()
        loss.backward()
        return loss.detach()

    take_step(model, train, train.optimizer_for(model, 0.1), compute_gradient)
    assert all(torch.equal(model.state_dict()[name], one) for name, one in before.items())


@pytest.mark.parametrize("engine", ENGINES.names())
@pytest.mark.parametrize("rule", [{}, RULES["all"]], ids=["plain", "all"])
def test_parameters_that_are_not_trained_stay_and_do_not_count_in_norms(engine, rule):
    federation, model = small_federation((3,)), small_model()
    layers = model.model
    layers[0].requires_grad_(False)
    jobs = jobs_of(federation, model, FedAvg(), replace(PLAIN, **rule))
    running = engine_for(engine, federation, model, [])
    # The same steps of a model that is the trained part alone, on features computed before.
    with torch.no_grad():
        features = [
            (torch.tanh(layers[0](x.double())), y)
            for x, y in (
                federation.samples.batch(federation.train_indices(client)) for client in range(5)
            )
        ]
    try:
        for job, update in zip(jobs, running.train(jobs), strict=True):
            assert torch.equal(update.params["0.weight"], job.state.params["0.weight"])
            head = copy.deepcopy(layers[2])
            optimizer = job.train.optimizer_for(head, job.lr)
            x, y = features[job.client]
            for batches in job.batches:
                for batch in batches:

                    def compute_gradient(head=head, x=x[batch], y=y[batch]):
                        head.zero_grad()
                        loss = nn.functional.cross_entropy(head(x), y)
                        loss.backward()
                        return loss.detach()

                    take_step(head, job.train, optimizer, compute_gradient)
            assert distance(update.params["2.weight"], head.weight.detach()) <= 1e-10
    finally:
        running.close()
