"""What stacked models make of their jobs' data before and after training.

Shapes: J jobs, N samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedproto.engines.base import Workload
from fedproto.engines.job import LocalJob
from fedproto.engines.stacking.memory import free_bytes
from fedproto.engines.stacking.network import Network
from fedproto.engines.stacking.statistics import estimated, lacking
from fedproto.equations import class_sums
from fedproto.strategies.contract import Look, Observation
from fedproto.types import Tensors

FILLS = -1
"""The label of a sample that only fills a row; it is no class."""


class Observer:
    """Looks at all samples of many jobs at once.

    Args:
        workload: What all jobs share.
        network: The models.
        inputs: All samples' inputs on the device, as the network wants them.
        targets: All samples' labels.
    """

    def __init__(
        self, workload: Workload, network: Network, inputs: Tensor, targets: Tensor
    ) -> None:
        self._workload, self._network = workload, network
        self._inputs, self._targets = inputs, targets
        self._device, self._dtype = inputs.device, inputs.dtype

    def observe(
        self, packed: Tensors, jobs: Sequence[LocalJob], asked: Sequence[frozenset[Look]]
    ) -> dict[int, Observation]:
        """What stacked weights make of the jobs' training data, by place."""
        found: dict[int, Observation] = {}
        for what in dict.fromkeys(asked):
            if what:
                places = [place for place, look in enumerate(asked) if look == what]
                found |= self._observe_alike(packed, jobs, places, what)
        return found

    def _observe_alike(
        self, packed: Tensors, jobs: Sequence[LocalJob], places: list[int], what: frozenset[Look]
    ) -> dict[int, Observation]:
        federation = self._workload.federation
        places = sorted(places, key=lambda place: -jobs[place].batches.num_examples)
        own = [federation.train_indices(jobs[place].client) for place in places]
        index = np.full((len(own), len(own[0])), FILLS, dtype=np.int64)
        for place, indices in enumerate(own):
            index[place, : len(indices)] = indices
        sizes = np.array([len(indices) for indices in own])
        where = torch.from_numpy(index).to(self._device)
        params = {name: tensor[places] for name, tensor in packed.items()}
        if lacking(self._network, [jobs[place].state for place in places]):
            batch = self._workload.options.eval_batch_size
            params |= estimated(
                self._network, params, self._inputs, where, batch, self._room_for_samples()
            )
        total: Observation | None = None
        width = self.samples_at_once(len(places))
        for first in range(0, index.shape[1], width):
            active = int(np.searchsorted(-sizes, -first, side="left"))
            part = where[:active, first : first + width]
            leading = {name: tensor[:active] for name, tensor in params.items()}
            seen = self._look(leading, part, what)
            if total is None:
                total = seen
            else:
                total.sums[:active] += seen.sums
                total.count[:active] += seen.count
                total.loss[:active] += seen.loss
        assert total is not None  # noqa: S101 - no client is empty
        mean = total.loss / torch.from_numpy(sizes).to(self._device)
        return {
            place: Observation(total.sums[row], total.count[row], mean[row])
            for row, place in enumerate(places)
        }

    def _look(self, params: Tensors, part: Tensor, what: frozenset[Look]) -> Observation:
        """Sums over some samples of every job, ``[J, N]``; `FILLS` stands for none."""
        x = self._inputs[part.clamp(min=0)]
        labels = torch.where(part == FILLS, FILLS, self._targets[part.clamp(min=0)])
        features = self._network.features(params, x) if "features" in what else None
        sums, count = class_sums(features, labels, self._workload.federation.num_classes)
        loss = torch.zeros(len(part), dtype=self._dtype, device=self._device)
        if "loss" in what:
            scores = self._network.scores(params, x).transpose(1, 2)
            loss = functional.cross_entropy(
                scores, labels, ignore_index=FILLS, reduction="none"
            ).sum(dim=1)
        return Observation(sums, count, loss)

    def samples_at_once(self, models: int) -> int:
        """Samples per model where nothing is trained: as many as the memory plan allows."""
        fit = self._room_for_samples() // models
        return max(1, min(self._workload.options.eval_batch_size, fit))

    def _room_for_samples(self) -> int:
        size = torch.finfo(self._dtype).bits // 8
        return free_bytes(self._device) // 4 // (size * self._network.numbers(1))
