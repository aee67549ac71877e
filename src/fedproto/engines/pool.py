"""A pool of processes that run tasks.

A task goes to a worker over a pipe and its result comes back the same way; a worker that dies or
hangs is replaced and its task repeated. Tasks are pure functions, so repeating one changes
nothing. `concurrent.futures` is not enough: one killed worker breaks its whole pool, a hanging one
blocks it for ever, and its workers outlive a parent that is killed.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedproto.callback import Callback
from fedproto.errors import TrainingError

MakeWork: TypeAlias = Callable[[torch.device], Callable[[Any], Any]]
"""Called in a worker: gives the function from tasks to results there, on a device."""

CPU = torch.device("cpu")

ATTEMPTS = 3
CHECK_EVERY = 1.0
IDLE_CHECKS = 30
"""Checks in a row at which a busy worker has used no processor time before it is replaced; this
doubles with every attempt at a task."""


@dataclass
class _Worker:
    process: Any
    connection: Connection
    make_work: MakeWork | None
    """What it has still to be sent before its first task."""
    used: float | None = None
    idle: int = 0


class WorkerPool:
    """Single-threaded processes, each with a device, on which it gets the tensors of its tasks.

    Raises:
        OSError: If processes cannot be started here.
        ValueError: If this system has no fork.
    """

    def __init__(
        self,
        make_work: MakeWork,
        devices: Sequence[torch.device],
        callback: Callback | None = None,
        *,
        forked: bool = True,
    ) -> None:
        # Forked where possible, not started afresh: a user's module or strategy need not be
        # importable, samples are not copied, and starting takes milliseconds.
        self._context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        self._forked = forked
        if multiprocessing.current_process().daemon:
            raise OSError("a pool's worker cannot start processes of its own")
        self._make_work, self._devices = make_work, devices
        self._callback = callback or Callback()
        self._threads = ThreadPoolExecutor(len(devices))
        self._workers: list[_Worker] = []
        for device in devices:
            self._workers.append(self._start(device))

    def run(self, tasks: Sequence[Any], on_result: Callable[[int, Any], None]) -> None:
        """Runs tasks, the first ones first; `on_result` gets the place of each and its result.

        Raises:
            TrainingError: If a task fails, or kills every worker that tries it.
        """
        waiting = deque(range(len(tasks)))
        attempts = [0] * len(tasks)
        idle = deque(range(len(self._workers)))
        busy: dict[Future[tuple[bool, Any] | None], tuple[int, int]] = {}
        try:
            while waiting or busy:
                while waiting and idle:
                    number, index = idle.popleft(), waiting.popleft()
                    attempts[index] += 1
                    worker = self._workers[number]
                    worker.used, worker.idle = None, 0
                    answer = self._threads.submit(self._exchanged, worker, tasks[index])
                    busy[answer] = number, index
                done, _ = wait(busy, timeout=CHECK_EVERY, return_when=FIRST_COMPLETED)
                # Others may wait long for a compiler, which is a process of its own.
                for number, index in busy.values() if self._forked and not done else ():
                    self._end_if_hanging(self._workers[number], attempts[index])
                for answer in done:
                    number, index = busy.pop(answer)
                    idle.append(number)
                    found = answer.result()
                    if found is None:
                        self._check_start(number)
                        if attempts[index] == ATTEMPTS:
                            raise TrainingError(
                                f"a worker process was killed or hung {ATTEMPTS} times over the"
                                " same client (out of memory?); use engine.name = 'reference'"
                            )
                        self._replace(number)
                        waiting.appendleft(index)
                    elif found[0]:
                        raise TrainingError(found[1])
                    else:
                        on_result(index, found[1])
        finally:
            # Late results must not be taken for those of the next tasks.
            for number, _ in busy.values():
                self._workers[number].process.kill()
            wait(busy)
            for number, _ in busy.values():
                self._replace(number)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(timeout=1)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()
        self._threads.shutdown()

    def _start(self, device: torch.device) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [*(worker.connection for worker in self._workers), ours] * self._forked
        # What a new process needs to start must be small: it is written before anyone may read it.
        make_work = self._make_work if self._forked else None
        process = self._context.Process(
            target=_serve, args=(theirs, inherited, device, make_work), daemon=True
        )
        with warnings.catch_warnings():
            # Python warns of locks that other threads may hold at this moment. A worker takes none
            # of them: it computes on one thread, as the workers of PyTorch's data loaders do.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
            process.start()
        theirs.close()
        return _Worker(process, ours, make_work=None if self._forked else self._make_work)

    def _replace(self, number: int) -> None:
        old = self._workers[number]
        old.connection.close()
        old.process.kill()
        old.process.join()
        self._workers[number] = self._start(self._devices[number])

    def _check_start(self, number: int) -> None:
        """A process that ended by itself failed as it read the script, which trains in it too."""
        process = self._workers[number].process
        if self._forked:
            return
        process.join(timeout=CHECK_EVERY)
        if (process.exitcode or 0) > 0:
            raise TrainingError(
                "engine.devices: a worker process could not be started; in a script put the call"
                ' below `if __name__ == "__main__":`, since every process reads the script'
            )

    def _exchanged(self, worker: _Worker, task: Any) -> tuple[bool, Any] | None:
        """A worker's answer to a task; None if it has ended.

        In a thread: what a pipe cannot hold waits for its reader, who may have stopped.
        """
        try:
            if worker.make_work is not None:
                worker.connection.send(worker.make_work)
                worker.make_work = None
            worker.connection.send_bytes(_packed(task))
            answer = worker.connection.recv_bytes()
        except (EOFError, OSError):
            return None
        found: tuple[bool, Any] = _unpacked(answer, self._devices[0])
        return found

    def _end_if_hanging(self, worker: _Worker, attempt: int) -> None:
        """Ends a worker that has stopped computing, which is unknown without ``/proc``."""
        used = _processor_time(worker.process.pid)
        worker.idle = worker.idle + 1 if used is not None and used == worker.used else 0
        worker.used = used
        if worker.idle == IDLE_CHECKS * 2 ** (attempt - 1):
            worker.process.kill()
            self._callback.on_notice(
                f"a worker process did not respond for {worker.idle * CHECK_EVERY:.0f} s and was"
                " replaced; its task is done again"
            )


def _processor_time(pid: int) -> float | None:
    """Processor time that a process has used, in clock ticks; None where it is unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(fields[11]) + float(fields[12])
    except (OSError, IndexError, ValueError):
        return None


