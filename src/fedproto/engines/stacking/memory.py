"""How many jobs fit: a stack that does not is split, and halved where the estimate was too bold."""

from __future__ import annotations

import os

import torch

from fedproto.engines.stacking.network import Network
from fedproto.engines.stacking.objectives import StackKind
from fedproto.engines.stacking.updates import rule_for
from fedproto.types import Tensors

SHARE = 0.7
"""Of the free memory; results, tests and other programs need some too."""


def bytes_per_job(network: Network, example: Tensors, kind: StackKind) -> int:
    """An estimate of the memory that one job takes while it is trained."""
    weights = sum(tensor.numel() for tensor in example.values())
    rule = rule_for(kind.train)
    # The weights, what is handed in and what is handed out; then what rule and objective keep.
    copies = 3 + rule.slots + kind.rows
    size = next(iter(example.values())).element_size()
    return size * (copies * weights + network.numbers(kind.train.batch_size))


def jobs_that_fit(job_bytes: int, device: torch.device) -> int:
    """The number of jobs that fit at once; at least one."""
    return max(1, int(SHARE * free_bytes(device)) // job_bytes)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be had on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch has reserved and not in use can be used again.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
