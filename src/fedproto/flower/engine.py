"""The engine over Flower: a job goes to the node of its client, its update comes back checked.

Whatever a client does wrong (absent, late, raising, sending rubbish) is a `ClientFailure` or an
incident for the round's record; only too few clients can end a run, where that was asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedproto.config import FlowerOptions, RunConfig
from fedproto.disk.files import explained, is_there, write_atomically
from fedproto.disk.integrity import DamagedError, sealed, unsealed
from fedproto.engines.base import Engine, LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.setting import setting_of
from fedproto.errors import ConfigError, StoreError, TrainingError
from fedproto.flower import wire
from fedproto.flower.nodes import Answer, Nodes, exchange
from fedproto.flower.wire import UnreadableError
from fedproto.rng import Indices
from fedproto.types import POOLED, ClientFailure, ClientUpdate, ServerState

TRAIN, TEST = "train", "test"
"""What a client is asked to do."""


class FlowerEngine(Engine):
    """Runs jobs on the nodes of a Flower federation."""

    clients_remember = True

    def __init__(
        self,
        workload: Workload,
        grid: Grid,
        config: RunConfig,
        nodes: Nodes,
        suspended: Suspensions,
    ) -> None:
        super().__init__(workload)
        self._grid = grid
        self._config = config
        self._nodes = nodes
        self._options = config.flower
        if config.flower.min_clients > config.schedule.cohort:
            raise ConfigError(
                f"flower.min_clients must be at most schedule.cohort, {config.schedule.cohort}, not"
                f" {config.flower.min_clients}"
            )
        dtype = config.engine.torch_dtype()
        params = {name: one.to(dtype) for name, one in workload.model.named_parameters()}
        self._setting = setting_of(workload, params)
        self._given_up: set[int] = set()
        self._suspended = suspended
        self._asked: set[int] = set()
        self._incidents: list[str] = []
        on_server = self._options.evaluate_on == "server"
        self._local = ReferenceEngine(workload) if on_server else None
        self.holds_data = on_server

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Sends every job to its client and waits for the updates, at most until the deadline."""
        if any(job.client == POOLED for job in jobs):
            raise ConfigError(
                "a strategy that pools the clients' data cannot run over Flower: the data stays"
                " with the clients; run it with 'fedproto run'"
            )
        if not jobs:
            return []
        self._suspended.begin_round(jobs[0].state.round)
        results: dict[int, ClientUpdate | ClientFailure] = {
            index: ClientFailure(job.client, reason)
            for index, job in enumerate(jobs)
            if (reason := self._suspended.reason(job.client)) is not None
        }
        ready = self._gather({job.client for index, job in enumerate(jobs) if index not in results})
        if isinstance(ready, str):
            return [
                results.get(index, ClientFailure(job.client, ready))
                for index, job in enumerate(jobs)
            ]
        for indices in _one_job_per_client(jobs):
            asked = [index for index in indices if index not in results]
            results |= self._send(jobs, asked) if asked else {}
        ordered = [results[index] for index in range(len(jobs))]
        return self._enough(ordered)

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Adds up the clients' tallies, or tests here where the server has the data."""
        if self._local is not None:
            return self._local.evaluate(states, indices)
        kept = self.workload.federation.validation
        validation = len(kept) > 0 and np.array_equal(indices, kept)
        return [self._evaluate(state, validation=validation) for state in states]

    def judged(self, usable: Collection[int], refused: Mapping[int, str]) -> None:
        """Who was asked and gave nothing usable, in whatever way, has failed in this round."""
        for client in sorted(self._asked):
            if client in usable:
                self._suspended.answered(client, TRAIN)
            elif client in refused:
                self._suspended.failed(client, TRAIN, refused[client])
        self._asked.clear()

    def take_incidents(self) -> list[str]:
        """Clients turned away and tests that failed."""
        taken, self._incidents = self._incidents, []
        suspended = self._suspended.end_round(self._options)
        return taken + suspended + self._nodes.take_notices()

    def _gather(self, clients: set[int]) -> set[int] | str:
        """The clients that are connected, or why the round cannot be."""
        options = self._options
        ready = self._nodes.wait_for(clients - self._given_up, options.wait)
        self._given_up |= clients - ready
        ready |= clients & self._nodes.clients().keys()
        self._given_up -= ready
        if len(ready) < options.min_clients:
            ready = self._nodes.wait_for(clients, options.wait)
        if len(ready) >= options.min_clients:
            return ready
        return self._too_few(f"{len(ready)} of {len(clients)} clients connected")

    def _too_few(self, what: str) -> str:
        options = self._options
        text = f"{what}, flower.min_clients is {options.min_clients}"
        if options.too_few == "stop":
            raise TrainingError(f"{text}; start more clients and resume the run")
        return f"round skipped: {text}"

    def _enough(
        self, results: list[ClientUpdate | ClientFailure]
    ) -> list[ClientUpdate | ClientFailure]:
        usable = {result.client for result in results if isinstance(result, ClientUpdate)}
        if len(usable) >= self._options.min_clients:
            return results
        reason = self._too_few(f"{len(usable)} clients gave a usable update")
        self._asked -= usable  # whatever becomes of the round, they did their part
        return [
            result if isinstance(result, ClientFailure) else ClientFailure(result.client, reason)
            for result in results
        ]

    def _send(
        self, jobs: Sequence[LocalJob], indices: Sequence[int]
    ) -> dict[int, ClientUpdate | ClientFailure]:
        node_of = self._nodes.clients()
        contents: dict[int, RecordDict] = {}
        index_of: dict[int, int] = {}
        results: dict[int, ClientUpdate | ClientFailure] = {}
        for index in indices:
            job = jobs[index]
            node = node_of.get(job.client)
            if node is None:
                results[index] = ClientFailure(job.client, "not connected")
                continue
            method = job.method
            config = replace(
                self._config,
                strategy=method.strategy,
                head=method.head,
                serve=method.serve,
                train=job.train,
            )
            contents[node] = wire.encode_job(job, config)
            index_of[node] = index
            self._asked.add(job.client)
        answers = exchange(
            self._grid,
            "train",
            contents,
            round_=jobs[0].state.round,
            deadline=self._options.deadline,
            on_answer=self.workload.callback.on_job,
        )
        for node, answer in answers.items():
            index = index_of[node]
            results[index] = self._read_update(answer, jobs[index])
        return results

    def _read_update(self, answer: Answer, job: LocalJob) -> ClientUpdate | ClientFailure:
        try:
            update, began_anew = wire.decode_update(_content(answer), job, self._setting)
        except UnreadableError as error:
            return ClientFailure(job.client, str(error))
        if began_anew:
            self._incidents.append(f"client {job.client} had lost its memory and began anew")
        return update

    def _held(self, client: int, *, validation: bool) -> int:
        """How many samples a client has of the part that is asked for."""
        federation = self.workload.federation
        return len(
            federation.validation_of(client) if validation else federation.clients[client].test
        )

    def evaluate_personal(self, jobs: Sequence[LocalJob]) -> list[dict[str, float]]:
        """Asks every connected client to test its own model; nothing from the others."""
        task = self.workload.task
        by_client = {job.client: job for job in jobs if self._held(job.client, validation=False)}
        tallies = self._tallies(by_client, jobs[0].state.round, validation=False) if jobs else {}
        return [task.metrics(tallies[job.client]) if job.client in tallies else {} for job in jobs]

    def _evaluate(self, state: ServerState, *, validation: bool) -> dict[str, float]:
        """The scores over the test or validation parts of all clients that are connected."""
        clients = range(len(self.workload.federation.clients))
        held = {one: None for one in clients if self._held(one, validation=validation)}
        tallies = self._tallies(held, state.round, validation=validation, state=state)
        return self._scores(list(tallies.values())) if tallies else {}

    def _tallies(
        self,
        asked: Mapping[int, LocalJob | None],
        round_: int,
        *,
        validation: bool,
        state: ServerState | None = None,
    ) -> dict[int, Tensor]:
        """Test sums by client: of a state, or of each client's own model as its job has it."""
        self._nodes.refresh()
        node_of = {
            client: node
            for client, node in sorted(self._nodes.clients().items())
            if client in asked and self._suspended.is_asked(client)
        }
        contents = {
            node: self._test(client, asked[client], state, validation=validation)
            for client, node in node_of.items()
        }
        answers = exchange(
            self._grid,
            "evaluate",
            contents,
            round_=round_,
            deadline=self._options.deadline,
        )
        found: dict[int, Tensor] = {}
        absent = [str(client) for client in asked if client not in node_of]
        if absent:
            self._incidents.append(
                f"not tested on clients {', '.join(absent)}: not connected, or failing"
            )
        for client, node in node_of.items():
            held = self._held(client, validation=validation)
            try:
                found[client] = self._read_tally(answers[node], client, round_, held)
            except UnreadableError as error:
                self._incidents.append(f"not tested on client {client}: {error}")
                self._suspended.failed(client, TEST, str(error))
            else:
                self._suspended.answered(client, TEST)
        return found

    def _test(
        self, client: int, job: LocalJob | None, state: ServerState | None, *, validation: bool
    ) -> RecordDict:
        held = self._held(client, validation=validation)
        if job is None:
            assert state is not None  # noqa: S101 - one of the two is given
            return wire.encode_test(client, state, self._config, held, validation=validation)
        config = replace(self._config, strategy=job.strategy)
        return wire.encode_test(
            client, job.state, config, held, run=job.run, last_round=job.last_round
        )

    def _scores(self, tallies: Sequence[Tensor]) -> dict[str, float]:
        """The scores over all samples, and the main one with every client counted alike."""
        task = self.workload.task
        each = [task.metrics(tally) for tally in tallies]
        alike = [scores[task.headline] for scores in each if task.headline in scores]
        pooled = task.metrics(reduce(torch.add, tallies))
        return pooled | ({f"mean_client_{task.headline}": float(np.mean(alike))} if alike else {})

    def _read_tally(self, answer: Answer, client: int, round_: int, held: int) -> Tensor:
        tally = wire.decode_tally(_content(answer), client, round_)
        federation = self.workload.federation
        reason = self.workload.task.reason_to_refuse_tally(
            tally, held, federation.num_classes, federation.input_shape
        )
        if reason is not None:
            raise UnreadableError(reason)
        return tally


