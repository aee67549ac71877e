"""The engine over Flower: a job goes to the node of its client, its update comes back checked.

Whatever a client does wrong (absent, late, raising, sending rubbish) is a `ClientFailure` or an
incident for the round's record.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np
import torch
from flwr.app import RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from fedproto.config import RunConfig
from fedproto.config.options import POOLS, SUSPENSION_WINDOW, FlowerOptions
from fedproto.engines.base import Engine, LocalJob, Workload
from fedproto.engines.setting import setting_of
from fedproto.errors import ConfigError
from fedproto.flower import wire
from fedproto.flower.nodes import Nodes, exchange
from fedproto.flower.wire import TestJob, UnreadableError
from fedproto.rng import Indices
from fedproto.types import POOLED, ClientFailure, ClientUpdate, ServerState

TRAIN, TEST = "train", "test"
"""Kinds of questions to a client."""


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
        dtype = config.engine.torch_dtype()
        params = {name: one.to(dtype) for name, one in workload.model.named_parameters()}
        self._setting = setting_of(workload, params)
        self._given_up: set[int] = set()
        self._suspended = suspended
        self._asked: set[int] = set()
        self.holds_data = self._options.evaluate_on == "server"

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Sends every job to its client and waits for the updates, at most until the deadline."""
        if any(job.client == POOLED for job in jobs):
            raise ConfigError(POOLS)
        if not jobs:
            return []
        self._suspended.begin_round(jobs[0].state.round)
        results: dict[int, ClientUpdate | ClientFailure] = {
            index: ClientFailure(job.client, reason)
            for index, job in enumerate(jobs)
            if (reason := self._suspended.reason(job.client)) is not None
        }
        waiting = [index for index in range(len(jobs)) if index not in results]
        skipped = self._gather({jobs[index].client for index in waiting})
        while waiting and skipped is None:
            # A node runs one job at a time.
            turn = {jobs[index].client: index for index in reversed(waiting)}.values()
            results |= self._send(jobs, sorted(turn))
            waiting = [index for index in waiting if index not in turn]
        usable = {one.client for one in results.values() if isinstance(one, ClientUpdate)}
        if skipped is None and len(usable) < self._options.min_clients:
            skipped = self._too_few(f"{len(usable)} clients gave a usable update")
        if skipped is not None:
            self._asked -= usable  # whatever becomes of the round, they did their part
            failed = {key: one for key, one in results.items() if isinstance(one, ClientFailure)}
            results = {
                key: failed.get(key, ClientFailure(job.client, skipped))
                for key, job in enumerate(jobs)
            }
        return [results[index] for index in range(len(jobs))]

    def judged(self, usable: Collection[int], refused: Mapping[int, str]) -> None:
        """Records every client without a usable reply as failed in this round."""
        for client in sorted(self._asked & {*usable, *refused}):
            self._suspended.note(client, TRAIN, None if client in usable else refused[client])
        self._asked.clear()

    def take_incidents(self) -> list[str]:
        """Rejected clients and failed tests."""
        taken = [*self._nodes.notices, *self._suspended.end_round(self._options)]
        self._nodes.notices.clear()
        return taken

    def _gather(self, clients: set[int]) -> str | None:
        """Waits for clients that are not connected; the reason if the round is impossible."""
        self._nodes.wait_for(clients - self._given_up, self._options.wait)
        if len(clients & self._nodes.clients().keys()) < self._options.min_clients:
            self._nodes.wait_for(clients, self._options.wait)
        ready = clients & self._nodes.clients().keys()
        self._given_up = (self._given_up | clients) - ready
        if len(ready) >= self._options.min_clients:
            return None
        return self._too_few(f"{len(ready)} of {len(clients)} clients connected")

    def _too_few(self, what: str) -> str:
        return f"round skipped: {what}, flower.min_clients is {self._options.min_clients}"

    def _send(
        self, jobs: Sequence[LocalJob], indices: Sequence[int]
    ) -> dict[int, ClientUpdate | ClientFailure]:
        """Asks one client per job; its update or the reason for none, by the job's place."""
        own = {jobs[index].client: jobs[index] for index in indices}
        node_of = self._nodes.clients()
        questions = {}
        for client, job in own.items():
            if client not in node_of:
                continue
            method = job.method
            config = replace(
                self._config,
                strategy=method.strategy,
                head=method.head,
                serve=method.serve,
                train=job.train,
            )
            questions[client] = node_of[client], wire.encode_job(job, config)
        self._asked |= questions.keys()
        answers = exchange(
            self._grid,
            "train",
            questions,
            lambda client, content: wire.decode_update(content, own[client], self._setting),
            round_=jobs[0].state.round,
            deadline=self._options.deadline,
            on_answer=self.workload.callback.on_job,
        )
        results: dict[int, ClientUpdate | ClientFailure] = {}
        for index in indices:
            client = jobs[index].client
            answer = answers.get(client, UnreadableError("not connected"))
            if isinstance(answer, UnreadableError):
                results[index] = ClientFailure(client, str(answer))
                continue
            results[index], began_anew = answer
            if began_anew:
                self._nodes.notices.append(
                    f"client {client} had lost its memory and started from empty memory"
                )
        return results

    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Adds up the clients' tallies, or tests here where the server has the data."""
        if self.holds_data:
            return self.substitute().evaluate(states, indices)
        federation = self.workload.federation
        kept = federation.validation
        validation = len(kept) > 0 and np.array_equal(indices, kept)
        shares = [
            federation.validation_of(client) if validation else share.test
            for client, share in enumerate(federation.clients)
        ]
        config = wire.config_text(self._config)
        scores = []
        for state in states:
            tests = [
                TestJob(config, client, state.round, len(share), validation)
                for client, share in enumerate(shares)
            ]
            tallies = self._tallies(state, tests)
            scores.append(self._scores(list(tallies.values())) if tallies else {})
        return scores

    def evaluate_personal(self, jobs: Sequence[LocalJob]) -> list[dict[str, float]]:
        """Asks every connected client to test its own model, over the one that all jobs share."""
        if not jobs:
            return []
        shares, task, state = self.workload.federation.clients, self.workload.task, jobs[0].state
        config = wire.config_text(replace(self._config, strategy=jobs[0].strategy))
        tests = [
            TestJob(
                *(config, job.client, state.round, len(shares[job.client].test)),
                run=job.run,
                last_round=job.last_round,
            )
            for job in jobs
        ]
        tallies = self._tallies(state, tests)
        return [task.metrics(tallies[job.client]) if job.client in tallies else {} for job in jobs]

    def _tallies(self, state: ServerState, tests: Sequence[TestJob]) -> dict[int, Tensor]:
        """Test sums by client, of all that have samples, are connected and answer."""
        self._nodes.refresh()
        node_of = self._nodes.clients()
        due = {test.client: test for test in tests if test.num_examples}
        asked = [one for one in due if one in node_of and self._suspended.is_asked(one)]
        if absent := [str(client) for client in due if client not in asked]:
            self._nodes.notices.append(
                f"not tested on clients {', '.join(absent)}: not connected, or failing"
            )
        model = {"params": state.params, "buffers": state.buffers}
        answers = exchange(
            self._grid,
            "evaluate",
            {client: (node_of[client], wire.encode(due[client], **model)) for client in asked},
            lambda client, content: self._read_tally(content, due[client]),
            round_=state.round,
            deadline=self._options.deadline,
        )
        found: dict[int, Tensor] = {}
        for client in asked:  # in their order, on which the bits of sums depend
            answer = answers[client]
            if isinstance(answer, UnreadableError):
                self._nodes.notices.append(f"not tested on client {client}: {answer}")
                self._suspended.note(client, TEST, str(answer))
            else:
                found[client] = answer
                self._suspended.note(client, TEST)
        return found

    def _read_tally(self, content: RecordDict, test: TestJob) -> Tensor:
        tally = wire.decode_tally(content)
        federation = self.workload.federation
        reason = self.workload.task.reason_to_refuse_tally(
            tally, test.num_examples, federation.num_classes, federation.input_shape
        )
        if reason is not None:
            raise UnreadableError(reason)
        return tally

    def _scores(self, tallies: Sequence[Tensor]) -> dict[str, float]:
        """The scores over all samples, and the main one with every client counted alike."""
        task = self.workload.task
        each = [task.metrics(tally) for tally in tallies]
        alike = [scores[task.headline] for scores in each if task.headline in scores]
        pooled = task.metrics(reduce(torch.add, tallies))
        return pooled | ({f"mean_client_{task.headline}": float(np.mean(alike))} if alike else {})


