"""What stacked models make of their jobs' data before and after training.

Shapes: J jobs, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedproto.engines.base import LocalJob, Workload
from fedproto.engines.stacking.memory import free_bytes
from fedproto.engines.stacking.network import Network
from fedproto.engines.stacking.statistics import estimated, lacking
from fedproto.rng import Indices
from fedproto.strategies.base import Observation, Statistic
from fedproto.types import Tensors

FILLS = -1
"""The label of a sample that only fills a row; it is no class."""


class Observer:
    """Looks at all samples of many jobs at once."""

    def __init__(
        self, workload: Workload, network: Network, inputs: Tensor, targets: Tensor
    ) -> None:
        self._workload, self._network = workload, network
        self._inputs, self._targets = inputs, targets
        self._device, self._dtype = inputs.device, inputs.dtype

    def observe(
        self, packed: Tensors, jobs: Sequence[LocalJob], asked: Sequence[frozenset[Statistic]]
    ) -> dict[int, Observation]:
        """What stacked weights make of the jobs' training data, by place."""
        found: dict[int, Observation] = {}
        for what in dict.fromkeys(asked):
            if what:
                indices = [index for index, look in enumerate(asked) if look == what]
                found |= self._observe_alike(packed, jobs, indices, what)
        return found

    def _observe_alike(
        self,
        packed: Tensors,
        jobs: Sequence[LocalJob],
        indices: list[int],
        what: frozenset[Statistic],
    ) -> dict[int, Observation]:
        train_indices = self._workload.federation.train_indices
        where, order = self._rows([train_indices(jobs[index].client) for index in indices])
        indices = [indices[row] for row in order]
        batch = self._workload.options.eval_batch_size
        params = {name: tensor[indices] for name, tensor in packed.items()}
        unknown = lacking(self._network, [jobs[index].state for index in indices])
        if unknown:
            room = self._room_for_samples()
            params |= estimated(self._network, params, unknown, self._inputs, where, batch, room)
        total: Observation | None = None
        width = batch if self._network.by_batch else self.samples_at_once(len(indices))
        for rows, columns in self._parts(where, width):
            own = {name: tensor[rows] for name, tensor in params.items()}
            seen = self._look(own, where[rows, columns], what)
            total = total or Observation(
                *(part.new_zeros((len(indices), *part.shape[1:])) for part in seen)
            )
            for sum_, part in zip(total, seen, strict=True):
                sum_[rows] += part
        assert total is not None  # noqa: S101 - no client is without samples
        total.loss.div_((where != FILLS).sum(dim=1))
        return {
            index: Observation(*one)
            for index, one in zip(indices, zip(*total, strict=True), strict=True)
        }

    def tallies(self, packed: Tensors, own: Sequence[Indices]) -> Tensor:
        """Each model's test sums, every client's samples in batches of their own."""
        where, _ = self._rows(own)
        width, task, total = self._workload.options.eval_batch_size, self._workload.task, []
        for state in range(len(next(iter(packed.values())))):
            tallies = []
            for rows, columns in self._parts(where, width):
                part = where[rows, columns]
                live = part != FILLS
                model = {
                    name: tensor[state].expand(len(part), *tensor.shape[1:])
                    for name, tensor in packed.items()
                }
                scores = self._network.scores(model, self._inputs[part.clamp(min=0)], live)
                tallies.append(task.tally(scores[live], self._targets[part[live]]))
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
        at_once = max(1, self._room_for_samples() // width)
        for first in range(0, where.shape[1], width):
            active = int(np.searchsorted(-sizes, -first, side="left"))
            for begin in range(0, active, at_once):
                yield slice(begin, min(begin + at_once, active)), slice(first, first + width)

    def _look(self, params: Tensors, part: Tensor, what: frozenset[Statistic]) -> Observation:
        """Sums over some samples of every job, ``[J, N]``; `FILLS` stands for none."""
        x, live = self._inputs[part.clamp(min=0)], part != FILLS
        labels = torch.where(live, self._targets[part.clamp(min=0)], FILLS)
        features = self._network.features(params, x, live) if "features" in what else None
        loss = torch.zeros(len(part), dtype=self._dtype, device=self._device)
        if "loss" in what:
            scores = self._network.scores(params, x, live).transpose(1, 2)
            loss = functional.cross_entropy(
                scores, labels, ignore_index=FILLS, reduction="none"
            ).sum(dim=1)
        number = self._workload.federation.num_classes
        return Observation.of(what, features, labels, number, loss)

    def samples_at_once(self, models: int) -> int:
        """Samples per model where nothing is trained: as many as the memory plan allows."""
        fit = self._room_for_samples() // models
        return max(1, min(self._workload.options.eval_batch_size, fit))

    def _room_for_samples(self) -> int:
        size = torch.finfo(self._dtype).bits // 8
        return free_bytes(self._device) // 4 // (size * self._network.numbers(1))
