"""Measures of a model's features and gradients: margin, gradient dissimilarity, MMD.

The dissimilarity is ``1/|K| Σ_k ‖∇L_k(W) − ∇L(W)‖²``, where ``L_k`` is the mean loss over client
k's training samples and ``L = Σ_k n_k/n L_k`` that over the pooled ones. Gradients are those of the
model as it is tested: batch norm by the state's statistics, no dropout.

The squared maximum mean discrepancy (Gretton et al. 2012) of two distributions under the Gaussian
kernel ``k(x, y) = exp(−‖x − y‖² / 2σ²)`` is ``E k(x, x') + E k(y, y') − 2 E k(x, y)``. It is
estimated without bias, so that a value may fall slightly below zero. The paper's equation averages
over clients: here over all clients with at least two held-out samples, each with the features of
these under the aggregate model and under the reference. σ is the median distance between the
reference's features over all clients, the same in all rounds.

Shapes: N and M feature vectors of D channels.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedproto.equations import aggregate_mean_margin
from fedproto.errors import ConfigError
from fedproto.measures.base import MEASURES, Measure, MeasureOptions, ReadState
from fedproto.measures.probe import Probe
from fedproto.rng import Indices, Purpose, stream
from fedproto.types import POOLED, ServerState

BLOCK = 1024
"""Rows of a kernel matrix that are held at once."""

MEDIAN_SAMPLES = 2000
"""Vectors from which the median distance is taken; more change it in the third digit."""


@MEASURES.register("dissimilarity")
class DissimilarityMeasure(Measure):
    """Mean of ‖∇L_k − ∇L‖² over all clients."""

    def take(self, state: ServerState) -> dict[str, float]:
        """All clients, not the cohort."""
        clients = range(len(self.probe.federation.clients))
        return {"dissimilarity": float(self.probe.gradient_distances(state, clients).mean())}


PER_CHANNEL = "margin_per_channel"
"""The margin divided by √D: as a root mean square over the channels it can be compared with that of
models of another width."""


@MEASURES.register("margin")
class MarginMeasure(Measure):
    """AMM of all clients' prototypes under the aggregate model; also divided by √D."""

    stands_for: ClassVar[frozenset[str]] = frozenset({"aggregate_mean_margin"})

    def take(self, state: ServerState) -> dict[str, float]:
        """All clients, not the cohort: curves then show the models and not the draw of clients."""
        train = self.probe.federation.train_indices(POOLED)
        prototypes = self.probe.prototypes(state, train)
        margin = float(aggregate_mean_margin(prototypes))
        channels = prototypes.sum.shape[-1]
        return {"aggregate_mean_margin": margin, PER_CHANNEL: margin / math.sqrt(channels)}


@MEASURES.register("mmd")
class DiscrepancyMeasure(Measure):
    """MMD² to the features of a centrally trained model, mean over clients; unbiased estimate."""

    def __init__(
        self, probe: Probe, options: MeasureOptions, seed: int, read_state: ReadState | None = None
    ) -> None:
        super().__init__(probe, options, seed, read_state)
        clients = self.probe.federation.clients
        self._parts = [self._drawn(index, client.test) for index, client in enumerate(clients)]
        self._features, self._sizes = self._chosen(self.reference())
        if not len(self._features):
            raise ConfigError("measure 'mmd' needs clients with at least two test samples each")
        order = stream(self.seed, Purpose.MEASURED_SAMPLES).permutation(len(self._features))
        mixed = torch.from_numpy(order).to(self.probe.device)
        self.bandwidth = median_bandwidth(self._features[mixed])

    def take(self, state: ServerState) -> dict[str, float]:
        """The mean over the clients that have two features or more."""
        found, sizes = self._chosen(state)
        if sizes != self._sizes or found.shape != self._features.shape:
            raise ConfigError(
                f"measure.reference {self.options.reference} gives features of another shape"
                f" {tuple(self._features.shape)} than the run {tuple(found.shape)}; train it with"
                " the same model"
            )
        pairs = zip(found.split(sizes), self._features.split(sizes), strict=True)
        values = [mmd2(ours, other, self.bandwidth, paired=True) for ours, other in pairs]
        return {"mmd": float(np.mean(values))}

    def _drawn(self, client: int, test: Indices) -> Indices:
        """A client's held-out samples in random order, at most as many as are asked for."""
        order = stream(self.seed, Purpose.MEASURED_SAMPLES, client).permutation(len(test))
        return np.asarray(test[order[: self.options.samples]])

    def _chosen(self, state: ServerState) -> tuple[Tensor, list[int]]:
        """Feature vectors of all clients one after another, and how many each of them has."""
        found = []
        for client, (vectors, _) in enumerate(self.probe.features(state, self._parts)):
            if len(vectors) > self.options.samples:  # several of a label map each
                draw = stream(self.seed, Purpose.MEASURED_SAMPLES, client, 0)
                order = draw.permutation(len(vectors))[: self.options.samples]
                vectors = vectors[torch.from_numpy(order).to(vectors.device)]
            if len(vectors) > 1:
                found.append(vectors)
        return torch.cat(found) if found else torch.empty(0), [len(part) for part in found]


def median_bandwidth(y_md: Tensor, max_samples: int = MEDIAN_SAMPLES) -> float:
    """The median heuristic: σ is the median Euclidean distance between different vectors.

    It is 1 where that is 0, or fewer than two vectors are given.
    """
    few = y_md[:max_samples]
    distances = torch.pdist(few.double() if few.device.type == "cpu" else few)
    median = float(distances.median()) if len(distances) else 0.0
    return median if median > 0 else 1.0


def mmd2(x_nd: Tensor, y_md: Tensor, bandwidth: float, *, paired: bool = False) -> float:
    """The unbiased estimate of MMD² in quadratic time, in blocks of bounded memory.

    Takes at least two vectors of each model. With `paired`, row i of both belongs to the same
    sample: the two are then not independent, and the estimate leaves ``k(x_i, y_i)`` out, as it
    leaves out ``k(x_i, x_i)``. It gives exactly 0 for equal features.
    """
    n, m = len(x_nd), len(y_md)
    # Around the reference's mean, where products lose the fewest digits.
    centre = y_md.mean(dim=0)
    x, y = (x_nd - centre) / bandwidth, (y_md - centre) / bandwidth
    within = (_sum(x, x) - n) / (n * (n - 1)) + (_sum(y, y) - m) / (m * (m - 1))
    across = _sum(x, y)
    if not paired:
        return within - 2 * across / (n * m)
    same = float(torch.exp(-(x - y).square().sum(dim=1) / 2).double().sum())
    return within - 2 * (across - same) / (n * (n - 1))


def _sum(x: Tensor, y: Tensor) -> float:
    """``Σ_ij k(x_i, y_j)``; one matrix product gives ``−‖x − y‖² / 2`` of a block's pairs."""
    of_x, of_y = (part.square().sum(dim=1, keepdim=True) / -2 for part in (x, y))
    left = torch.cat([x, of_x, torch.ones_like(of_x)], dim=1)
    right = torch.cat([y, torch.ones_like(of_y), of_y], dim=1).T.contiguous()
    return sum(float((rows @ right).exp_().sum()) for rows in left.split(BLOCK))
