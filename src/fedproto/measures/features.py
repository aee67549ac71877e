"""Measures of a model's features and gradients: margin, gradient dissimilarity, MMD.

The dissimilarity is ``1/|K| Σ_k ‖∇L_k(W) − ∇L(W)‖²``, where ``L_k`` is the mean loss over client
k's training samples and ``L = Σ_k n_k/n L_k`` that over the pooled ones. Gradients are those of the
model as it is tested: batch norm by the state's statistics, no dropout.

Equation (MMD) averages over clients: here over all clients with at least two held-out samples, each
with the features of these under the aggregate model and under the reference. The kernel's bandwidth
is the median distance between the reference's features over all clients, the same in all rounds.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedproto.analysis.discrepancy import median_bandwidth, mmd2
from fedproto.equations import aggregate_mean_margin
from fedproto.errors import ConfigError
from fedproto.measures.base import MEASURES, ComparingMeasure, Measure
from fedproto.rng import Indices, Purpose, stream
from fedproto.types import POOLED, ServerState


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
class DiscrepancyMeasure(ComparingMeasure):
    """MMD² to the features of a centrally trained model, mean over clients; unbiased estimate."""

    def compare_with(self, reference: ServerState) -> None:
        """Keeps the reference's features and their bandwidth, the same for all rounds."""
        clients = self.probe.federation.clients
        self._parts = [self._drawn(index, client.test) for index, client in enumerate(clients)]
        self._features, self._sizes = self._chosen(reference)
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
