"""The stacked engine: the jobs of all runs of a sweep at once, in lock-step.

The models' weights lie stacked in a few tensors, one row per job, and every step is a handful of
batched operations whatever the number of jobs. Made for CUDA; on CPU it computes the same, slowly.
Shapes: J jobs, R models to test, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedproto.data.samples import held
from fedproto.engines.base import (
    ENGINES,
    EVERYTHING,
    Capability,
    Engine,
    LocalJob,
    Workload,
)
from fedproto.engines.reference import by_client
from fedproto.engines.stacking.choice import network_for
from fedproto.engines.stacking.fusing import Compiled, unfused
from fedproto.engines.stacking.lockstep import Lockstep
from fedproto.engines.stacking.members import Member, Members
from fedproto.engines.stacking.memory import bytes_per_job, jobs_that_fit
from fedproto.engines.stacking.network import stack_params
from fedproto.engines.stacking.objectives import StackKind
from fedproto.engines.stacking.observations import Observer
from fedproto.engines.stacking.orders import StackOrders, stack_orders
from fedproto.engines.stacking.reports import StackReports
from fedproto.engines.stacking.statistics import lacking, received, returned
from fedproto.errors import TrainingError
from fedproto.rng import Indices
from fedproto.strategies.base import PERSONAL
from fedproto.types import ClientFailure, ClientUpdate, ServerState, under


@ENGINES.register("stacked")
class StackedEngine(Engine):
    """Trains all jobs of a round together; made for CUDA, where it is many times faster."""

    capabilities = EVERYTHING - {
        Capability.LABEL_MAPS,
        Capability.TRAINABLE,
        Capability.PERSONAL_MODEL,
        Capability.AUGMENTATION,
    }
    fallbacks = ("captured", "reference")

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._device = workload.options.torch_device()
        self._dtype = workload.options.torch_dtype()
        self._limit = workload.options.max_stack or None
        self._stacks: dict[StackKind, Lockstep] = {}
        self._compiled = Compiled()
        self._reports = StackReports()
        samples = held(workload.federation.samples, self._device, self._dtype)
        network, reason = network_for(workload, samples)
        self._obstacle = reason or None
        if network is None or samples is None:
            return
        self._network = network
        self._inputs = network.lay_out(samples.inputs)
        self._targets = samples.targets
        self._members = Members(workload, network, self._inputs, self._targets)
        self._observer = Observer(workload, network, self._inputs, self._targets)

    @property
    def stacks(self) -> bool:
        """Whether models are stacked at all, or left to other engines."""
        return self._obstacle is None

    def obstacle(self, job: LocalJob) -> str | None:
        """Why the model, or this job's strategy, cannot be stacked."""
        return self._obstacle or self._members.obstacle(job)

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs of a kind together, split where they do not fit."""
        jobs = [job.personalised() for job in jobs]
        results: dict[int, ClientUpdate | ClientFailure] = {}
        with self.workload.options.precision():
            for group in self._members.alike(jobs):
                order = sorted(group, key=lambda index: -jobs[index].batches.steps)
                members = [group[index] for index in order]
                for index, update in zip(order, self._train_alike(members), strict=True):
                    results[index] = update
                    self.workload.callback.on_job()
        return [results[index] for index in range(len(jobs))]

    @torch.no_grad()
    def evaluate(self, states: Sequence[ServerState], indices: Indices) -> list[dict[str, float]]:
        """Tests all models together."""
        if not states or not len(indices):
            return [{} for _ in states]
        if not self.stacks or lacking(self._network, states):
            return self.substitute().evaluate(states, indices)
        task = self.workload.task
        with self.workload.options.precision():
            packed = self._packed(states)
            if self._network.by_batch:
                own = [test for _, test in by_client(self.workload.federation, indices)]
                return [task.metrics(tally) for tally in self._observer.tallies(packed, own)]
            total: Tensor | None = None
            where = torch.from_numpy(indices).to(self._device)
            for part in where.split(self._observer.samples_at_once(len(states))):
                x = self._inputs[part].expand(len(states), *[-1] * self._inputs.dim())
                scores = self._network.scores(packed, x)
                tally = vmap(task.tally, in_dims=(0, None))(scores, self._targets[part])
                total = tally if total is None else total + tally
        assert total is not None  # noqa: S101 - there is at least one part
        return [task.metrics(tally) for tally in total.cpu()]

    def close(self) -> None:
        """Frees the buffers and graphs."""
        super().close()
        self._stacks.clear()

    def _train_alike(self, members: list[Member]) -> Iterator[ClientUpdate]:
        """Trains in as many parts as memory asks for."""
        kind, rest = self._members.kind(members), members
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
        self.workload.callback.on_notice(
            f"out of memory: {self._limit} clients are trained at once from now"
        )

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
        row = {id(state): index for index, state in enumerate(states)}
        rows = torch.tensor([row[id(job.state)] for job in jobs], device=self._device)
        packed = {name: tensor[rows] for name, tensor in self._packed(states).items()}
        orders = stack_orders(jobs, federation)
        lockstep.load_term(
            [member.local for member in members if member.local is not None],
            [job.state for job in jobs],
        )
        before = self._observer.observe(packed, jobs, [job.method.needs.before for job in jobs])
        summed = lockstep.train(
            packed,
            orders,
            torch.tensor([job.lr for job in jobs], dtype=self._dtype),
            [member.objective for member in members],
            torch.tensor([job.seed for job in jobs]),
        )
        del packed
        trained = {name: tensor[: len(jobs)] for name, tensor in lockstep.params.items()}
        seen = {
            **trained,
            **{name: rows[: len(jobs)] for name, rows in lockstep.statistics.items()},
        }
        after = self._observer.observe(seen, jobs, [job.method.needs.after for job in jobs])
        own = self._network.unpack(trained)
        locals_ = [member.local for member in members]
        reports = self._reports.of(jobs, locals_, own, before, after)
        losses = _mean_losses(summed, orders)
        personal = [self._members.personal(job) for job in jobs]
        return [
            ClientUpdate(
                client=job.client,
                num_examples=job.batches.num_examples,
                params={
                    name: own[name][index]
                    for name in job.state.params
                    if name not in personal[index]
                },
                buffers=returned(job, lockstep.statistics, index),
                train_loss=losses[index],
                epochs_done=job.batches.epochs,
                steps=job.batches.steps,
                lr=job.lr,
                payload=reports[index].payload if index in reports else {},
                memory={
                    **(reports[index].memory if index in reports else {}),
                    **under(PERSONAL, {name: own[name][index] for name in personal[index]}),
                },
            )
            for index, job in enumerate(jobs)
        ]

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