class Suspensions:
    """Suspends clients that fail too often, for some rounds.

    A mute client costs a deadline whenever it is asked, and one whose updates are always refused
    costs work for nothing. Kept are the outcomes of the last rounds in which a client was asked to
    train, and of those in which it was asked to test. With too many failures among either, of
    whatever kind, it is not asked for some rounds. Then it is tried again; while those failures are
    among its last outcomes, a single one more suspends it again.
    """

    def __init__(self) -> None:
        self._round = 0
        self._begun = 0  # rounds of all groups of runs that are trained one after another
        self._until: dict[int, tuple[int, str]] = {}  # of the rounds begun, and why
        self._failed: dict[tuple[int, str], deque[bool]] = defaultdict(
            lambda: deque(maxlen=SUSPENSION_WINDOW)
        )
        self._outcomes: dict[tuple[int, str], str | None] = {}  # of this round

    def begin_round(self, round_: int) -> None:
        """A round begins, which shortens all suspensions by one."""
        self._round = round_
        self._begun += 1

    def note(self, client: int, kind: str, failure: str | None = None) -> None:
        """An outcome of a question of a kind; a failure has priority in its round."""
        self._outcomes[client, kind] = failure or self._outcomes.get((client, kind))

    def is_asked(self, client: int) -> bool:
        """Whether to ask a client: not suspended, and no failure yet in this round."""
        failed = (self._outcomes.get((client, kind)) for kind in (TRAIN, TEST))
        return not (self.reason(client) or any(failed))

    def reason(self, client: int) -> str | None:
        """Why a client is not asked; None when it is."""
        until, why = self._until.get(client, (0, ""))
        left = until - self._begun
        return f"suspended until round {self._round + left + 1}: {why}" if left > 0 else None

    def end_round(self, options: FlowerOptions) -> list[str]:
        """Judges the outcomes of the round; the clients that are suspended now."""
        suspended = {}
        for client, kind in sorted(self._outcomes):
            reason, last = self._outcomes[client, kind], self._failed[client, kind]
            last.append(reason is not None)
            if reason is None or not 0 < options.suspend_after <= sum(last):
                continue
            why = f"{sum(last)} of its last {len(last)} answers ({kind}) were not usable"
            until = self._begun + options.suspend_rounds + 1
            self._until[client] = until, f"{why}, the last: {reason}"
            suspended[client] = f"client {client} is {self.reason(client)}"
        self._outcomes.clear()
        return [*suspended.values()]
