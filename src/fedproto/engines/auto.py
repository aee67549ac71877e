"""The choice of an engine by needs, device and amount of work, where the configuration is open.

The choice depends on configuration and machine alone, never on timing, so a run continued on the
same machine keeps its engine. It is made for all runs that train together: sixteen short ones are
worth worker processes that one of them is not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedproto.engines.base import AUTO, ENGINES, Capability, EngineOptions, available_cores

WORTHWHILE_STEPS = 2000
"""Local steps from which on starting worker processes costs less than they save."""

TOO_LITTLE = "too little work to share out"


@dataclass(frozen=True)
class Demand:
    """Estimated work of all runs that train together; 0 if unknown."""

    jobs_per_round: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Choice:
    """An engine, the reason for it, and PyTorch's number of threads beside it."""

    name: str
    reason: str
    threads: int


def choose(
    options: EngineOptions,
    needs: Collection[frozenset[Capability]],
    demand: Demand,
    before: Sequence[Mapping[str, Any]] = (),
) -> Choice:
    """The configured engine, the one that runs began with, or the fastest suitable one.

    An engine is suitable if it is capable of what at least one of the runs needs; jobs of the other
    runs are handed over. Threads stay at PyTorch's number (``OMP_NUM_THREADS`` where that is set)
    except for worker processes, which have one each, and for jobs too small for more than one.
    """
    given = torch.get_num_threads()
    if options.name != AUTO:
        return Choice(options.name, "asked for", 1 if options.name == "processes" else given)
    device = options.torch_device()
    for known in before:
        if known.get("device") == device.type and known.get("name") in ENGINES.names():
            return Choice(known["name"], "as the runs began", int(known.get("threads", given)))

    def capable(name: str) -> bool:
        return any(one <= ENGINES.get(name).capabilities for one in needs)

    if device.type == "cuda" and capable("stacked"):
        return Choice("stacked", f"all clients at once on {device}", given)
    if device.type == "cuda" and capable("captured"):
        return Choice("captured", f"one client after another on {device}", given)
    if device.type != "cpu" or not capable("processes"):
        return Choice("reference", "no faster engine is capable of these runs", given)
    obstacle = _obstacle_to_processes(demand)
    if obstacle is None:
        return Choice("processes", f"{available_cores()} cores", 1)
    small = obstacle == TOO_LITTLE and "OMP_NUM_THREADS" not in os.environ
    return Choice("reference", obstacle, 1 if small else given)


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Sets PyTorch's number of threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _obstacle_to_processes(demand: Demand) -> str | None:
    """Why worker processes are impossible or not worthwhile; None where they are worthwhile."""
    cores = available_cores()
    if cores < 2:
        return "one core"
    if multiprocessing.current_process().daemon:
        return "a pool's worker cannot start processes"
    if sys.platform == "darwin" or "fork" not in multiprocessing.get_all_start_methods():
        return "processes cannot be forked safely on this system"
    if demand.steps < WORTHWHILE_STEPS:
        return TOO_LITTLE
    if demand.jobs_per_round < cores:
        return f"fewer clients a round than the {cores} cores"
    return None
