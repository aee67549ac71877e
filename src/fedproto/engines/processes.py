"""The processes engine: jobs on all cores of a CPU, one single-threaded process per core.

Small models do not keep several threads busy: each step is over before they have met. Whole jobs
side by side do. Weights travel through shared memory, and the longest jobs go first so that all
cores finish together. What trains them is `fedproto.engines.workers.trainer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.engines.base import ENGINES, Engine, OnDone, Workload, available_cores
from fedproto.engines.job import LocalJob
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.training.batch_norm import goes_by_batch
from fedproto.engines.workers.memory import keep_freed_memory
from fedproto.engines.workers.pool import Work, WorkerPool
from fedproto.engines.workers.shared import SharedSlots
from fedproto.engines.workers.trainer import ManualTrainer
from fedproto.rng import Indices
from fedproto.types import ClientFailure, ClientUpdate, ServerState, part, under


@dataclass(frozen=True)
class _Train:
    """A job whose state lies in a slot, and whose other tensors are arrays."""

    slot: int
    job: LocalJob


@dataclass(frozen=True)
class _Tally:
    """Samples on which to test the model that lies in a slot."""

    slot: int
    indices: Indices


@ENGINES.register("processes")
class ProcessesEngine(Engine):
    """Trains on all cores of a CPU, one single-threaded process per core."""

    def __init__(self, workload: Workload) -> None:
        # Through `auto` the options name another engine, and their device may not be the CPU.
        options = replace(workload.options, name="processes", device="cpu")
        super().__init__(replace(workload, options=options))
        self._count = options.workers or available_cores()
        self._pool: WorkerPool | None = None
        self._received: SharedSlots | None = None
        self._results: SharedSlots | None = None
        self._alone: ReferenceEngine | None = None
        # The cores belong to the workers: threads of this process would only wait for them.
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; none before the first jobs."""
        return self._pool.pids if self._pool else []

    def train(
        self, jobs: Sequence[LocalJob], on_done: OnDone | None = None
    ) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs side by side."""
        if not jobs:
            return []
        slots = self._share([job.state for job in jobs])
        if self._alone is not None:
            return self._alone.train(jobs, on_done)
        order = sorted(range(len(jobs)), key=lambda index: -jobs[index].batches.steps)
        tasks = [_Train(slots[index], _for_the_pipe(jobs[index])) for index in order]
        results: dict[int, ClientUpdate] = {}

        def keep(task: int, worker: int, light: ClientUpdate) -> None:
            index = order[task]
            results[index] = self._completed(light, worker)
            if on_done is not None:
                on_done()

        assert self._pool is not None  # noqa: S101 - made by `_share`
        self._pool.run(tasks, keep)
        return [results[index] for index in range(len(jobs))]

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests parts of the samples side by side."""
        if not states or not len(indices):
            return [{} for _ in states]
        slots = self._share(states)
        if self._alone is not None:
            return self._alone.evaluate(states, indices)
        size = self.workload.options.eval_batch_size
        # What is cut into parts must not matter: a client's samples may have to stay together.
        whole = goes_by_batch(self.workload.model)
        parts = [indices] if whole else np.split(indices, range(size, len(indices), size))
        tasks = [_Tally(slot, part) for slot in slots for part in parts]
        tallies: dict[int, Tensor] = {}

        def keep(task: int, worker: int, tally: Any) -> None:
            del worker
            tallies[task] = torch.from_numpy(tally)

        assert self._pool is not None  # noqa: S101 - made by `_share`
        self._pool.run(tasks, keep)
        # Added up in the order of the samples, whoever was done first.
        of_state = [
            torch.stack([tallies[position * len(parts) + part] for part in range(len(parts))])
            for position in range(len(states))
        ]
        return [self.workload.task.metrics(tally.sum(dim=0)) for tally in of_state]

    def close(self) -> None:
        """Ends the workers and gives this process its threads back."""
        self._end_workers()
        torch.set_num_threads(self._threads)

    def _end_workers(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _share(self, states: Sequence[ServerState]) -> list[int]:
        """Puts the states where workers see them; starts the workers if need be."""
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
        if self._alone or (known and known.slots >= slots and known.fits(example)):
            return
        self._end_workers()
        self._received = SharedSlots(example, slots)
        self._results = SharedSlots(example, self._count)
        # PyTorch imports its compiler with the first optimizer: here once, not in every worker.
        importlib.import_module("torch._dynamo")
        try:
            self._pool = WorkerPool(self._make_work, self._count, self.workload.notify)
        except (OSError, ValueError) as error:
            self.workload.notify(f"no processes can be started ({error}); one core is used")
            self._received = None
            self._alone = self._trainer()

    def _trainer(self) -> ReferenceEngine:
        return ManualTrainer(self.workload)

    def _make_work(self) -> Work:
        """What a worker does; called in the worker."""
        received, results = self._received, self._results
        assert received is not None  # noqa: S101 - the pool is started after these
        assert results is not None  # noqa: S101
        trainer = self._trainer()

        def work(number: int, task: _Train | _Tally) -> Any:
            content = received.view(task.slot)
            model = part("params", content), part("buffers", content)
            if isinstance(task, _Tally):
                tally = trainer.tally(ServerState(0, *model), task.indices)
                return None if tally is None else tally.numpy()
            job = replace(
                task.job,
                state=ServerState(task.job.state.round, *model),
                broadcast=_tensors(task.job.broadcast),
                memory=_tensors(task.job.memory),
            )
            (update,) = trainer.train([job])
            assert isinstance(update, ClientUpdate)  # noqa: S101 - failures are raised
            results.write(number, _model_tensors(update))
            return replace(
                update,
                params={},
                buffers={},
                payload=_arrays(update.payload),
                memory=_arrays(update.memory),
            )

        return work

    def _completed(self, light: ClientUpdate, worker: int) -> ClientUpdate:
        """An update with the tensors that the worker left in its slot."""
        assert self._results is not None  # noqa: S101 - made with the pool
        content = self._results.read(worker)
        return replace(
            light,
            params=part("params", content),
            buffers=part("buffers", content),
            payload=_tensors(light.payload),
            memory=_tensors(light.memory),
        )


def _model_tensors(source: ServerState | ClientUpdate) -> dict[str, Tensor]:
    return {**under("params", source.params), **under("buffers", source.buffers)}


def _for_the_pipe(job: LocalJob) -> LocalJob:
    """The job without its model, and with arrays: tensors would be sent one by one."""
    return replace(
        job,
        state=ServerState(job.state.round, {}, {}),
        broadcast=_arrays(job.broadcast),
        memory=_arrays(job.memory),
    )


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(array) for name, array in arrays.items()}
