"""Batch-norm statistics of stacked models: into the stack, out of it, and estimated from data.

Shapes: J jobs, N samples of the largest client.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedproto.engines.job import LocalJob
from fedproto.engines.stacking.network import Network
from fedproto.types import ServerState, Tensors


def received(network: Network, states: Sequence[ServerState], like: Tensor) -> dict[str, Tensor]:
    """The statistics of some states; those of a fresh layer for a state that has none."""
    found = {}
    for name, shape in network.statistics.items():
        fresh = torch.full(shape, float(name.endswith("running_var")))
        rows = [state.buffers.get(name, fresh) for state in states]
        found[name] = torch.stack([row.to(like.device, like.dtype) for row in rows])
    return found


def lacking(network: Network, states: Sequence[ServerState]) -> bool:
    """Whether any state leaves statistics to be estimated from the data at hand."""
    return any(name not in state.buffers for state in states for name in network.statistics)


def returned(job: LocalJob, trained: Tensors, index: int) -> Tensors:
    """A job's buffers after training: statistics from the stack, counters counted on."""
    counted = 0 if job.train.batch_norm == "frozen" else job.batches.steps
    buffers = {}
    for name, tensor in job.state.buffers.items():
        if name in trained:
            buffers[name] = trained[name][index].clone()
        else:
            buffers[name] = tensor + counted if name.endswith("num_batches_tracked") else tensor
    return buffers


def estimated(
    network: Network, params: Tensors, inputs: Tensor, index: Tensor, batch: int, room: int
) -> dict[str, Tensor]:
    """The mean over a job's batches of their statistics, ``[J, …]``.

    The samples ``[J, N]`` of each job come longer ones first; -1 fills the rows up. At once fit
    `room` samples.
    """
    sizes = (index >= 0).sum(dim=1)
    number = torch.div(sizes + batch - 1, batch, rounding_mode="floor").to(inputs.dtype)
    total = {name: torch.zeros_like(params[name]) for name in network.statistics}
    longest = -sizes.cpu().numpy()
    at_once = max(1, room // batch)
    for first in range(0, index.shape[1], batch):
        active = int(np.searchsorted(longest, -first, side="left"))
        for begin in range(0, active, at_once):
            rows = slice(begin, min(begin + at_once, active))
            part = index[rows, first : first + batch]
            own = {name: tensor[rows] for name, tensor in params.items()}
            found = network.measured(own, inputs[part.clamp(min=0)], part >= 0)
            for name, value in found.items():
                total[name][rows] += value
    return {name: value / number.unsqueeze(1) for name, value in total.items()}
