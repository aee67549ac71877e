"""Batch-norm statistics of stacked models: into the stack, out of it, and estimated from data.

Shapes: J jobs, N samples of the largest client.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from fedproto.engines.base import LocalJob
from fedproto.engines.stacking.network import Network
from fedproto.types import ServerState, Tensors


def received(network: Network, states: Sequence[ServerState], like: Tensor) -> dict[str, Tensor]:
    """The statistics of some states; those of a fresh layer for a state that has none."""
    found = {}
    for name, shape in network.statistics.items():
        at_first = torch.full(shape, _fresh(name))
        rows = [state.buffers.get(name, at_first) for state in states]
        found[name] = torch.stack([row.to(like.device, like.dtype) for row in rows])
    return found


def lacking(network: Network, states: Sequence[ServerState]) -> set[str]:
    """The statistics that any state leaves to be estimated from the data at hand."""
    return {name for state in states for name in network.statistics if name not in state.buffers}


def returned(job: LocalJob, trained: Tensors, index: int) -> Tensors:
    """A job's buffers after training: statistics from the stack, counters counted on."""
    counted = 0 if job.train.batch_norm == "frozen" else job.batches.steps
    buffers = {}
    for name, tensor in job.state.buffers.items():
        if name in trained:
            buffers[name] = trained[name][index].clone().to(tensor.dtype)
        else:
            buffers[name] = tensor + counted if name.endswith("num_batches_tracked") else tensor
    return buffers


def estimated(
    network: Network,
    params: Tensors,
    names: Collection[str],
    inputs: Tensor,
    index: Tensor,
    batch: int,
    room: int,
) -> dict[str, Tensor]:
    """The mean over a job's batches of the statistics of some names, ``[J, …]``.

    The samples ``[J, N]`` of each job come longer ones first; -1 fills the rows up. At once fit
    `room` samples.
    """
    mean = {name: torch.full_like(params[name], _fresh(name)) for name in names}
    longest = -(index >= 0).sum(dim=1).cpu().numpy()
    at_once = max(1, room // batch)
    for number, first in enumerate(range(0, index.shape[1], batch), start=1):
        active = int(np.searchsorted(longest, -first, side="left"))
        for begin in range(0, active, at_once):
            rows = slice(begin, min(begin + at_once, active))
            part = index[rows, first : first + batch]
            own = {name: tensor[rows] for name, tensor in {**params, **mean}.items()}
            found = network.measured(own, inputs[part.clamp(min=0)], part >= 0, 1 / number)
            for name, value in found.items():
                mean[name][rows] = value
    return mean


def _fresh(name: str) -> float:
    """What a layer's statistics are at first."""
    return float(name.endswith("running_var"))
