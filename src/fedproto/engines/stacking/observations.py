"""Statistics of the jobs' data under stacked models: features, batch norm, test sums.

Shapes: J jobs, N samples of the largest client.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedproto.engines.base import LocalJob
from fedproto.engines.reference import by_client
from fedproto.engines.stacking.network import Network, StackedForm
from fedproto.rng import Indices
from fedproto.strategies.values import Observation, Statistic
from fedproto.types import ServerState, Tensors

FILLS = -1
"""The index of a sample that only fills up a row, and its label; it is no class."""


class Observer:
    """Evaluates stacked models on all samples of many jobs at once."""

    def __init__(self, form: StackedForm) -> None:
        self._workload, self._network = form.workload, form.network
        self._inputs, self._targets = form.inputs, form.targets
        self._device, self._dtype = form.inputs.device, form.workload.options.torch_dtype()

    def observe(
        self, packed: Tensors, jobs: Sequence[LocalJob], needed: Sequence[frozenset[Statistic]]
    ) -> dict[int, Observation]:
        """The statistics that each job needs of its training data, by position of the job."""
        found: dict[int, Observation] = {}
        for statistics in dict.fromkeys(needed):
            if statistics:
                indices = [index for index, one in enumerate(needed) if one == statistics]
                found |= self._observe_alike(packed, jobs, indices, statistics)
        return found

    def _observe_alike(
        self,
        packed: Tensors,
        jobs: Sequence[LocalJob],
        indices: list[int],
        statistics: frozenset[Statistic],
    ) -> dict[int, Observation]:
        train_indices = self._workload.federation.train_indices
        where, order = self._rows([train_indices(jobs[index].client) for index in indices])
        indices = [indices[row] for row in order]
        batch = self._workload.options.eval_batch_size
        classes = self._workload.federation.num_classes
        params = {name: tensor[indices] for name, tensor in packed.items()}
        total: Observation | None = None
        width = batch if self._network.by_batch else self._samples_at_once(len(indices))
        for rows, columns in self._parts(where, width):
            own = {name: tensor[rows] for name, tensor in params.items()}
            samples = where[rows, columns]
            live = samples != FILLS
            samples = samples.clamp(min=0)
            features = self._network.outputs(own, self._inputs[samples], live).features
            labels = torch.where(live, self._targets[samples], FILLS)
            found = Observation.of(statistics, features, labels, classes)
            total = total or Observation(
                *(part.new_zeros((len(indices), *part.shape[1:])) for part in found)
            )
            for sum_, part in zip(total, found, strict=True):
                sum_[rows] += part
        assert total is not None  # noqa: S101 - no client is without samples
        return {
            index: Observation(*one)
            for index, one in zip(indices, zip(*total, strict=True), strict=True)
        }

    def tallies(self, packed: Tensors, models: int, indices: Indices) -> Tensor:
        """Each model's test sums over some samples."""
        task = self._workload.task
        if self._network.by_batch:
            own = [test for _, test in by_client(self._workload.federation, indices)]
            return self._tallies_by_client(packed, models, own)
        total: list[Tensor] = []
        where = torch.from_numpy(indices).to(self._device)
        for part in where.split(self._samples_at_once(models)):
            x = self._inputs[part].expand(models, *[-1] * self._inputs.dim())
            live = x.new_ones(x.shape[:2], dtype=torch.bool)
            logits = self._network.outputs(packed, x, live).logits
            total.append(vmap(task.tally, in_dims=(0, None))(logits, self._targets[part]))
        return torch.stack(total).sum(dim=0).cpu()

    def _tallies_by_client(self, packed: Tensors, models: int, own: Sequence[Indices]) -> Tensor:
        """Each model's test sums, every client's samples in batches of their own."""
        where, _ = self._rows(own)
        width, task, total = self._workload.options.eval_batch_size, self._workload.task, []
        for index in range(models):
            tallies = []
            for rows, columns in self._parts(where, width):
                part = where[rows, columns]
                live = part != FILLS
                model = {
                    name: tensor[index].expand(len(part), *tensor.shape[1:])
                    for name, tensor in packed.items()
                }
                x = self._inputs[part.clamp(min=0)]
                logits = self._network.outputs(model, x, live).logits
                tallies.append(task.tally(logits[live], self._targets[part[live]]))
            total.append(torch.stack(tallies).sum(dim=0))
        return torch.stack(total).cpu()

    def _rows(self, parts: Sequence[Indices]) -> tuple[Tensor, list[int]]:
        """Samples row by row ``[J, N]``, longest first, filled up by `FILLS`; and whose."""
        positions = sorted(range(len(parts)), key=lambda position: -len(parts[position]))
        index = np.full((len(parts), len(parts[positions[0]])), FILLS, dtype=np.int64)
        for row, position in enumerate(positions):
            index[row, : len(parts[position])] = parts[position]
        return torch.from_numpy(index).to(self._device), positions

    def _parts(self, where: Tensor, width: int) -> Iterator[tuple[slice, slice]]:
        """Rows and columns that fit into memory, without rows of which nothing is left."""
        sizes = (where != FILLS).sum(dim=1).cpu().numpy()
        at_once = max(1, self._samples_that_fit() // width)
        for first in range(0, where.shape[1], width):
            active = int(np.searchsorted(-sizes, -first, side="left"))
            for begin in range(0, active, at_once):
                yield slice(begin, min(begin + at_once, active)), slice(first, first + width)

    def _samples_at_once(self, models: int) -> int:
        """Samples per model where nothing is trained."""
        fit = self._samples_that_fit() // models
        return max(1, min(self._workload.options.eval_batch_size, fit))

    def _samples_that_fit(self) -> int:
        size = torch.finfo(self._dtype).bits // 8
        return free_bytes(self._device) // 4 // (size * self._network.numbers(1))


def received_statistics(
    network: Network, states: Sequence[ServerState], like: Tensor
) -> dict[str, Tensor]:
    """The batch-norm statistics of some states; initial ones for a state that has none."""
    found = {}
    for name, shape in network.statistics.items():
        initial = torch.full(shape, float(name.endswith("running_var")))
        rows = [state.buffers.get(name, initial) for state in states]
        found[name] = torch.stack([row.to(like.device, like.dtype) for row in rows])
    return found


def lacks_statistics(network: Network, states: Sequence[ServerState]) -> bool:
    """Whether any state leaves batch-norm statistics to be estimated from the data at hand."""
    return any(name not in state.buffers for state in states for name in network.statistics)


def returned_buffers(job: LocalJob, trained: Tensors, index: int) -> Tensors:
    """A job's buffers after training: statistics from the stack, counters advanced."""
    counted = 0 if job.train.batch_norm == "frozen" else job.batches.steps
    buffers = {}
    for name, tensor in job.state.buffers.items():
        if name in trained:
            buffers[name] = trained[name][index].clone().to(tensor.dtype)
        else:
            buffers[name] = tensor + counted if name.endswith("num_batches_tracked") else tensor
    return buffers


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch has reserved and not in use can be used again.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
