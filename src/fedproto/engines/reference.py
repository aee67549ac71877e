"""The reference engine: one job after another, obviously right. Every faster path is tested
against it.
"""  # noqa: D205 - one sentence says it best

# Long: the truth that others are tested against is read from top to bottom in one place.
from __future__ import annotations

import copy
import functools
import operator
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedproto.data.federation import Federation
from fedproto.engines.base import ENGINES, Engine, LocalJob, Workload
from fedproto.engines.layers import (
    Masks,
    estimate,
    freeze_statistics,
    goes_by_batch,
    reset_statistics,
    statistics_names,
    tolerate_single_values,
)
from fedproto.engines.setting import ClientView, load_state, prefer_channels_last, read_state
from fedproto.engines.training import BatchTerm, TrainOptions, outputs_of, take_step
from fedproto.errors import TrainingError
from fedproto.models.base import features_of
from fedproto.rng import Indices, seeded
from fedproto.strategies.base import Strategy
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Local, Objective, Observation, Statistic
from fedproto.types import ClientFailure, ClientUpdate, ServerState, Tensors

Step: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@ENGINES.register("reference")
class ReferenceEngine(Engine):
    """Trains with a plain loop over batches, on CPU or CUDA."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._device = workload.options.torch_device()
        dtype = workload.options.torch_dtype()
        self._model = copy.deepcopy(workload.model).to(self._device, dtype)
        if workload.options.channels_last:
            prefer_channels_last(self._model, workload.federation)
        tolerate_single_values(self._model)
        self._masks = Masks(self._model, self._device)
        self._samples = workload.federation.samples.to(self._device, dtype)
        self._statistics = statistics_names(self._model)
        self._clients = ClientView(
            workload,
            self._device,
            lambda indices: (labels for _, labels in self._eval_batches(indices)),
        )
        self._batch_term = BatchTerm(self._model)
        self._by_batch = goes_by_batch(self._model)

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs one after another."""
        results: list[ClientUpdate | ClientFailure] = []
        for job in jobs:
            try:
                with self.workload.options.computing():
                    started = time.perf_counter()
                    update = self.train_client(job)
                    results.append(replace(update, seconds=time.perf_counter() - started))
            except (RuntimeError, ValueError, IndexError) as error:
                raise TrainingError(
                    f"training client {job.client} in round {job.state.round} failed: {error}"
                ) from error
            self.workload.callback.on_job()
        return results

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests the models one after another."""
        task = self.workload.task
        with self.workload.options.computing():
            tallies = [self.tally(state, indices) for state in states]
        return [{} if tally is None else task.metrics(tally) for tally in tallies]

    def train_client(self, job: LocalJob) -> ClientUpdate:
        """A client's part of a round: statistics, training, statistics again, report."""
        indices = self.workload.federation.train_indices(job.client)
        job = job.personalised()
        needs = job.method.needs
        local = self._clients.local(job)
        observed = job.observed
        self._receive(observed)
        before = self._observe(indices, observed, needs.before)
        if observed is not job.state:
            self._receive(job.state)
        with seeded(job.seed, self._device):
            loss, seen = self._fit(job, indices, local, job.strategy.objective(local))
        after = self._observe(indices, job.state, needs.after)
        params, buffers = read_state(self._model)
        own: Tensors = {}
        if (method := job.strategy.personal_method) is not None:
            own = self._train_personal_model(job, method, indices, local, {**params, **buffers})
        return self._clients.update(job, local, params, buffers, (before, after), (loss, seen), own)

    def _train_personal_model(
        self, job: LocalJob, method: Strategy, indices: Indices, local: Local, shared: Tensors
    ) -> Tensors:
        """The client's own model, trained on the same batches."""
        received = {**job.state.params, **job.state.buffers}
        start = job.strategy.personal_start(local, received, shared)
        params = {name: start[name] for name in job.state.params}
        buffers = {name: one for name, one in start.items() if name not in params}
        load_state(self._model, ServerState(job.state.round, params, buffers))
        with seeded(job.seed, self._device):
            self._fit(replace(job, method=Method(method)), indices, local, method.objective(local))
        trained, counted = read_state(self._model)
        return {**trained, **counted}

    def _fit(
        self, job: LocalJob, indices: Indices, local: Local, objective: Objective
    ) -> tuple[Tensor, int]:
        """Local training; returns the summed loss over the last epoch and its samples."""
        step = self._stepper(job, local, objective)
        loss, seen = torch.zeros((), device=self._device), 0
        phases = "trainable" in job.method.needs.hooks
        required = {name: one.requires_grad for name, one in self._model.named_parameters()}
        for epoch, batches in enumerate(job.batches):
            loss, seen = torch.zeros_like(loss), 0
            if phases:
                self._set_trainable(
                    job.strategy.trainable(local, epoch, job.train.epochs), required
                )
            if not any(one.requires_grad for one in self._model.parameters()):
                name = type(job.strategy).__name__
                raise TrainingError(
                    f"{name} trains no parameter of this model in epoch {epoch}; give the model"
                    " another trainable layer"
                )
            for inputs, targets in self._batches(job, indices, epoch, batches):
                loss += step(inputs, targets) * len(inputs)
                seen += len(inputs)
        if phases:
            self._set_trainable(None, required)
        return loss, seen

    def _set_trainable(self, names: Collection[str] | None, required: Mapping[str, bool]) -> None:
        """Sets the parameters that train; for None all that trained before."""
        for name, one in self._model.named_parameters():
            one.requires_grad_(required[name] and (names is None or name in names))
            one.grad = None

    def _batches(
        self, job: LocalJob, indices: Indices, epoch: int, batches: Iterable[Indices]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch, augmented if configured."""
        draws = None if job.augment is None else job.augment.draws(job.batches, epoch)
        for batch in batches:
            inputs, targets = self._samples.batch(indices[batch])
            if job.augment is not None and draws is not None:
                inputs, targets = job.augment.apply(inputs, targets, draws[batch])
            yield inputs, targets

    def _stepper(self, job: LocalJob, local: Local, objective: Objective) -> Step:
        """A local step on a batch; returns the loss of the batch alone.

        How a step follows from the gradient, `fedproto.engines.training` says.
        """
        self._begin(job)
        optimizer = job.train.optimizer_for(self._model, job.lr)
        term: BatchTerm | None = None
        if "batch_term" in job.method.needs.hooks:
            term = self._batch_term
            term.begin_job(job.strategy, local, job.state)
        return self._step_by(job.train, optimizer, objective, job.state.params, term)

    def _begin(self, job: LocalJob) -> None:
        """Makes the model, which holds a job's weights, ready for its steps."""
        self._model.train()
        if job.train.batch_norm == "frozen":
            freeze_statistics(self._model)
        self._masks.begin_job(job.seed)

    def _step_by(
        self,
        train: TrainOptions,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        received: Tensors,
        term: BatchTerm | None = None,
    ) -> Step:
        """The step of an optimizer, from the received weights."""
        params = dict(self._model.named_parameters())

        def compute_gradient(inputs: Tensor, targets: Tensor) -> Tensor:
            added = objective.closed_form(params, received)
            optimizer.zero_grad(set_to_none=True)
            return self._backward(inputs, targets, objective, added, term)

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            self._masks.begin_step()
            compute = functools.partial(compute_gradient, inputs, targets)
            return take_step(self._model, train, optimizer, compute)

        return step

    def _backward(
        self,
        inputs: Tensor,
        targets: Tensor,
        objective: Objective,
        added: Tensor | None,
        term: BatchTerm | None,
    ) -> Tensor:
        """Computes the gradient of a batch's loss and the added terms; returns the loss alone."""
        self._masks.begin_pass()
        with self.workload.options.autocast(self._device):
            outputs = None if term is None else outputs_of(self._model, inputs)
            logits = self._model(inputs) if outputs is None else outputs.logits
            loss = self.workload.task.loss(objective.calibrate(logits), targets)
            own = None if term is None or outputs is None else term(inputs, outputs, targets)
        terms = [one for one in (own, added) if one is not None]
        sum(terms, loss).backward()
        return loss.detach()

    @torch.no_grad()
    def _observe(
        self, indices: Indices, state: ServerState, what: frozenset[Statistic]
    ) -> Observation | None:
        """Statistics of a client's training data under the current weights, if any are needed."""
        if not what:
            return None
        if self._lacks_statistics(state):
            self._estimate(indices)
        model, task = self._model.eval(), self.workload.task
        number = self.workload.federation.num_classes
        parts: list[Observation] = []
        for inputs, targets in self._eval_batches(indices):
            with self.workload.options.autocast(self._device):
                found = features_of(model)(inputs).to(self.workload.options.torch_dtype())
            features, labels = task.labelled_features(found, targets)
            parts.append(Observation.of(what, features, labels, number))
        return functools.reduce(operator.add, parts)  # a fixed order gives fixed bits

    def _receive(self, state: ServerState) -> None:
        """Puts a received model into the engine's; statistics that it lacks are initialised."""
        load_state(self._model, state)
        if self._lacks_statistics(state):
            reset_statistics(self._model)

    @torch.no_grad()
    def tally(self, state: ServerState, indices: Indices) -> Tensor | None:
        """The task's tally of a model on some samples; None for no samples."""
        load_state(self._model, state)
        lacks = self._lacks_statistics(state)
        if not lacks and not self._by_batch:
            return self._tally(indices)
        tallies = []
        for train, tested in by_client(self.workload.federation, indices):
            if lacks:
                self._estimate(train)
            tallies.append(self._tally(tested))
        found = [tally for tally in tallies if tally is not None]
        return torch.stack(found).sum(dim=0) if found else None

    def _tally(self, indices: Indices) -> Tensor | None:
        model, task = self._model.eval(), self.workload.task
        tallies = []
        for inputs, targets in self._eval_batches(indices):
            with self.workload.options.autocast(self._device):
                logits = model(inputs)
            tallies.append(task.tally(logits, targets))
        return torch.stack(tallies).sum(dim=0) if tallies else None

    def _lacks_statistics(self, state: ServerState) -> bool:
        """Whether batch-norm statistics are to be estimated from the data at hand."""
        return not self._statistics <= {*state.params, *state.buffers}

    def _estimate(self, indices: Indices) -> None:
        with self.workload.options.autocast(self._device):
            estimate(self._model, (inputs for inputs, _ in self._eval_batches(indices)))

    def _eval_batches(self, indices: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.workload.options.eval_batch_size
        for start in range(0, len(indices), size):
            yield self._samples.batch(indices[start : start + size])


def by_client(federation: Federation, indices: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Samples to test on by client, each with those to estimate statistics from.

    They are the test parts of all clients, samples of one part, or samples that the server keeps.
    """
    if np.array_equal(indices, federation.test_indices):
        tested = (client for client in federation.clients if len(client.test))
        yield from ((client.train, client.test) for client in tested)
    elif len(indices):
        # Clients may share samples; few hold the first one.
        holders = [one for one in federation.clients if indices[0] in one.test]
        own = [one for one in holders if np.isin(indices, one.test).all()]
        kept = federation.validation if len(federation.validation) else indices
        yield min(own, key=lambda one: len(one.test)).train if own else kept, indices
