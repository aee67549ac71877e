"""The engine that chooses: the one that suits the device and the amount of work.

The choice depends on configuration and machine alone, never on timing, so a run that is continued
on the same machine goes on with the same engine.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from fedproto.engines.base import ENGINES, Engine, OnDone, Workload, available_cores
from fedproto.rng import Indices
from fedproto.tasks import Classification
from fedproto.types import ClientFailure, ClientUpdate, LocalJob, ServerState

WORTHWHILE_STEPS = 2000
"""Local steps of a run from which on starting worker processes costs less than they save."""


@ENGINES.register("auto")
class AutoEngine(Engine):
    """Stacked or captured on CUDA, processes on a CPU where that pays, reference otherwise."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.name, reason = choose(workload)
        workload.notify(f"engine: {self.name} ({reason})")
        self._chosen = ENGINES.get(self.name)(workload)

    def train(
        self, jobs: Sequence[LocalJob], on_done: OnDone | None = None
    ) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs with the chosen engine."""
        return self._chosen.train(jobs, on_done)

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests with the chosen engine."""
        return self._chosen.evaluate(states, indices)

    def take_incidents(self) -> list[str]:
        """What went wrong in the chosen engine."""
        return self._chosen.take_incidents()

    def close(self) -> None:
        """Frees what the chosen engine holds."""
        self._chosen.close()


def choose(workload: Workload) -> tuple[str, str]:
    """The name of the engine that suits a workload, and why."""
    device, cores = workload.options.torch_device(), available_cores()
    if device.type == "cuda":
        if type(workload.task) is not Classification:
            return "captured", f"one client after another on {device}"
        return "stacked", f"all clients at once on {device}"
    if cores < 2:
        return "reference", "one core"
    if "fork" not in multiprocessing.get_all_start_methods():
        return "reference", "this system cannot fork processes"
    if workload.demand.jobs_per_round < cores:
        return "reference", f"fewer clients a round than the {cores} cores"
    if workload.demand.steps_per_run < WORTHWHILE_STEPS:
        return "reference", "too little work to share out"
    return "processes", f"{cores} cores"
