"""Probe: a state's features, scores and gradients on the clients' samples.

A probe has a model of its own and draws no random numbers, so that a measurement does not change
the training. Models are in evaluation mode: batch norm by the state's
statistics, or by those of the client's training samples where a state has none; no dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedproto.engines.base import Workload
from fedproto.engines.layers import (
    estimate,
    goes_by_batch,
    statistics_names,
    tolerate_single_values,
)
from fedproto.engines.setting import load_state, prefer_channels_last
from fedproto.equations import class_prototypes
from fedproto.models.base import features_of
from fedproto.rng import Indices
from fedproto.types import POOLED, Prototypes, ServerState

INPUTS_AT_ONCE = 2**21
"""Input values of a batch on a GPU, whose memory the test batches of a CPU would leave idle."""


class Probe:
    """Evaluates states of one architecture on one federation."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.federation, self.task = workload.federation, workload.task
        self._options = workload.options
        self.device = workload.options.torch_device()
        dtype = workload.options.torch_dtype()
        self._model = copy.deepcopy(workload.model).to(self.device, dtype).eval()
        tolerate_single_values(self._model)
        if self.device.type == "cpu":  # whose convolutions prefer it
            prefer_channels_last(self._model, self.federation)
        self._samples = workload.federation.samples.to(self.device, dtype)
        self._statistics = statistics_names(self._model)
        self._by_batch = goes_by_batch(self._model)
        numbers = int(np.prod(self.federation.input_shape))
        self._at_once = workload.options.eval_batch_size
        if self.device.type == "cuda":
            self._at_once = max(self._at_once, INPUTS_AT_ONCE // numbers)
        # A gradient keeps the activations of a whole batch.
        self._gradient_at_once = max(1, min(self._at_once, INPUTS_AT_ONCE // numbers))

    @torch.no_grad()
    def logits(self, state: ServerState, indices: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits and targets of some samples, batch by batch, in any order of the samples."""
        for part in self._ready(state, indices):
            for inputs, targets in self._batches(part):
                with self._options.computing():
                    found = self._model(inputs)
                yield found, targets

    @torch.no_grad()
    def maps(self, state: ServerState, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """One sample's logits ``[1, C, ...]``, features ``[1, D, ...]`` and target ``[1, ...]``."""
        (part,) = self._ready(state, np.array([index]))
        ((inputs, target),) = self._batches(part)
        with self._options.computing():
            return self._model(inputs), features_of(self._model)(inputs), target

    @torch.no_grad()
    def tallies(self, state: ServerState, parts: Sequence[Indices]) -> list[Tensor | None]:
        """The task's tally for each of some parts of a client; None without samples."""
        if not self.task.one_label or not self._complete(state):
            return [self._tally(self.logits(state, part)) for part in parts]
        found = list(self.logits(state, np.concatenate(parts))) if parts else []
        if not found:
            return [None for _ in parts]
        sizes = [len(part) for part in parts]
        logits = torch.cat([logits for logits, _ in found]).cpu().split(sizes)
        targets = torch.cat([targets for _, targets in found]).cpu().split(sizes)
        return [
            self._tally([pair] if len(pair[1]) else [])
            for pair in zip(logits, targets, strict=True)
        ]

    @torch.no_grad()
    def features(self, state: ServerState, parts: Sequence[Indices]) -> list[tuple[Tensor, Tensor]]:
        """Vectors ``[N, D]`` and labels ``[N]`` for each of some parts of one client each."""
        if parts and self.task.one_label and self._complete(state):
            vectors, labels = self._joined(state, np.concatenate(parts))
            sizes = [len(part) for part in parts]
            return list(zip(vectors.split(sizes), labels.split(sizes), strict=True))
        return [self._joined(state, part) for part in parts]

    @torch.no_grad()
    def prototypes(self, state: ServerState, indices: Indices) -> Prototypes:
        """Prototypes of some samples under a model, eq. (4), in float64."""
        total: Prototypes | None = None
        for vectors, labels in self._vectors(state, indices):
            found = class_prototypes(vectors, labels, self.federation.num_classes)
            part = Prototypes(found.sum.double(), found.count)
            total = part if total is None else total + part
        if total is None:
            classes = self.federation.num_classes
            return Prototypes(torch.zeros(classes, 1), torch.zeros(classes, dtype=torch.int64))
        return total

    def gradient_distances(self, state: ServerState, clients: Sequence[int]) -> Tensor:
        """``‖∇L_k(W) − ∇L(W)‖²`` of some clients, ``[K]`` in float64; ∇L is over all of them."""
        complete = self._complete(state)
        with self._options.computing():
            load_state(self._model, state)
            reference = (
                self._gradient(self.federation.train_indices(POOLED))
                if complete
                else self._mean_of_own_gradients()
            )
            found = []
            for client in clients:
                own = self._client_gradient(client, complete)
                parts = [
                    (own[name] - one).square().sum().double() for name, one in reference.items()
                ]
                found.append(torch.stack(parts).sum())
        return torch.stack(found).cpu()

    def _mean_of_own_gradients(self) -> dict[str, Tensor]:
        """``Σ_k n_k/n ∇L_k``, each client with batch-norm statistics of its own."""
        sizes = self.federation.train_sizes
        total: dict[str, Tensor] = {}
        for client, size in enumerate(sizes):
            for name, part in self._client_gradient(client, complete=False).items():
                total[name] = total.get(name, 0) + part * (size / sizes.sum())
        return total

    def _client_gradient(self, client: int, complete: bool) -> dict[str, Tensor]:
        own = self.federation.train_indices(client)
        if not complete:
            estimate(self._model, (inputs for inputs, _ in self._batches(own)))
        return self._gradient(own)

    @torch.enable_grad()
    def _gradient(self, indices: Indices) -> dict[str, Tensor]:
        """The gradient of the mean loss over some samples, summed batch by batch."""
        params = dict(self._model.named_parameters())
        total = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
        terms = 0.0
        for inputs, targets in self._batches(indices, self._gradient_at_once):
            number = self.task.loss_terms(targets)
            value = self.task.loss(self._model(inputs), targets) * number
            found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
            for summed, part in zip(total.values(), found, strict=True):
                if part is not None:
                    summed += part
            terms += float(number)
        return {name: summed / max(terms, 1.0) for name, summed in total.items()}

    def _complete(self, state: ServerState) -> bool:
        """Whether a state brings its batch-norm statistics with it, whatever the samples."""
        return not self._by_batch and self._statistics <= {*state.params, *state.buffers}

    def _ready(self, state: ServerState, indices: Indices) -> Iterator[Indices]:
        """Parts of the samples, each at a moment when the model has the statistics for it."""
        load_state(self._model, state)
        self._model.eval()
        if self._complete(state):
            yield indices
            return
        holders = self._holders[indices]
        for holder in np.unique(holders):
            own = indices[holders == holder]
            nobodys = holder == len(self.federation.clients)
            basis = own if nobodys else self.federation.clients[holder].train
            estimate(self._model, (inputs for inputs, _ in self._batches(basis)))
            yield own

    @cached_property
    def _holders(self) -> Indices:
        """The first client that has each sample; the number of clients if none has."""
        clients = self.federation.clients
        found = np.full(len(self._samples), len(clients), dtype=np.int64)
        for index in reversed(range(len(clients))):
            found[clients[index].train] = found[clients[index].test] = index
        return found

    def _vectors(self, state: ServerState, indices: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self._ready(state, indices):
            for inputs, targets in self._batches(part):
                with self._options.computing():
                    found = features_of(self._model)(inputs)
                yield self.task.labelled_features(found, targets)

    def _joined(self, state: ServerState, indices: Indices) -> tuple[Tensor, Tensor]:
        found = list(self._vectors(state, indices))
        if not found:
            nothing = torch.empty(0, device=self.device)
            return nothing.reshape(0, 1), nothing.long()
        return torch.cat([vectors for vectors, _ in found]), torch.cat([y for _, y in found])

    def _tally(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor | None:
        found = [self.task.tally(logits, targets).cpu() for logits, targets in batches]
        return torch.stack(found).sum(dim=0) if found else None

    def _batches(
        self, indices: Indices, at_once: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        step = at_once or self._at_once
        for start in range(0, len(indices), step):
            yield self._samples.batch(indices[start : start + step])
