"""The stacked engine: the jobs of all runs of a sweep at once, in lock-step.

The models' weights lie stacked in a few tensors, one row per job, and every step is a handful of
batched operations whatever the number of jobs. Made for CUDA; on CPU it computes the same, slowly.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from fedproto.engines.base import ENGINES, EVERYTHING, Capability, Engine, LocalJob, Workload
from fedproto.engines.reference import by_client
from fedproto.engines.setting import ClientView
from fedproto.engines.stacking.lockstep import Lockstep, optimizer_slots
from fedproto.engines.stacking.members import Member, StackKind, StackTerm
from fedproto.engines.stacking.network import StackedForm, stacked_form
from fedproto.errors import TrainingError, reason_of
from fedproto.rng import Indices
from fedproto.strategies.values import Observation, Statistic
from fedproto.types import ClientFailure, ClientUpdate, ServerState, Tensors

MEMORY_SHARE = 0.7
"""The part of the free memory that a stack may take; results and tests need some too."""


@ENGINES.register("stacked")
class StackedEngine(Engine):
    """Trains all jobs of a round together; made for CUDA, where it is many times faster."""

    capabilities = EVERYTHING - {
        Capability.GENERATOR,
        Capability.LABEL_MAPS,
        Capability.TRAINABLE,
        Capability.PERSONAL_MODEL,
    }
    fallbacks = ("captured", "reference")

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._device = workload.options.torch_device()
        self._dtype = workload.options.torch_dtype()
        self._limit: int | None = None  # of jobs at once, after running out of memory
        self._stacks: dict[StackKind, Lockstep] = {}
        form = stacked_form(workload)
        self._obstacle = form if isinstance(form, str) else None
        if not isinstance(form, str):
            self._form, self._network = form, form.network
            self._observer, targets = Observer(form), form.targets
            self._clients = ClientView(
                workload, self._device, lambda own: [targets[torch.from_numpy(own)]]
            )
            self._failing_terms: dict[StackKind, str | None] = {}

    def obstacle(self, job: LocalJob) -> str | None:
        """Why the model or the job cannot be stacked; a batch term is tried once."""
        if self._obstacle is not None:
            return self._obstacle
        network, needs = self._network, job.method.needs
        if job.augment is not None and not network.can_move(job.augment):
            return "augmentation but for flips and padded crops of images"
        if (needs.before or needs.after) and network.lacks_statistics([job.state]):
            return "statistics of features with local batch norm"
        if "batch_term" not in needs.hooks:
            return None
        kind = StackKind.of(job, [])
        if kind not in self._failing_terms:
            self._failing_terms[kind] = None
            try:
                with self.workload.options.computing():
                    self._try_term(job)
            except Exception as error:  # noqa: BLE001 - a user's code can fail in any way
                name = type(job.strategy).__name__
                self._failing_terms[kind] = f"{name} is not stacked: {reason_of(error)}"
        return self._failing_terms[kind]

    def _try_term(self, job: LocalJob) -> None:
        """Runs a strategy's batch term on two samples; raises where `torch.func` cannot."""
        network, term = self._network, StackTerm(job.strategy, self._network)
        term.load([self._clients.local(job)], [job.state], capacity=1)
        x, targets = self._form.inputs[:2].unsqueeze(0), self._form.targets[:2].unsqueeze(0)
        live = torch.ones_like(targets, dtype=torch.bool)
        outputs = network.outputs(self._packed([job.state]), x, live)
        weight = live.to(outputs.logits.dtype) / 2
        term.bound(x, live)(outputs.features, outputs.logits, targets, weight)

    def train_natively(self, jobs: Sequence[LocalJob]) -> list[ClientUpdate | ClientFailure]:
        """Runs the jobs of a kind together, split where they do not fit."""
        jobs = [job.personalised() for job in jobs]
        results: dict[int, ClientUpdate | ClientFailure] = {}
        with self.workload.options.computing():
            for group in self._alike(jobs):
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
        if self._obstacle is not None or self._network.lacks_statistics(states):
            return self.substitute().evaluate(states, indices)
        with self.workload.options.computing():
            tallies = self._observer.tallies(self._packed(states), len(states), indices)
        return [self.workload.task.metrics(tally) for tally in tallies]

    def close(self) -> None:
        """Frees the buffers and graphs."""
        super().close()
        self._stacks.clear()

    def _alike(self, jobs: Sequence[LocalJob]) -> list[dict[int, Member]]:
        """The members that can be trained in one stack, by the positions of their jobs.

        Where a step can be one kernel, jobs with an objective that it lacks get a stack of their
        own, so that all others keep it.
        """
        groups: dict[tuple[StackKind, bool], dict[int, Member]] = {}
        for index, job in enumerate(jobs):
            local = self._clients.local(job)
            member, kind = Member(job, local, job.strategy.objective(local)), StackKind.of(job, [])
            whole = self._network.whole_step(kind.train.batch_size) is not None
            apart = whole and not StackKind.of(job, [member.objective]).whole
            groups.setdefault((kind, apart), {})[index] = member
        return list(groups.values())

    def _train_alike(self, members: list[Member]) -> Iterator[ClientUpdate]:
        """Trains in as many parts as fit into memory one after another."""
        kind = StackKind.of(members[0].job, [member.objective for member in members])
        rest = members
        while rest:
            part = rest[: self._limit]
            updates: list[ClientUpdate] = []
            try:
                updates = self._train_stack(self._lockstep(kind, part), part)
            except (RuntimeError, ValueError, IndexError) as error:
                if not _ran_out_of_memory(error):
                    raise TrainingError(
                        f"training {len(part)} clients in round {part[0].job.state.round} failed:"
                        f" {error}"
                    ) from error
            # Outside of the handler, where nothing refers to the buffers of the failed attempt.
            if not updates:
                self._halve(len(part))
            rest = rest[len(updates) :]
            yield from updates

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

    def _lockstep(self, kind: StackKind, members: Sequence[Member]) -> Lockstep:
        """Buffers for these jobs, or for as many of them as fit."""
        known = self._stacks.get(kind)
        if known is not None and known.capacity >= len(members):
            return known
        self._stacks.pop(kind, None)
        del known
        packed = self._packed([members[0].job.state])
        example = {name: tensor[0] for name, tensor in packed.items()}
        capacity = min(len(members), self._jobs_that_fit(kind, example))
        self._stacks[kind] = Lockstep(self._form, kind, capacity, example)
        return self._stacks[kind]

    def _jobs_that_fit(self, kind: StackKind, example: Tensors) -> int:
        """An estimate of how many jobs fit into memory; at least one."""
        weights = sum(tensor.numel() for tensor in example.values())
        # The weights, received and returned ones; then those of optimizer and objective.
        copies = 3 + optimizer_slots(kind.train) + kind.rows
        numbers = copies * weights + self._network.numbers(kind.train.batch_size)
        room = MEMORY_SHARE * free_bytes(self._device)
        return max(1, int(room) // (numbers * self._dtype.itemsize))

    @torch.no_grad()
    def _train_stack(self, lockstep: Lockstep, members: Sequence[Member]) -> list[ClientUpdate]:
        """Trains as many of the jobs as there is room for."""
        members = members[: lockstep.capacity]
        jobs = [member.job for member in members]
        packed = self._rows([job.state for job in jobs])
        observed = [job.observed for job in jobs]
        alike = all(one is job.state for one, job in zip(observed, jobs, strict=True))
        before = self._observer.observe(
            packed if alike else self._rows(observed),
            jobs,
            [job.method.needs.before for job in jobs],
        )
        del observed
        loss, samples = lockstep.train(packed, members)
        del packed
        trained = {name: tensor[: len(jobs)] for name, tensor in lockstep.params.items()}
        statistics = {name: tensor[: len(jobs)] for name, tensor in lockstep.statistics.items()}
        after = self._observer.observe(
            {**trained, **statistics}, jobs, [job.method.needs.after for job in jobs]
        )
        own = self._network.unpack(trained)
        losses = zip(loss.tolist(), samples.tolist(), strict=True)
        return [
            self._clients.update(
                member.job,
                member.local,
                {name: tensor[index] for name, tensor in own.items()},
                returned_buffers(member.job, statistics, index),
                (before.get(index), after.get(index)),
                sums,
            )
            for index, (member, sums) in enumerate(zip(members, losses, strict=True))
        ]

    def _rows(self, states: Sequence[ServerState]) -> dict[str, Tensor]:
        """Stacked weights of jobs, many of which have the same."""
        keys = [tuple(map(id, {**one.params, **one.buffers}.values())) for one in states]
        distinct = dict(zip(keys, states, strict=True))
        row = {key: index for index, key in enumerate(distinct)}
        rows = torch.tensor([row[key] for key in keys], device=self._device)
        packed = self._packed(list(distinct.values()))
        return {name: tensor[rows] for name, tensor in packed.items()}

    def _packed(self, states: Sequence[ServerState]) -> dict[str, Tensor]:
        """Stacked weights and statistics in the network's layout."""
        return self._network.stacked(states, self._device, self._dtype)


FILLS = -1
"""The index of a sample that only fills up a row, and its label; it is no class."""


class Observer:
    """Evaluates stacked models on all samples of many jobs at once."""

    def __init__(self, form: StackedForm) -> None:
        self._workload, self._network = form.workload, form.network
        self._inputs, self._targets = form.inputs, form.targets
        self._device, self._dtype = form.inputs.device, form.workload.options.torch_dtype()

    def observe(
        self, packed: Tensors, jobs: Sequence[LocalJob], needed: Sequence[frozenset[Statistic]]
    ) -> dict[int, Observation]:
        """The statistics that each job needs of its training data, by position of the job."""
        found: dict[int, Observation] = {}
        for statistics in dict.fromkeys(needed):
            if statistics:
                indices = [index for index, one in enumerate(needed) if one == statistics]
                found |= self._observe_alike(packed, jobs, indices, statistics)
        return found

    def _observe_alike(
        self,
        packed: Tensors,
        jobs: Sequence[LocalJob],
        indices: list[int],
        statistics: frozenset[Statistic],
    ) -> dict[int, Observation]:
        federation, options = self._workload.federation, self._workload.options
        data = {index: federation.train_indices(jobs[index].client) for index in indices}
        indices = sorted(indices, key=lambda index: -len(data[index]))
        where, sizes = self._rows(list(data.values()))
        params = {name: tensor[indices] for name, tensor in packed.items()}
        total: Observation | None = None
        alone = self._samples_at_once(len(indices))
        width = options.eval_batch_size if self._network.by_batch else alone
        for rows, columns in self._parts(sizes, width):
            own = {name: tensor[rows] for name, tensor in params.items()}
            samples = where[rows, columns]
            live = samples != FILLS
            samples = samples.clamp(min=0)
            features = self._network.outputs(own, self._inputs[samples], live).features
            labels = torch.where(live, self._targets[samples], FILLS)
            found = Observation.of(statistics, features, labels, federation.num_classes)
            total = total or Observation(
                *(part.new_zeros((len(indices), *part.shape[1:])) for part in found)
            )
            for sum_, part in zip(total, found, strict=True):
                sum_[rows] += part
        assert total is not None  # noqa: S101 - no client is without samples
        return {
            index: Observation(*one)
            for index, one in zip(indices, zip(*total, strict=True), strict=True)
        }

    def tallies(self, packed: Tensors, models: int, indices: Indices) -> Tensor:
        """Each model's test sums over some samples."""
        task = self._workload.task
        if self._network.by_batch:
            own = [test for _, test in by_client(self._workload.federation, indices)]
            return self._tallies_by_client(packed, models, own)
        total: list[Tensor] = []
        where = torch.from_numpy(indices).to(self._device)
        for part in where.split(self._samples_at_once(models)):
            x = self._inputs[part].expand(models, *[-1] * self._inputs.dim())
            live = x.new_ones(x.shape[:2], dtype=torch.bool)
            logits = self._network.outputs(packed, x, live).logits
            total.append(vmap(task.tally, in_dims=(0, None))(logits, self._targets[part]))
        return torch.stack(total).sum(dim=0).cpu()

    def _tallies_by_client(self, packed: Tensors, models: int, own: Sequence[Indices]) -> Tensor:
        """Each model's test sums, every client's samples in batches of their own."""
        where, sizes = self._rows(own)
        width, task, total = self._workload.options.eval_batch_size, self._workload.task, []
        for index in range(models):
            tallies = []
            for rows, columns in self._parts(sizes, width):
                part = where[rows, columns]
                live = part != FILLS
                model = {
                    name: tensor[index].expand(len(part), *tensor.shape[1:])
                    for name, tensor in packed.items()
                }
                x = self._inputs[part.clamp(min=0)]
                logits = self._network.outputs(model, x, live).logits
                tallies.append(task.tally(logits[live], self._targets[part[live]]))
            total.append(torch.stack(tallies).sum(dim=0))
        return torch.stack(total).cpu()

    def _rows(self, parts: Sequence[Indices]) -> tuple[Tensor, list[int]]:
        """Samples row by row ``[J, N]``, longest first, filled up by `FILLS`; and their numbers."""
        ordered = [torch.from_numpy(one) for one in sorted(parts, key=lambda one: -len(one))]
        where = pad_sequence(ordered, batch_first=True, padding_value=FILLS)
        return where.to(self._device), [len(one) for one in ordered]

    def _parts(self, sizes: Sequence[int], width: int) -> Iterator[tuple[slice, slice]]:
        """Rows and columns that fit into memory, of rows of these sizes, the longest first."""
        at_once = max(1, self._samples_that_fit() // width)
        for first in range(0, sizes[0], width):
            active = sum(size > first for size in sizes)
            for begin in range(0, active, at_once):
                yield slice(begin, min(begin + at_once, active)), slice(first, first + width)

    def _samples_at_once(self, models: int) -> int:
        """Samples per model where nothing is trained."""
        fit = self._samples_that_fit() // models
        return max(1, min(self._workload.options.eval_batch_size, fit))

    def _samples_that_fit(self) -> int:
        size = torch.finfo(self._dtype).bits // 8
        return free_bytes(self._device) // 4 // (size * self._network.numbers(1))


def returned_buffers(job: LocalJob, trained: Tensors, index: int) -> Tensors:
    """A job's buffers after training: statistics from the stack, counters advanced."""
    counted = 0 if job.train.batch_norm == "frozen" else job.batches.steps
    buffers = {}
    for name, tensor in job.state.buffers.items():
        if name in trained:
            buffers[name] = trained[name][index].clone().to(tensor.dtype)
        else:
            buffers[name] = tensor + counted if name.endswith("num_batches_tracked") else tensor
    return buffers


def free_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What PyTorch has reserved and not in use can be used again.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was the cause; an error while capturing a graph hides it behind another."""
    while error is not None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
