"""Which engine suits the device and the amount of work, where the configuration leaves it open.

The choice depends on configuration and machine alone, never on timing, so runs that are continued
on the same machine go on with the same engine. It is made for all runs that train together: sixteen
short ones are worth the processes that one of them is not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedproto.data.tasks import Task
from fedproto.engines.base import AUTO, ENGINES, EngineOptions, available_cores

WORTHWHILE_STEPS = 2000
"""Local steps from which on starting worker processes costs less than they save."""


@dataclass(frozen=True)
class Demand:
    """Roughly how much work is coming from all runs that train together; 0 when unknown."""

    jobs_per_round: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Choice:
    """An engine."""

    name: str
    reason: str
    threads: int


def choose(
    options: EngineOptions, task: Task, demand: Demand, before: Sequence[Mapping[str, Any]] = ()
) -> Choice:
    """The engine that is asked for, the one that runs began with, or the one that suits.

    Threads are left at the number that PyTorch has (``OMP_NUM_THREADS`` where that is set), but
    for the processes, which have one each, and for jobs too small to be worth more than one.
    """
    given = torch.get_num_threads()
    if options.name != AUTO:
        return Choice(options.name, "asked for", 1 if options.name == "processes" else given)
    device = options.torch_device().type
    for known in before:
        if known.get("device") == device and known.get("name") in ENGINES.names():
            return Choice(known["name"], "as the runs began", int(known.get("threads", given)))
    name, reason = _suitable(options, task, demand)
    small = reason == TOO_LITTLE and "OMP_NUM_THREADS" not in os.environ
    return Choice(name, reason, 1 if name == "processes" or small else given)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """So many threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


TOO_LITTLE = "too little work to share out"


def _suitable(options: EngineOptions, task: Task, demand: Demand) -> tuple[str, str]:
    device, cores = options.torch_device(), available_cores()
    if device.type == "cuda":
        if not task.one_label:
            return "captured", f"one client after another on {device}"
        return "stacked", f"all clients at once on {device}"
    if cores < 2:
        return "reference", "one core"
    if multiprocessing.current_process().daemon:
        return "reference", "a pool's worker cannot start processes"
    if "fork" not in multiprocessing.get_all_start_methods():
        return "reference", "this system cannot fork processes"
    if demand.steps < WORTHWHILE_STEPS:
        return "reference", TOO_LITTLE
    if demand.jobs_per_round < cores:
        return "reference", f"fewer clients a round than the {cores} cores"
    return "processes", f"{cores} cores"
