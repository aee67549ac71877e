"""The stacked engine: the jobs of all runs of a sweep at once, in lock-step.

The models' weights lie stacked in a few tensors, one row per job, and every step is a handful of
batched operations whatever the number of jobs. Made for CUDA; on CPU it computes the same, slowly.
Shapes: J jobs, R models to test, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedproto.data.samples import held
from fedproto.engines.base import ENGINES, Engine, OnDone, Workload
from fedproto.engines.captured import CapturedEngine
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.stacking.choice import network_for
from fedproto.engines.stacking.fusing import Compiled, unfused
from fedproto.engines.stacking.lockstep import Lockstep, StackKind
from fedproto.engines.stacking.memory import bytes_per_job, free_bytes, jobs_that_fit
from fedproto.engines.stacking.network import stack_params
from fedproto.engines.stacking.orders import StackOrders, stack_orders
from fedproto.engines.stacking.reports import StackReports
from fedproto.engines.stacking.statistics import estimated, lacking, received, returned
from fedproto.equations import class_sums
from fedproto.errors import TrainingError
from fedproto.models.base import head_of
from fedproto.rng import Indices
from fedproto.strategies.base import Strategy
from fedproto.strategies.contract import Local, Look, Objective, Observation
from fedproto.types import ClientFailure, ClientUpdate, LocalJob, ServerState, Tensors

CLOSED, OWN, ALONE = "closed", "own", "alone"
"""Penalties: in closed form, through `torch.func`, or not in a stack at all."""

NOTHING = Objective()

VOID = -1
"""The label of a sample that only fills a row; it is no class."""


@dataclass(frozen=True)
class Member:
    """A job of a stack, with what its strategy sees of it and adds to its loss."""

    job: LocalJob
    local: Local | None = None
    objective: Objective = NOTHING


@ENGINES.register("stacked")
class StackedEngine(Engine):
    """Trains all jobs of a round together; made for CUDA, where it is many times faster."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._device = workload.options.torch_device()
        self._dtype = workload.options.torch_dtype()
        self._limit = workload.options.max_stack or None
        self._stacks: dict[StackKind, Lockstep] = {}
        self._compiled = Compiled()
        self._penalties: dict[Strategy, str] = {}
        self._reports = StackReports()
        self._class_counts: dict[int, Tensor] = {}
        self._reference: ReferenceEngine | None = None
        self._one_by_one: ReferenceEngine | None = None
        samples = held(workload.federation.samples, self._device, self._dtype)
        network, reason = network_for(workload, samples)
        if network is None or samples is None:
            workload.notify(f"the stacked engine cannot train this ({reason}); one by one instead")
            self._reference = CapturedEngine(workload)
            return
        self._network = network
        self._inputs = network.lay_out(samples.inputs)
        self._targets = samples.targets

    @property
    def stacks(self) -> bool:
        """Whether models are stacked at all, or left to the reference engine."""
        return self._reference is None

    def train(
        self, jobs: Sequence[LocalJob], on_done: OnDone | None = None
    ) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs of a kind together, split where they do not fit."""
        if self._reference is not None:
            return self._reference.train(jobs, on_done)
        results: dict[int, ClientUpdate | ClientFailure] = {}
        alone = [place for place, job in enumerate(jobs) if self._penalty(job) == ALONE]
        if alone:
            found = self._alone().train([jobs[place] for place in alone], on_done)
            results |= zip(alone, found, strict=True)
        with self.workload.options.precision():
            for places in self._alike(jobs):
                order = sorted(places, key=lambda place: -jobs[place].batches.steps)
                members = [self._member(jobs[place]) for place in order]
                for place, update in zip(order, self._train_alike(members), strict=True):
                    results[place] = update
                    if on_done is not None:
                        on_done()
        return [results[place] for place in range(len(jobs))]

    @torch.no_grad()
    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests all models together."""
        if self._reference is not None:
            return self._reference.evaluate(states, indices)
        if not states or not len(indices):
            return [{} for _ in states]
        if lacking(self._network, states):
            return self._alone().evaluate(states, indices)
        task = self.workload.task
        with self.workload.options.precision():
            packed = self._packed(states)
            total: Tensor | None = None
            where = torch.from_numpy(indices).to(self._device)
            for part in where.split(self._samples_at_once(len(states))):
                x = self._inputs[part].expand(len(states), *[-1] * self._inputs.dim())
                scores = self._network.scores(packed, x)
                tally = vmap(task.tally, in_dims=(0, None))(scores, self._targets[part])
                total = tally if total is None else total + tally
        assert total is not None  # noqa: S101 - there is at least one part
        return [task.metrics(tally) for tally in total.cpu()]

    def close(self) -> None:
        """Frees the buffers and graphs."""
        self._stacks.clear()

    def _alike(self, jobs: Sequence[LocalJob]) -> list[list[int]]:
        """Places of jobs that can be trained in one stack."""
        groups: dict[StackKind, list[int]] = {}
        for place, job in enumerate(jobs):
            if self._penalty(job) != ALONE:
                groups.setdefault(self._kind([Member(job)]), []).append(place)
        return list(groups.values())

    def _kind(self, members: Sequence[Member]) -> StackKind:
        """What jobs have in common, and what any of them needs."""
        job = members[0].job
        objectives = [member.objective for member in members]
        virtual = [one.virtual for one in objectives if one.virtual is not None]
        classes = self.workload.federation.num_classes
        # As much room as there are classes, so that a few more or less do not need another stack.
        most = max((max(len(one.labels), classes) for one in virtual), default=0)
        return StackKind(
            train=replace(job.train, lr=1.0, epochs=1, lr_schedule="constant", lr_power=1.0),
            penalized_by=job.strategy if self._penalty(job) == OWN else None,
            proximal=any(one.proximal for one in objectives),
            linear=any(one.linear is not None for one in objectives),
            beside=bool(virtual) or any(one.calibrated for one in objectives),
            virtual=(most, virtual[0].features.shape[1] if virtual else 0),
        )

    def _member(self, job: LocalJob) -> Member:
        """A job with what its strategy adds to the loss."""
        strategy, device = job.strategy, self._device
        hooks = type(strategy)
        if hooks.objective is Strategy.objective and hooks.report is Strategy.report:
            return Member(job)
        local = Local(
            num_examples=job.batches.num_examples,
            steps=job.batches.steps,
            lr=job.lr,
            classes=self._classes(job),
            params=job.state.params,
            broadcast={name: one.to(device) for name, one in job.broadcast.items()},
            memory={name: one.to(device) for name, one in job.memory.items()},
            secret=job.seed,
        )
        objective = strategy.objective(local)
        if objective.virtual is not None:
            head_of(self.workload.model)
        return Member(job, local, objective)

    def _classes(self, job: LocalJob) -> Tensor:
        """The client's labels per class, if its strategy asks for them."""
        if not job.strategy.looks.classes:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        if job.client not in self._class_counts:
            federation = self.workload.federation
            own = self._targets[torch.from_numpy(federation.train_indices(job.client))]
            self._class_counts[job.client] = class_sums(None, own, federation.num_classes)[1]
        return self._class_counts[job.client]

    def _penalty(self, job: LocalJob) -> str:
        """How a job's penalty is computed; a hook that `torch.func` cannot run asks for `ALONE`.

        So does augmentation, which is done batch by batch.
        """
        if job.augment is not None:
            return ALONE
        strategy = job.strategy
        if type(strategy).penalty is Strategy.penalty:
            return CLOSED
        if strategy not in self._penalties:
            params = self._stack_states([job.state])
            try:
                vmap(grad(strategy.penalty))(params, params)
                self._penalties[strategy] = OWN
            except Exception as error:  # noqa: BLE001 - a user's code can fail in any way
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self.workload.notify(
                    f"{type(strategy).__name__} is trained one by one: torch.func cannot run its"
                    f" penalty ({reason})"
                )
                self._penalties[strategy] = ALONE
        return self._penalties[strategy]

    def _train_alike(self, members: list[Member]) -> Iterator[ClientUpdate]:
        """Trains in as many parts as memory asks for."""
        kind, rest = self._kind(members), members
        while rest:
            part = rest[: self._limit]
            updates: list[ClientUpdate] = []
            try:
                updates = self._train_part(kind, part)
            except (RuntimeError, ValueError, IndexError) as error:
                if not _ran_out_of_memory(error):
                    raise TrainingError(
                        f"training {len(part)} clients in round {part[0].job.state.round} failed:"
                        f" {error}"
                    ) from error
            # Outside of the handler, where nothing holds on to the buffers of the failed attempt.
            if not updates:
                self._halve(len(part))
            rest = rest[len(updates) :]
            yield from updates

    def _train_part(self, kind: StackKind, members: Sequence[Member]) -> list[ClientUpdate]:
        """Trains as many of the jobs as fit, at least one."""
        lockstep = self._lockstep(kind, [member.job for member in members])
        return self._train_stack(lockstep, members[: lockstep.capacity])

    def _halve(self, jobs: int) -> None:
        if jobs <= 1:
            raise TrainingError(
                "a single client does not fit into the device's memory; use smaller batches,"
                " or engine.device = 'cpu'"
            )
        self._limit = (jobs + 1) // 2
        self._stacks.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self.workload.notify(f"out of memory: {self._limit} clients are trained at once from now")

    def _lockstep(self, kind: StackKind, jobs: Sequence[LocalJob]) -> Lockstep:
        """Buffers for these jobs, or for as many of them as fit."""
        known = self._stacks.get(kind)
        if known is not None and known.capacity >= len(jobs):
            return known
        self._stacks.pop(kind, None)
        del known
        example = {name: tensor[0] for name, tensor in self._packed([jobs[0].state]).items()}
        need = bytes_per_job(self._network, example, kind)
        capacity = min(len(jobs), jobs_that_fit(need, self._device))
        options = self.workload.options
        cuda = self._device.type == "cuda"
        frozen = kind.train.batch_norm == "frozen"
        self._stacks[kind] = Lockstep(
            self._network.frozen() if frozen else self._network,
            self._inputs,
            self._targets,
            kind,
            capacity,
            example,
            self.workload.federation.num_classes,
            fuse=self._compiled if cuda and options.compile else unfused,
            graphs=cuda,
        )
        return self._stacks[kind]

    @torch.no_grad()
    def _train_stack(self, lockstep: Lockstep, members: Sequence[Member]) -> list[ClientUpdate]:
        federation, jobs = self.workload.federation, [member.job for member in members]
        states = list({id(job.state): job.state for job in jobs}.values())
        row = {id(state): place for place, state in enumerate(states)}
        rows = torch.tensor([row[id(job.state)] for job in jobs], device=self._device)
        packed = {name: tensor[rows] for name, tensor in self._packed(states).items()}
        orders = stack_orders(jobs, federation)
        before = self._observe(packed, jobs, [job.strategy.looks.before for job in jobs])
        summed = lockstep.train(
            packed,
            orders,
            torch.tensor([job.lr for job in jobs], dtype=self._dtype),
            [member.objective for member in members],
        )
        del packed
        trained = {name: tensor[: len(jobs)] for name, tensor in lockstep.params.items()}
        seen = {
            **trained,
            **{name: rows[: len(jobs)] for name, rows in lockstep.statistics.items()},
        }
        after = self._observe(seen, jobs, [job.strategy.looks.after for job in jobs])
        own = self._network.unpack(trained)
        locals_ = [member.local for member in members]
        reports = self._reports.of(jobs, locals_, own, before, after)
        losses = _mean_losses(summed, orders)
        return [
            ClientUpdate(
                client=job.client,
                num_examples=job.batches.num_examples,
                params={name: own[name][place] for name in job.state.params},
                buffers=returned(job, lockstep.statistics, place),
                train_loss=losses[place],
                epochs_done=job.batches.epochs,
                steps=job.batches.steps,
                lr=job.lr,
                payload=reports[place].payload if place in reports else {},
                memory=reports[place].memory if place in reports else {},
            )
            for place, job in enumerate(jobs)
        ]

    def _observe(
        self, packed: Tensors, jobs: Sequence[LocalJob], asked: Sequence[frozenset[Look]]
    ) -> dict[int, Observation]:
        """What stacked weights make of the jobs' training data, by place."""
        found: dict[int, Observation] = {}
        for what in dict.fromkeys(asked):
            if what:
                places = [place for place, look in enumerate(asked) if look == what]
                found |= self._observe_alike(packed, jobs, places, what)
        return found

    def _observe_alike(
        self, packed: Tensors, jobs: Sequence[LocalJob], places: list[int], what: frozenset[Look]
    ) -> dict[int, Observation]:
        federation = self.workload.federation
        places = sorted(places, key=lambda place: -jobs[place].batches.num_examples)
        own = [federation.train_indices(jobs[place].client) for place in places]
        index = np.full((len(own), len(own[0])), VOID, dtype=np.int64)
        for place, indices in enumerate(own):
            index[place, : len(indices)] = indices
        sizes = np.array([len(indices) for indices in own])
        where = torch.from_numpy(index).to(self._device)
        params = {name: tensor[places] for name, tensor in packed.items()}
        if lacking(self._network, [jobs[place].state for place in places]):
            batch = self.workload.options.eval_batch_size
            params |= estimated(
                self._network, params, self._inputs, where, batch, self._room_for_samples()
            )
        total: Observation | None = None
        width = self._samples_at_once(len(places))
        for first in range(0, index.shape[1], width):
            active = int(np.searchsorted(-sizes, -first, side="left"))
            part = where[:active, first : first + width]
            leading = {name: tensor[:active] for name, tensor in params.items()}
            seen = self._look(leading, part, what)
            if total is None:
                total = seen
            else:
                total.sums[:active] += seen.sums
                total.count[:active] += seen.count
                total.loss[:active] += seen.loss
        assert total is not None  # noqa: S101 - no client is empty
        mean = total.loss / torch.from_numpy(sizes).to(self._device)
        return {
            place: Observation(total.sums[row], total.count[row], mean[row])
            for row, place in enumerate(places)
        }

    def _look(self, params: Tensors, part: Tensor, what: frozenset[Look]) -> Observation:
        """Sums over some samples of every job, ``[J, N]``; `VOID` stands for none."""
        x = self._inputs[part.clamp(min=0)]
        labels = torch.where(part == VOID, VOID, self._targets[part.clamp(min=0)])
        features = self._network.features(params, x) if "features" in what else None
        sums, count = class_sums(features, labels, self.workload.federation.num_classes)
        loss = torch.zeros(len(part), dtype=self._dtype, device=self._device)
        if "loss" in what:
            scores = self._network.scores(params, x).transpose(1, 2)
            loss = functional.cross_entropy(
                scores, labels, ignore_index=VOID, reduction="none"
            ).sum(dim=1)
        return Observation(sums, count, loss)

    def _samples_at_once(self, models: int) -> int:
        """Samples per model where nothing is trained: as many as the memory plan allows."""
        fit = self._room_for_samples() // models
        return max(1, min(self.workload.options.eval_batch_size, fit))

    def _room_for_samples(self) -> int:
        size = torch.finfo(self._dtype).bits // 8
        return free_bytes(self._device) // 4 // (size * self._network.numbers(1))

    def _alone(self) -> ReferenceEngine:
        """For what cannot be done in a stack."""
        if self._one_by_one is None:
            self._one_by_one = CapturedEngine(self.workload)
        return self._one_by_one

    def _packed(self, states: Sequence[ServerState]) -> dict[str, Tensor]:
        """Weights as the network wants them, with the statistics that it keeps."""
        params = self._network.pack(self._stack_states(states))
        return params | received(self._network, states, next(iter(params.values())))

    def _stack_states(self, states: Sequence[ServerState]) -> dict[str, Tensor]:
        stacked = stack_params([state.params for state in states])
        return {name: tensor.to(self._device, self._dtype) for name, tensor in stacked.items()}


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was the cause; an error while capturing a graph hides it behind another."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _mean_losses(summed: Tensor, orders: StackOrders) -> list[float | None]:
    return [
        total / samples if samples else None
        for total, samples in zip(summed.tolist(), orders.last_samples.tolist(), strict=True)
    ]
