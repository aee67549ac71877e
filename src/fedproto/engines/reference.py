"""The reference engine: one job after another, obviously right. Every faster path is tested
against it.
"""  # noqa: D205 - one sentence says it best

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fedproto.engines.base import ENGINES, Engine, OnDone, Workload
from fedproto.equations import class_prototypes
from fedproto.errors import TrainingError
from fedproto.models.base import features_of
from fedproto.rng import Indices, seeded
from fedproto.types import ClientFailure, ClientUpdate, LocalJob, Prototypes, ServerState, Tensors


@ENGINES.register("reference")
class ReferenceEngine(Engine):
    """Trains with a plain loop over batches, on CPU or CUDA.

    Args:
        workload: What all jobs share.
        channels_last: Keep images with their channels last: the same but for rounding, and faster
            on a CPU.
    """

    def __init__(self, workload: Workload, *, channels_last: bool = False) -> None:
        super().__init__(workload)
        self._device = workload.options.torch_device()
        dtype = workload.options.torch_dtype()
        self._model = copy.deepcopy(workload.model).to(self._device, dtype)
        if channels_last:
            self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        features_of(self._model)
        self._samples = workload.federation.samples.to(self._device, dtype)

    def train(
        self, jobs: Sequence[LocalJob], on_done: OnDone | None = None
    ) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs one after another."""
        results: list[ClientUpdate | ClientFailure] = []
        for job in jobs:
            try:
                with self.workload.options.precision():
                    results.append(self.train_client(job))
            except (RuntimeError, ValueError, IndexError) as error:
                raise TrainingError(
                    f"training client {job.client} in round {job.state.round} failed: {error}"
                ) from error
            if on_done is not None:
                on_done()
        return results

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests the models one after another."""
        task = self.workload.task
        with self.workload.options.precision():
            tallies = [self.tally(state, indices) for state in states]
        return [{} if tally is None else task.metrics(tally) for tally in tallies]

    def train_client(self, job: LocalJob) -> ClientUpdate:
        """A client's part of Algorithm 1: prototypes, local training, prototypes, update."""
        indices = self.workload.federation.train_indices(job.client)
        load_state(self._model, job.state)
        before = self._prototypes(indices) if job.strategy.needs_prototypes else None
        with seeded(job.seed, self._device):
            train_loss = self._fit(job, indices)
        after = self._prototypes(indices) if job.strategy.needs_prototypes else None
        params, buffers = read_state(self._model)
        return ClientUpdate(
            client=job.client,
            num_examples=len(indices),
            params=params,
            buffers=buffers,
            train_loss=train_loss,
            epochs_done=job.batches.epochs,
            prototypes=after,
            local_margin=job.strategy.summarize(before, after) if before and after else None,
        )

    def _fit(self, job: LocalJob, indices: Indices) -> float | None:
        """Local training; returns the mean loss over the last epoch."""
        model, task = self._model.train(), self.workload.task
        params = dict(model.named_parameters())
        optimizer = job.train.optimizer_for(model, job.lr)
        epoch_loss: Tensor | None = None
        seen = 0
        for batches in job.batches:
            epoch_loss, seen = torch.zeros((), device=self._device), 0
            for batch in batches:
                inputs, targets = self._samples.batch(indices[batch])
                loss = task.loss(model(inputs), targets)
                penalty = job.strategy.penalty(params, job.state.params)
                optimizer.zero_grad(set_to_none=True)
                (loss if penalty is None else loss + penalty).backward()
                optimizer.step()
                epoch_loss += loss.detach() * len(batch)
                seen += len(batch)
        return None if epoch_loss is None else float(epoch_loss) / seen

    @torch.no_grad()
    def _prototypes(self, indices: Indices) -> Prototypes:
        """Prototypes of the client's training data under the current weights, eq. (4)."""
        encode = features_of(self._model.eval())
        num_classes = self.workload.federation.num_classes
        total: Prototypes | None = None
        for inputs, targets in self._eval_batches(indices):
            features, labels = self.workload.task.labelled_features(encode(inputs), targets)
            part = class_prototypes(features, labels, num_classes)
            total = part if total is None else total + part
        assert total is not None  # noqa: S101 - a client is never empty
        return total

    @torch.no_grad()
    def tally(self, state: ServerState, indices: Indices) -> Tensor | None:
        """What a model's scores on some samples are computed from; None for no samples."""
        load_state(self._model, state)
        model, task = self._model.eval(), self.workload.task
        tallies = [
            task.tally(model(inputs), targets) for inputs, targets in self._eval_batches(indices)
        ]
        return torch.stack(tallies).sum(dim=0) if tallies else None

    def _eval_batches(self, indices: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.workload.options.eval_batch_size
        for start in range(0, len(indices), size):
            yield self._samples.batch(indices[start : start + size])


def read_state(model: nn.Module) -> tuple[Tensors, Tensors]:
    """Copies of a model's parameters and of its other saved tensors, by name."""
    parameters = {name for name, _ in model.named_parameters()}
    copies = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return (
        {name: tensor for name, tensor in copies.items() if name in parameters},
        {name: tensor for name, tensor in copies.items() if name not in parameters},
    )


def load_state(model: nn.Module, state: ServerState) -> None:
    """Puts a state's tensors into a model."""
    model.load_state_dict({**state.params, **state.buffers})
