"""The processes engine: jobs on all cores of a CPU, one single-threaded process per core.

Small models do not keep several threads busy: each step is over before they have met. Whole jobs
side by side do. Weights travel through shared memory, and the longest jobs go first so that all
cores finish together. What trains them is `fedproto.engines.manual`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

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
from fedproto.engines.pool import (
    SharedSlots,
    Work,
    WorkerPool,
    keep_freed_memory,
    packed,
    unpacked,
)
from fedproto.engines.reference import ReferenceEngine
from fedproto.rng import Indices
from fedproto.strategies.base import PERSONAL
from fedproto.types import ClientFailure, ClientUpdate, ServerState, part, under

Task: TypeAlias = LocalJob | Indices
"""A job without its model, or the samples on which to test one."""


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
            packed((slots[index], replace(jobs[index], state=_empty(jobs[index].state))))
            for index in order
        ]
        results: dict[int, ClientUpdate] = {}

        def keep(task: int, worker: int, answer: bytes) -> None:
            results[order[task]] = self._completed(answer, worker)
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
        tasks = [packed((slot, part)) for slot in slots for part in parts]
        tallies: dict[int, Tensor] = {}

        def keep(task: int, worker: int, answer: bytes) -> None:
            del worker
            tallies[task] = unpacked(answer)

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

        def work(number: int, sent: bytes) -> bytes:
            task: Task
            slot, task = unpacked(sent)
            content = received.view(slot)
            params, buffers = part("params", content), part("buffers", content)
            if not isinstance(task, LocalJob):
                return packed(trainer.tally(ServerState(0, params, buffers), task))
            job = replace(task, state=ServerState(task.state.round, params, buffers))
            (update,) = trainer.train([job])
            assert isinstance(update, ClientUpdate)  # noqa: S101 - training in process never fails
            own = {} if job.method.needs.personal_model else part(PERSONAL, update.memory)
            results.write(number, _model_tensors(replace(update, params={**update.params, **own})))
            return packed((replace(update, params={}, buffers={}), tuple(update.params)))

        return work

    def _completed(self, answer: bytes, worker: int) -> ClientUpdate:
        """The update whose weights a worker left in its slot."""
        assert self._results is not None  # noqa: S101 - there are workers
        content = self._results.read(worker)
        update: ClientUpdate
        update, sent = unpacked(answer)
        params = {name: one for name, one in part("params", content).items() if name in sent}
        return replace(update, params=params, buffers=part("buffers", content))


def _model_tensors(source: ServerState | ClientUpdate) -> dict[str, Tensor]:
    return {**under("params", source.params), **under("buffers", source.buffers)}


def _empty(state: ServerState) -> ServerState:
    """A state of which only the round is sent; its model lies in shared memory."""
    return ServerState(state.round, {}, {})
