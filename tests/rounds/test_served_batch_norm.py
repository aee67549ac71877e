"""Averages of models with batch normalisation: their averaged statistics against re-estimated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from fedproto import FedAvg
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import TensorSamples
from fedproto.engines.setting import load_state
from fedproto.models.base import build_model
from fedproto.models.small import CNN4Options
from fedproto.strategies.serve import ServeOptions
from helpers import begin, config_of, train_runs

CLIENTS = 6


def digits() -> tuple[Federation, torch.Tensor, torch.Tensor]:
    """Pictures of 16×16 pixels; every client holds three or four digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1) / 16
    images, labels = interpolate(images, scale_factor=2), torch.from_numpy(data.target)
    clients = []
    for client in range(CLIENTS):
        held = np.isin(data.target, [(2 * client + k) % 10 for k in range(4)])
        own = np.flatnonzero(held)[client::CLIENTS]
        clients.append(Client(own[: len(own) * 4 // 5], own[len(own) * 4 // 5 :]))
    samples = TensorSamples(images, labels)
    return Federation("digits", samples, tuple(clients), 10, (1, 16, 16)), images, labels


def reestimated(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """The same parameters with the statistics of all training images."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None  # the plain mean over batches
    model.train()
    with torch.no_grad():
        model(images)
    return model.eval()


def test_averaged_statistics_are_as_good_as_re_estimated_ones():
    federation, images, labels = digits()
    options = CNN4Options(batch_norm=True, channels=8)
    model = build_model(options, federation.input_shape, 10, seed=1)
    config = config_of(
        FedAvg(), rounds=40, delta=0.0, epochs=2, batch_size=16, lr=0.05, sampling="uniform"
    )
    config = replace(config, serve=ServeOptions(average="ema", decay=0.8))
    run = begin(config, model)
    train_runs([run], federation, model)
    test, train = federation.test_indices, federation.train_indices(-1)

    def loss() -> float:
        with torch.no_grad():
            return float(cross_entropy(model.eval()(images[test]), labels[test]))

    load_state(model, run.state.served)
    averaged = loss()
    reestimated(model, images[train])
    best = loss()
    load_state(model, replace(run.state, served_model=None))
    newest = loss()
    assert best < 0.6, "the model learned something"
    # Not so in the first rounds, in which statistics still move: there they lag.
    assert averaged <= best + 0.1, (averaged, best, newest)
    assert averaged <= newest
