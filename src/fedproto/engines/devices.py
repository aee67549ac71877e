"""Several devices: the jobs of a round shared out, a process with an engine of its own for each.

Processes are started afresh, since one that is forked cannot use CUDA: the model and the data are
pickled, and a script that trains needs ``if __name__ == "__main__":``. A process that dies is
replaced and its share done again.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedproto.callback import Callback
from fedproto.engines.base import ENGINES, Engine, LocalJob, Workload
from fedproto.engines.pool import Work, WorkerPool, packed, unpacked
from fedproto.errors import ConfigError, TrainingError
from fedproto.rng import Indices
from fedproto.types import ClientFailure, ClientUpdate, ServerState


def make_engine(name: str, workload: Workload) -> Engine:
    """An engine, on as many devices as the options say; worker processes use all cores anyway."""
    if len(workload.options.process_devices()) == 1 or name == "processes":
        return ENGINES.get(name)(workload)
    return DevicesEngine(name, workload)


class DevicesEngine(Engine):
    """Shares out jobs among engines of one kind, each in a process with a device of its own."""

    def __init__(self, name: str, workload: Workload) -> None:
        super().__init__(workload)
        self._name, self._device = name, workload.options.torch_device()
        try:
            sent = pickle.dumps(replace(workload, callback=Callback()))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"engine.devices: model or data cannot be sent to other processes ({error}); define"
                " them at the top of a module, or use engine.devices = 1"
            ) from None
        self._number = len(workload.options.process_devices())
        make_work = functools.partial(_make_work, name, sent)
        self._pool = WorkerPool(make_work, self._number, workload.callback, forked=False)

    @property
    def name(self) -> str:
        """That of the engines."""
        return self._name

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Trains the jobs, shared out by their numbers of steps."""
        return self._shared("train", jobs, [job.batches.steps for job in jobs])

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests the models, shared out evenly."""
        return self._shared("evaluate", states, [1] * len(states), indices)

    def evaluate_personal(self, jobs: Sequence[LocalJob]) -> list[dict[str, float]]:
        """Tests the clients' models, shared out by their numbers of samples."""
        clients = self.workload.federation.clients
        sizes = [len(clients[job.client].test) for job in jobs]
        return self._shared("evaluate_personal", jobs, sizes)

    def close(self) -> None:
        """Ends the processes."""
        super().close()
        self._pool.close()

    def _shared(
        self, method: str, items: Sequence[Any], sizes: Sequence[int], *more: Any
    ) -> list[Any]:
        """The results of a method of the engines, in the order of the items."""
        shares = shares_of(sizes, self._number)
        results: dict[int, Any] = {}

        def keep(task: int, worker: int, answer: bytes) -> None:
            del worker
            found, notices = unpacked(answer, self._device)
            results.update(zip(shares[task], found, strict=True))
            for text in notices:
                if text not in self._noticed:
                    self._noticed.add(text)
                    self.workload.callback.on_notice(text)
            for _ in found if method == "train" else ():
                self.workload.callback.on_job()

        tasks = [packed((method, [items[place] for place in share], *more)) for share in shares]
        self._pool.run(tasks, keep)
        return [results[place] for place in range(len(items))]


def shares_of(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Indices of some sizes in at most this number of shares of nearly the same sum."""
    shares: list[list[int]] = [[] for _ in range(number)]
    sums = [0] * number
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        least = sums.index(min(sums))
        shares[least].append(place)
        sums[least] += max(sizes[place], 1)
    return [share for share in shares if share]


def _make_work(name: str, sent: bytes) -> Work:
    """What a process does; called in the process."""
    notices: list[str] = []
    callback = _Notices(notices)

    @functools.cache
    def engine_on(number: int) -> Engine:
        try:
            workload: Workload = pickle.loads(sent)  # noqa: S301 - from the parent
        except (pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise TrainingError(
                f"engine.devices: another process cannot read model or data ({error}); define them"
                " at the top of a module, or use engine.devices = 1"
            ) from None
        device = workload.options.process_devices()[number]
        options = replace(workload.options, name=name, device=str(device), devices=1)
        return ENGINES.get(name)(replace(workload, options=options, callback=callback))

    def work(number: int, task: bytes) -> bytes:
        engine = engine_on(number)
        method, *given = unpacked(task, engine.workload.options.torch_device())
        answer = packed((getattr(engine, method)(*given), list(notices)))
        notices.clear()
        return answer

    return work


class _Notices(Callback):
    def __init__(self, notices: list[str]) -> None:
        self._notices = notices

    def on_notice(self, text: str) -> None:
        self._notices.append(text)
