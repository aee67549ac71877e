"""Gradient dissimilarity: in closed form for a linear model, against a naive loop for others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, Workload
from fedproto.engines.reference import load_state, read_state
from fedproto.measures import probe as probing
from fedproto.measures.probe import Probe
from fedproto.models.adapter import with_features
from fedproto.models.base import build_model
from fedproto.models.small import CNNOptions
from fedproto.types import ServerState


def probe_of(federation, model, **options):
    options = {"dtype": "float64", "device": "cpu"} | options
    return Probe(Workload(federation, model, task_named(federation.task), EngineOptions(**options)))


def state_of(model, *, statistics=True):
    params, buffers = read_state(model.double())
    return ServerState(1, params, buffers if statistics else {})


def naive_distances(federation, model, state, prepare=None):
    """‖∇L_k − ∇L‖² with one backward pass a client."""
    load_state(model, state)
    model.eval()
    gradients, sizes = [], []
    for client in federation.clients:
        inputs, targets = federation.samples.batch(client.train)
        if prepare is not None:
            prepare(model, inputs.double())
        model.zero_grad()
        F.cross_entropy(model(inputs.double()), targets).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        sizes.append(len(targets))
    together, share = torch.stack(gradients), torch.tensor(sizes).double() / sum(sizes)
    pooled = (together * share.unsqueeze(1)).sum(dim=0)
    return (together - pooled).square().sum(dim=1)


@pytest.fixture(scope="module")
def image_federation():
    rng = np.random.RandomState(0)
    sizes = (3, 4, 30, 5, 3, 12, 7, 4)
    clients = [(rng.normal(size=(n, 1, 8, 8)), rng.randint(0, 3, n)) for n in sizes]
    return Federation.from_clients(clients, num_classes=3)


def test_a_linear_model_has_the_closed_form(small_federation):
    # Softmax regression at W = 0: all probabilities are 1/C, so ∇_W L_k = mean (1/C − onehot) xᵀ.
    model = with_features(nn.Sequential(nn.Identity(), nn.Linear(5, 4)))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    gradients, sizes = [], []
    for client in small_federation.clients:
        x, y = (part.numpy() for part in small_federation.samples.batch(client.train))
        residual = 0.25 - np.eye(4)[y]
        gradients.append(np.concatenate([(residual.T @ x / len(y)).ravel(), residual.mean(axis=0)]))
        sizes.append(len(y))
    pooled = np.average(gradients, axis=0, weights=sizes)
    expected = [np.sum((each - pooled) ** 2) for each in gradients]
    probe = probe_of(small_federation, model)
    found = probe.gradient_distances(state_of(model), range(6))
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert probe.gradient_distances(state_of(model), [4, 1]).tolist() == pytest.approx(
        [expected[4], expected[1]], rel=1e-5
    )


def test_equal_clients_do_not_disagree():
    x, y = np.random.RandomState(0).normal(size=(10, 3)), np.arange(10) % 2
    federation = Federation.from_clients([(x, y)] * 3, num_classes=2, test_fraction=0)
    model = with_features(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    found = probe_of(federation, model).gradient_distances(state_of(model), range(3))
    assert found.max() < 1e-20


@pytest.mark.parametrize("batch", [9, 1000])
def test_a_cnn_gives_what_a_naive_loop_gives(image_federation, monkeypatch, batch):
    model = build_model(CNNOptions(channels1=2, channels2=3, features=5), (1, 8, 8), 3, seed=1)
    state = state_of(model)
    expected = naive_distances(image_federation, model, state)
    monkeypatch.setattr(probing, "INPUTS_AT_ONCE", 64 * (batch if batch < 1000 else 40))
    probe = probe_of(image_federation, model, eval_batch_size=batch)
    found = probe.gradient_distances(state, range(8))
    assert torch.allclose(found, expected, rtol=1e-9)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.out = nn.Linear(3, 3)
        with torch.no_grad():
            self.norm.running_mean.fill_(0.3)
            self.norm.running_var.fill_(2.0)

    def features(self, x):
        return self.norm(self.conv(x)).relu().mean(dim=(2, 3))

    def forward(self, x):
        return self.out(self.features(x))


def test_batch_norm_uses_the_states_statistics(image_federation):
    model = Normalised()
    state = state_of(model)
    expected = naive_distances(image_federation, model, state)
    found = probe_of(image_federation, model).gradient_distances(state, range(8))
    assert torch.allclose(found, expected, rtol=1e-9)


def test_local_batch_norm_uses_each_clients_own_statistics(image_federation):
    model = Normalised()
    state = state_of(model, statistics=False)

    @torch.no_grad()
    def own_statistics(model, inputs):
        hidden = model.conv(inputs)
        model.norm.running_mean.copy_(hidden.mean(dim=(0, 2, 3)))
        model.norm.running_var.copy_(hidden.var(dim=(0, 2, 3), unbiased=True))

    expected = naive_distances(image_federation, model, state, own_statistics)
    probe = probe_of(image_federation, model)
    assert torch.allclose(probe.gradient_distances(state, range(8)), expected, rtol=1e-6)
    assert torch.allclose(probe.gradient_distances(state, [5, 2]), expected[[5, 2]], rtol=1e-6)
