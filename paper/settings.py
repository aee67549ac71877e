"""Data and a model that settings of the field need and that the product does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from fedproto.data.base import DATASETS
from fedproto.data.benchmarks import CIFAR10
from fedproto.data.partition import by_dirichlet_per_class
from fedproto.models.base import MODELS
from fedproto.models.resnet import ResNet18Options
from fedproto.options import option
from fedproto.rng import Indices, Purpose, stream

TOGETHER = 10
"""Clients among whom FedDF's code, and those that took it over, divide a part of the samples."""


@DATASETS.register("cifar10-fl-sam")
@dataclass(frozen=True)
class FLSAMData(CIFAR10):
    """CIFAR-10 as the scripts of FL-SAM share it out: a long tail of classes, equal sizes.

    The training images of class c of C are thinned to the share ``imbalance^(c / (C − 1))``, and
    shared out by `by_windows`. The test set is the official one.
    """

    prepared_as = "cifar10"

    imbalance: float = option(
        0.5, "share of the last class that is kept; 1 keeps all images", above=0, at_most=1
    )

    def share(self, labels: Indices, groups: object = None) -> list[Indices]:
        """Each client's samples; some belong to no client where classes are thinned."""
        rng = stream(self.seed, Purpose.PARTITION)
        kept = thinned(labels, rng, self.imbalance)
        parts = by_windows(labels[kept], rng, clients=self.clients, alpha=self.alpha)
        return [np.sort(kept[part]) for part in parts]


def thinned(labels: Indices, rng: np.random.RandomState, imbalance: float) -> Indices:
    """Samples of which each class has fewer than the one before, by a geometric series."""
    classes = np.unique(labels)
    most = len(labels) / len(classes)
    numbers = most * imbalance ** (np.arange(len(classes)) / (len(classes) - 1))
    kept = [
        rng.permutation(np.flatnonzero(labels == label))[: int(number)]
        for label, number in zip(classes, numbers, strict=True)
    ]
    return np.sort(np.concatenate(kept))


def by_windows(
    labels: Indices, rng: np.random.RandomState, *, clients: int, alpha: float
) -> list[Indices]:
    """Dirichlet per class within even parts of the samples, then cut into clients of equal size.

    The rule of FedDF's code. The samples are divided evenly at random among groups of ten clients,
    within a group class by class by Dirichlet proportions, with at least half of an even share for
    each. These shares, each sorted by class, are put one after another and cut into new equal
    windows, one per client: a large share becomes several clients with fewer classes each.
    """
    ends = range(TOGETHER, clients, TOGETHER)
    cuts = [len(labels) * end // clients for end in ends]
    lines = []
    for start, block in zip((0, *ends), np.split(rng.permutation(len(labels)), cuts), strict=True):
        own, within = labels[block], min(TOGETHER, clients - start)
        shares = by_dirichlet_per_class(
            own, rng, clients=within, alpha=alpha, min_size=len(own) // (2 * within)
        )
        lines += [block[part[np.argsort(own[part], kind="stable")]] for part in shares]
    return np.array_split(np.concatenate(lines), clients)


@MODELS.register("resnet18-uniform")
@dataclass(frozen=True)
class UniformResNet18(ResNet18Options):
    """ResNet-18 whose convolutions begin as PyTorch draws them, as in the code of FedACG."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Draws the convolutions again: their norm is √6 times smaller than with He's rule."""
        model = super().build(input_shape, num_classes)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.reset_parameters()
        return model