def _serve(
    connection: Connection,
    inherited: Sequence[Connection],
    device: torch.device,
    make_work: MakeWork | None,
) -> None:
    """Runs one task after another until the pipe closes; the main function of a worker."""
    # Copies of the other ends would keep pipes open after their owner is gone.
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        make: MakeWork = make_work or connection.recv()
        work: Callable[[Any], Any] | None = None
        while True:
            task = connection.recv_bytes()
            try:
                work = work or make(device)
                answer = _packed((False, work(_unpacked(task, device))))
            except TrainingError as error:
                answer = _packed((True, str(error)))
            except Exception as error:  # noqa: BLE001 - a user's code can fail in any way
                text = f"a worker process failed ({type(error).__name__}: {error})"
                answer = _packed((True, f"{text}; engine.name = 'reference' shows where"))
            connection.send_bytes(answer)
    except (EOFError, OSError):
        pass
    finally:
        # The parent's buffers and exit handlers are the parent's alone.
        os._exit(0)


def keep_freed_memory() -> None:
    """Lets this process keep up to half a gigabyte of freed memory; for GNU's C library only.

    Large blocks otherwise go back to the system, which clears every page before it hands it out
    again: copying a model then costs five times the copying.
    """
    trim_threshold, mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(mmap_threshold, 32 << 20)
    mallopt(trim_threshold, 512 << 20)


class _Packer(pickle.Pickler):
    """Pickles tensors of any device as arrays, without the shared memory that PyTorch uses."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.detach().cpu().contiguous().numpy() if isinstance(obj, Tensor) else None


class _Unpacker(pickle.Unpickler):
    """The opposite, onto a device."""

    def __init__(self, data: bytes, device: torch.device) -> None:
        super().__init__(io.BytesIO(data))
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        return torch.tensor(pid, device=self._device)


def _packed(given: Any) -> bytes:
    """A task or a result as bytes."""
    stream = io.BytesIO()
    _Packer(stream, protocol=5).dump(given)
    return stream.getvalue()


def _unpacked(data: bytes, device: torch.device) -> Any:
    return _Unpacker(data, device).load()