def _content(answer: Answer) -> RecordDict:
    """What a client sent, unless it sent an error or a refusal of its own."""
    if answer.content is None:
        raise UnreadableError(answer.reason)
    refusal = wire.decode_refusal(answer.content)
    if refusal is not None:
        raise UnreadableError(f"it refused: {refusal}")
    return answer.content


def _one_job_per_client(jobs: Sequence[LocalJob]) -> list[list[int]]:
    """Places of jobs in batches without two of one client: a node does one thing at a time."""
    batches: list[list[int]] = []
    seen: dict[int, int] = defaultdict(int)
    for index, job in enumerate(jobs):
        turn = seen[job.client]
        seen[job.client] += 1
        if turn == len(batches):
            batches.append([])
        batches[turn].append(index)
    return batches


SUSPENSIONS_FILE = "suspensions.json"


@dataclass
class _Conduct:
    """A client's.

    Attributes:
        failed: Whether it failed, in its last rounds, by the kind of question.
        left: Rounds that it is still left out.
        times: How often it was suspended since it last had a clean record.
        back: Whether it has answered since.
    """

    failed: dict[str, list[bool]] = field(default_factory=dict)
    left: int = 0
    times: int = 0
    back: bool = True
    reason: str = ""


class Suspensions:
    """Who is left out for how many rounds more.

    Kept in a file, so that a server that starts again goes on with it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / SUSPENSIONS_FILE
        self._conduct = _read(self._path)
        self._kept = self._tables()
        self._round = 0
        self._out: set[int] = set()
        self._outcomes: dict[int, dict[str, str | None]] = defaultdict(dict)

    def begin_round(self, round_: int) -> None:
        """A round begins: whoever is left out in it has one less before it."""
        self._round = round_
        self._out = {client for client, conduct in self._conduct.items() if conduct.left}
        for client in self._out:
            self._conduct[client].left -= 1

    def failed(self, client: int, kind: str, reason: str) -> None:
        """A client gave no usable answer to a question of a kind."""
        self._outcomes[client][kind] = reason

    def answered(self, client: int, kind: str) -> None:
        """A client gave a usable answer; an unusable one in the same round counts for more."""
        self._outcomes[client].setdefault(kind, None)

    def is_asked(self, client: int) -> bool:
        """Whether a client is worth a deadline: not left out, and no failure yet in this round."""
        return not (self.reason(client) or any(self._outcomes.get(client, {}).values()))

    def end_round(self, options: FlowerOptions) -> list[str]:
        """Judges and keeps the outcomes of the round; who is suspended now, or let back in."""
        judged = [self._judge(client, options) for client in sorted(self._outcomes)]
        self._outcomes.clear()
        tables = self._tables()
        if tables != self._kept:
            with explained(self._path):
                write_atomically(self._path, sealed(tables))
            self._kept = tables
        return [notice for notice in judged if notice is not None]

    def reason(self, client: int) -> str | None:
        """Why a client is not asked; None when it is."""
        conduct = self._conduct.get(client)
        if conduct is None or not (conduct.left or client in self._out):
            return None
        return f"suspended until round {self._round + conduct.left + 2}: {conduct.reason}"

    def _judge(self, client: int, options: FlowerOptions) -> str | None:
        conduct = self._conduct.setdefault(client, _Conduct())
        outcomes = self._outcomes[client]
        suspended = False
        for kind, reason in outcomes.items():
            last = [*conduct.failed.get(kind, []), reason is not None][-options.suspend_window :]
            conduct.failed[kind] = last
            if reason is not None and 0 < options.suspend_after <= sum(last):
                suspended = True
                conduct.reason = (
                    f"{sum(last)} of its last {len(last)} answers ({kind}) were not usable, the"
                    f" last: {reason}"
                )
        if suspended:
            conduct.left = options.suspend_rounds * 2**conduct.times
            conduct.times += 1
            conduct.back = False
            return f"client {client} is {self.reason(client)}"
        if not any(map(any, conduct.failed.values())):
            del self._conduct[client]
        if conduct.back or any(outcomes.values()):
            return None
        conduct.back = True
        return f"client {client} answers again and is no longer suspended"

    def _tables(self) -> dict[str, dict[str, Any]]:
        return {str(client): asdict(conduct) for client, conduct in self._conduct.items()}


def _read(path: Path) -> dict[int, _Conduct]:
    if not is_there(path):
        return {}
    try:
        with explained(path):
            tables, marked = unsealed(path.read_bytes())
        if not marked:
            raise DamagedError("its fingerprint is missing")
        return {int(client): _Conduct(**table) for client, table in tables.items()}
    except (DamagedError, ValueError, TypeError) as error:
        raise StoreError(
            f"{path} is damaged: {error}; delete it, and no client is suspended"
        ) from None
