"""Engines in processes of their own, among which the jobs of a round are shared out.

The processes engine has a single-threaded process for each core of a CPU: small models do not keep
several threads busy, since each step is over before they have met, but whole jobs side by side do.
The longest jobs go first so that all cores finish together. What trains them is
`fedproto.engines.manual`.

With several devices every device has a process with an engine of the configured kind. Processes
are then started afresh, since one that is forked cannot use CUDA: the model and the data are
pickled, and a script that trains needs ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import functools
import importlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch

from fedproto.callback import Callback
from fedproto.engines.base import (
    ENGINES,
    EVERYTHING,
    Capability,
    Engine,
    LocalJob,
    Workload,
    available_cores,
)
from fedproto.engines.layers import goes_by_batch, statistics_names
from fedproto.engines.manual import ManualTrainer
from fedproto.engines.pool import CPU, WorkerPool, keep_freed_memory
from fedproto.errors import ConfigError, TrainingError
from fedproto.rng import Indices
from fedproto.types import ClientFailure, ClientUpdate, ServerState

MakeEngine: TypeAlias = Callable[[torch.device, Callback], Engine]


def make_engine(name: str, workload: Workload) -> Engine:
    """An engine, on as many devices as the options say; worker processes use all cores anyway."""
    if len(workload.options.process_devices()) == 1 or name == "processes":
        return ENGINES.get(name)(workload)
    return DevicesEngine(name, workload)


class SharingEngine(Engine):
    """Shares out jobs among engines in processes of their own."""

    _shares: int | None = None
    """How many parts jobs are shared out in; None for one part for each job."""

    def _start(
        self, make_engine: MakeEngine, devices: Sequence[torch.device], *, forked: bool
    ) -> None:
        make_work = functools.partial(_Served, make_engine)
        self._pool: WorkerPool | None = None
        try:
            self._pool = WorkerPool(make_work, devices, self.workload.callback, forked=forked)
        except (OSError, ValueError) as error:
            self.workload.callback.on_notice(f"cannot start processes ({error}); working in one")
            self._here = make_engine(devices[0], self.workload.callback)

    def obstacle(self, job: LocalJob) -> str | None:
        """A strategy that another process would not find, such as one defined in a function."""
        try:
            pickle.dumps(type(job.strategy))
        except (pickle.PicklingError, AttributeError) as error:
            return f"{type(job.strategy).__name__} cannot be sent to other processes: {error}"
        return None

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Trains the jobs, shared out by their numbers of steps."""
        return self._shared("train", jobs, [job.batches.steps for job in jobs])

    def evaluate_personal(self, jobs: Sequence[LocalJob]) -> list[dict[str, float]]:
        """Tests the clients' models, shared out by their numbers of samples."""
        if any(self.obstacle(job) for job in jobs):
            return super().evaluate_personal(jobs)
        clients = self.workload.federation.clients
        sizes = [len(clients[job.client].test) for job in jobs]
        return self._shared("evaluate_personal", jobs, sizes)

    def close(self) -> None:
        """Ends the processes."""
        super().close()
        if self._pool is not None:
            self._pool.close()

    def _shared(
        self, method: str, items: Sequence[Any], sizes: Sequence[int], *more: Any
    ) -> list[Any]:
        """The results of a method of the engines, in the order of the items."""
        shares = shares_of(sizes, self._shares or len(items))
        found = self._called(
            [(method, [items[place] for place in share], *more) for share in shares]
        )
        results: dict[int, Any] = {}
        for share, part in zip(shares, found, strict=True):
            results |= zip(share, part, strict=True)
        return [results[place] for place in range(len(items))]

    def _called(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What methods of the engines return; a call is a method's name and its arguments."""
        if self._pool is None:
            return [getattr(self._here, method)(*given) for method, *given in calls]
        results: dict[int, Any] = {}

        def keep(place: int, answer: tuple[Any, list[str]]) -> None:
            results[place], notices = answer
            for text in notices:
                if text not in self._noticed:
                    self._noticed.add(text)
                    self.workload.callback.on_notice(text)
            for _ in results[place] if calls[place][0] == "train" else ():
                self.workload.callback.on_job()

        self._pool.run(calls, keep)
        return [results[place] for place in range(len(calls))]


@ENGINES.register("processes")
class ProcessesEngine(SharingEngine):
    """Trains on all cores of a CPU, one single-threaded process per core."""

    capabilities = EVERYTHING - {Capability.CUDA}

    def __init__(self, workload: Workload) -> None:
        # Through `auto` the options name another engine, and their device may not be the CPU.
        options = replace(workload.options, name="processes", device="cpu")
        super().__init__(replace(workload, options=options))
        keep_freed_memory()
        # PyTorch imports its compiler with the first optimizer: here once, not in every worker.
        importlib.import_module("torch._dynamo")
        devices = [CPU] * (options.workers or available_cores())
        self._start(self._make_trainer, devices, forked=True)

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests parts of the samples side by side."""
        if not states or not len(indices):
            return [{} for _ in states]
        size = self.workload.options.eval_batch_size
        # What is cut into parts must not matter: a client's samples may have to stay together.
        model, known = self.workload.model, states[0].buffers.keys()
        whole = goes_by_batch(model) or not statistics_names(model) <= known
        parts = [indices] if whole else np.split(indices, range(size, len(indices), size))
        found = self._called([("tally", state.model, part) for state in states for part in parts])
        # Added up in the order of the samples, whoever was done first.
        tallies = [found[first : first + len(parts)] for first in range(0, len(found), len(parts))]
        return [self.workload.task.metrics(torch.stack(one).sum(dim=0)) for one in tallies]

    def _make_trainer(self, device: torch.device, callback: Callback) -> Engine:
        del device
        return ManualTrainer(replace(self.workload, callback=callback))


class DevicesEngine(SharingEngine):
    """Several devices, each with a process and an engine of the same kind."""

    def __init__(self, name: str, workload: Workload) -> None:
        super().__init__(workload)
        self.name = name
        try:
            sent = pickle.dumps(replace(workload, callback=Callback()))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"engine.devices: model or data cannot be sent to other processes ({error}); define"
                " them at the top of a module, or use engine.devices = 1"
            ) from None
        devices = workload.options.process_devices()
        self._shares = len(devices)
        self._start(functools.partial(_engine_on, name, sent), devices, forked=False)

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests the models, shared out evenly."""
        models = [state.model for state in states]
        return self._shared("evaluate", models, [1] * len(models), indices)


def shares_of(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Indices of some sizes in at most this number of shares of nearly the same sum."""
    shares: list[list[int]] = [[] for _ in range(number)]
    sums = [0] * number
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = sums.index(min(sums))
        shares[least].append(place)
        sums[least] += max(sizes[place], 1)
    return [share for share in shares if share]


class _Served(Callback):
    """An engine in a worker: gives what its methods return, and its notices since the last call."""

    def __init__(self, make_engine: MakeEngine, device: torch.device) -> None:
        self._notices: list[str] = []
        self._engine = make_engine(device, self)

    def on_notice(self, text: str) -> None:
        self._notices.append(text)

    def __call__(self, call: Sequence[Any]) -> tuple[Any, list[str]]:
        method, *given = call
        found = getattr(self._engine, method)(*given)
        notices, self._notices = self._notices, []
        return found, notices


def _engine_on(name: str, sent: bytes, device: torch.device, callback: Callback) -> Engine:
    """An engine for one of several devices; called in its process."""
    try:
        workload: Workload = pickle.loads(sent)  # noqa: S301 - from the parent
    except (pickle.UnpicklingError, AttributeError, ImportError) as error:
        raise TrainingError(
            f"engine.devices: another process cannot read model or data ({error}); define them at"
            " the top of a module, or use engine.devices = 1"
        ) from None
    options = replace(workload.options, name=name, device=str(device), devices=1)
    return ENGINES.get(name)(replace(workload, options=options, callback=callback))
