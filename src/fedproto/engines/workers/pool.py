"""A pool of forked processes that carry out tasks, whatever happens to any one of them.

A task goes to a worker over a pipe and its result comes back the same way; a worker that dies is
replaced and its task done again. Tasks are pure functions, so doing one twice changes nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch

from fedproto.engines.workers.memory import keep_freed_memory
from fedproto.errors import TrainingError

Work: TypeAlias = Callable[[int, Any], Any]
"""What a worker does with a task: its own number and the task give a result that can be sent."""

OnResult: TypeAlias = Callable[[int, int, Any], None]
"""Is given a task's place, the number of the worker that did it, and the result."""

ATTEMPTS = 3


@dataclass
class _Worker:
    process: Any
    connection: Connection


class WorkerPool:
    """Single-threaded processes, one per core.

    Args:
        make_work: Called in every new worker; gives what it does with tasks.
        workers: How many.

    Raises:
        OSError: If processes cannot be started here.
        ValueError: If this system has no fork.
    """

    def __init__(self, make_work: Callable[[], Work], workers: int) -> None:
        # Forked, not started afresh: a user's module or strategy need not be importable, samples
        # are not copied, and starting takes milliseconds.
        self._context = multiprocessing.get_context("fork")
        self._make_work = make_work
        self._workers: list[_Worker] = []
        for number in range(workers):
            self._workers.append(self._start(number))

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers]

    def run(self, tasks: Sequence[Any], on_result: OnResult) -> None:
        """Carries out tasks, the first ones first.

        Args:
            tasks: Whatever the work takes; must be picklable.
            on_result: Called as results arrive; the worker waits until it returns.

        Raises:
            TrainingError: If a task fails, or kills every worker that tries it.
        """
        waiting = deque(range(len(tasks)))
        attempts = [0] * len(tasks)
        busy: dict[int, int] = {}
        while waiting or busy:
            for number in range(len(self._workers)):
                if waiting and number not in busy:
                    place = waiting.popleft()
                    attempts[place] += 1
                    busy[number] = place
                    self._send(number, tasks[place])
            for number in self._ready(busy):
                place = busy.pop(number)
                try:
                    failed, result = self._workers[number].connection.recv()
                except (EOFError, OSError):
                    if attempts[place] == ATTEMPTS:
                        raise TrainingError(
                            f"a worker process was killed {ATTEMPTS} times over the same client"
                            " (out of memory?); use engine.name = 'reference'"
                        ) from None
                    self._replace(number)
                    waiting.appendleft(place)
                    continue
                if failed:
                    self._drain(busy)
                    raise TrainingError(result)
                on_result(place, number, result)

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

    def _start(self, number: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        inherited = [*(worker.connection for worker in self._workers), ours]
        process = self._context.Process(
            target=_serve, args=(theirs, inherited, number, self._make_work), daemon=True
        )
        with warnings.catch_warnings():
            # Python warns of locks that other threads may hold at this moment. A worker takes none
            # of them: it computes on one thread, as the workers of PyTorch's data loaders do.
            warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork.*")
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _replace(self, number: int) -> None:
        old = self._workers[number]
        old.connection.close()
        old.process.kill()
        old.process.join()
        self._workers[number] = self._start(number)

    def _send(self, number: int, task: Any) -> None:
        try:
            self._workers[number].connection.send(task)
        except OSError:
            # It died idle; the closed pipe shows again, and is dealt with, when it is read.
            return

    def _ready(self, busy: dict[int, int]) -> list[int]:
        of = {self._workers[number].connection: number for number in busy}
        return sorted(of[connection] for connection in wait(list(of)))  # type: ignore[index]

    def _drain(self, busy: dict[int, int]) -> None:
        """Takes the results nobody wants any more, so that the next tasks do not get them."""
        for number in busy:
            try:
                self._workers[number].connection.recv()
            except (EOFError, OSError):
                self._replace(number)


def _serve(
    connection: Connection,
    inherited: Sequence[Connection],
    number: int,
    make_work: Callable[[], Work],
) -> None:
    """A worker's life: one task after another until the pipe closes."""
    # Copies of the other ends would keep pipes open after their owner is gone.
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        work = make_work()
        while True:
            task = connection.recv()
            try:
                answer = (False, work(number, task))
            except TrainingError as error:
                answer = (True, str(error))
            connection.send(answer)
    except (EOFError, OSError):
        pass
    finally:
        # Nothing of the parent's must be flushed or torn down a second time.
        os._exit(0)
