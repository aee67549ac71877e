"""The processes engine: jobs on all cores of a CPU, one single-threaded process per core.

Small models do not keep several threads busy: each step is over before they have met. Whole jobs
side by side do. Weights travel through shared memory, and the longest jobs go first so that all
cores finish together. What trains them is `fedproto.engines.manual`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from fedproto.engines.layers import goes_by_batch
from fedproto.engines.manual import ManualTrainer
from fedproto.engines.pool import SharedSlots, Work, WorkerPool, keep_freed_memory
from fedproto.engines.reference import ReferenceEngine
from fedproto.rng import Indices
from fedproto.strategies.base import PERSONAL
from fedproto.types import ClientFailure, ClientUpdate, ServerState, part, under


@dataclass(frozen=True)
class _Train:
    """A job's fields but its state, which lies in a slot; tensors are arrays."""

    slot: int
    round: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class _Tally:
    """Samples on which to test the model that lies in a slot."""

    slot: int
    round: int
    indices: Indices


@ENGINES.register("processes")
class ProcessesEngine(Engine):
    """Trains on all cores of a CPU, one single-threaded process per core."""

    capabilities = EVERYTHING - {Capability.CUDA}

    def __init__(self, workload: Workload) -> None:
        # Through `auto` the options name another engine, and their device may not be the CPU.
        options = replace(workload.options, name="processes", device="cpu")
        super().__init__(replace(workload, options=options))
        self._count = options.workers or available_cores()
        self._pool: WorkerPool | None = None
        self._received: SharedSlots | None = None
        self._results: SharedSlots | None = None
        self._unable = False
        # The cores belong to the workers: threads of this process would only wait for them.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; none before the first jobs."""
        return self._pool.pids if self._pool else []

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs side by side."""
        if not jobs:
            return []
        slots = self._share([job.state for job in jobs])
        if self._pool is None:
            return self._alone.train(jobs)
        order = sorted(range(len(jobs)), key=lambda index: -jobs[index].batches.steps)
        tasks = [
            _Train(slots[index], jobs[index].state.round, _without(jobs[index], "state"))
            for index in order
        ]
        results: dict[int, ClientUpdate] = {}

        def keep(task: int, worker: int, fields: dict[str, Any]) -> None:
            results[order[task]] = self._completed(fields, worker)
            self.workload.callback.on_job()

        self._pool.run(tasks, keep)
        return [results[index] for index in range(len(jobs))]

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests parts of the samples side by side."""
        if not states or not len(indices):
            return [{} for _ in states]
        slots = self._share(states)
        if self._pool is None:
            return self._alone.evaluate(states, indices)
        size = self.workload.options.eval_batch_size
        # What is cut into parts must not matter: a client's samples may have to stay together.
        whole = goes_by_batch(self.workload.model)
        parts = [indices] if whole else np.split(indices, range(size, len(indices), size))
        tasks = [
            _Tally(slot, state.round, part)
            for slot, state in zip(slots, states, strict=True)
            for part in parts
        ]
        tallies: dict[int, Tensor] = {}

        def keep(task: int, worker: int, tally: Any) -> None:
            del worker
            tallies[task] = torch.from_numpy(tally)

        self._pool.run(tasks, keep)
        # Added up in the order of the samples, whoever was done first.
        of_state = [
            torch.stack([tallies[position * len(parts) + part] for part in range(len(parts))])
            for position in range(len(states))
        ]
        return [self.workload.task.metrics(tally.sum(dim=0)) for tally in of_state]

    def close(self) -> None:
        """Ends the workers and gives this process its threads back."""
        super().close()
        self._end_workers()
        torch.set_num_threads(self._threads)

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _share(self, states: Sequence[ServerState]) -> list[int]:
        """Copies the states into shared memory; starts the workers if necessary."""
        distinct = list({id(state): state for state in states}.values())
        tensors = [_model_tensors(state) for state in distinct]
        self._prepare(tensors[0], len(distinct))
        if self._received is not None:
            for slot, content in enumerate(tensors):
                self._received.write(slot, content)
        slot_of = {id(state): slot for slot, state in enumerate(distinct)}
        return [slot_of[id(state)] for state in states]

    def _prepare(self, example: dict[str, Tensor], slots: int) -> None:
        known = self._received
        if self._unable or (known and known.slots >= slots and known.fits(example)):
            return
        self._end_workers()
        self._received = SharedSlots(example, slots)
        self._results = SharedSlots(example, self._count)
        # PyTorch imports its compiler with the first optimizer: here once, not in every worker.
        importlib.import_module("torch._dynamo")
        try:
            self._pool = WorkerPool(self._make_work, self._count, self.workload.callback)
        except (OSError, ValueError) as error:
            self.workload.callback.on_notice(f"cannot start processes ({error}); using one core")
            self._received, self._unable = None, True

    @cached_property
    def _alone(self) -> ReferenceEngine:
        """Trains in this process if no other can be started."""
        return ManualTrainer(self.workload)

    def _make_work(self) -> Work:
        """Runs a task in the worker."""
        received, results = self._received, self._results
        assert received is not None  # noqa: S101 - the pool is started after these
        assert results is not None  # noqa: S101
        trainer = ManualTrainer(replace(self.workload, callback=Callback()))

        def work(number: int, task: _Train | _Tally) -> Any:
            content = received.view(task.slot)
            state = ServerState(task.round, part("params", content), part("buffers", content))
            if isinstance(task, _Tally):
                tally = trainer.tally(state, task.indices)
                return None if tally is None else tally.numpy()
            job = LocalJob(state=state, **_with_tensors(task.fields))
            (update,) = trainer.train([job])
            assert isinstance(update, ClientUpdate)  # noqa: S101 - training in process never fails
            own = {} if job.method.needs.personal_model else part(PERSONAL, update.memory)
            results.write(number, _model_tensors(replace(update, params={**update.params, **own})))
            return {**_without(update, "params", "buffers"), "sent": tuple(update.params)}

        return work

    def _completed(self, fields: dict[str, Any], worker: int) -> ClientUpdate:
        """The update whose weights a worker left in its slot."""
        assert self._results is not None  # noqa: S101 - there are workers
        content, sent = self._results.read(worker), fields.pop("sent")
        return ClientUpdate(
            params={name: one for name, one in part("params", content).items() if name in sent},
            buffers=part("buffers", content),
            **_with_tensors(fields),
        )


def _model_tensors(source: ServerState | ClientUpdate) -> dict[str, Tensor]:
    return {**under("params", source.params), **under("buffers", source.buffers)}


def _without(source: LocalJob | ClientUpdate, *names: str) -> dict[str, Any]:
    """Fields but those that lie in shared memory; arrays, as tensors would be sent one by one."""
    return {
        field.name: {name: tensor.cpu().numpy() for name, tensor in value.items()}
        if isinstance(value := getattr(source, field.name), Mapping)
        else value
        for field in fields(source)
        if field.name not in names
    }


def _with_tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, in the worker."""
    return {
        name: {key: torch.as_tensor(array) for key, array in value.items()}
        if isinstance(value, Mapping)
        else value
        for name, value in given.items()
    }
