"""Which jobs can be trained in one stack, and what their strategies add to their loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.engines.base import LocalJob, Workload
from fedproto.engines.reference import needs_head
from fedproto.engines.setting import setting_of
from fedproto.engines.stacking.network import Network, stack_params
from fedproto.engines.stacking.objectives import StackKind
from fedproto.engines.stacking.statistics import received
from fedproto.engines.stacking.terms import StackTerm
from fedproto.equations import class_sums
from fedproto.strategies.base import Local, Objective, Setting, Strategy

NOTHING = Objective()


@dataclass(frozen=True)
class Member:
    """A job of a stack, with what its strategy sees of it and adds to its loss."""

    job: LocalJob
    local: Local | None = None
    objective: Objective = NOTHING


class Members:
    """Makes members of jobs."""

    def __init__(
        self, workload: Workload, network: Network, inputs: Tensor, targets: Tensor
    ) -> None:
        self._workload, self._network = workload, network
        self._inputs, self._targets = inputs, targets
        self._device = targets.device
        self._obstacles: dict[Strategy, str | None] = {}
        self._class_counts: dict[int, Tensor] = {}

    def alike(self, jobs: Sequence[LocalJob]) -> list[dict[int, Member]]:
        """The members that can be trained in one stack, by the places of their jobs.

        Where a step is one kernel, those whose objective it does not know have a stack of their
        own, or they would take it from all others.
        """
        groups: dict[tuple[StackKind, bool], dict[int, Member]] = {}
        for index, job in enumerate(jobs):
            member, kind = self.of(job), self.kind([Member(job)])
            whole = self._network.whole_step(kind.train.batch_size) is not None
            apart = whole and not self.kind([member]).whole
            groups.setdefault((kind, apart), {})[index] = member
        return list(groups.values())

    def kind(self, members: Sequence[Member]) -> StackKind:
        """What jobs have in common, and what any of them needs."""
        job = members[0].job
        objectives = [member.objective for member in members]
        return StackKind(
            train=job.train.kind,
            penalized_by=job.strategy if "penalty" in job.method.needs.hooks else None,
            proximal=any(one.proximal for one in objectives),
            linear=any(one.linear is not None for one in objectives),
            calibrated=any(one.calibrated for one in objectives),
            term_of=job.strategy if "batch_term" in job.method.needs.hooks else None,
        )

    def of(self, job: LocalJob) -> Member:
        """A job with what its strategy adds to the loss."""
        strategy, device = job.strategy, self._device
        hooks = job.method.needs.hooks
        if not hooks & {"objective", "batch_term"} and not job.method.reports:
            return Member(job)
        local = Local(
            num_examples=job.batches.num_examples,
            steps=job.batches.steps,
            lr=job.lr,
            classes=self._classes(job),
            params=job.state.params,
            broadcast={name: one.to(device) for name, one in job.broadcast.items()},
            memory={name: one.to(device) for name, one in job.memory.items()},
            head=self._setting.head if needs_head(job.method.needs) else (),
            secret=job.secret,
        )
        return Member(job, local, strategy.objective(local))

    @cached_property
    def _setting(self) -> Setting:
        params = dict(self._workload.model.named_parameters())
        return setting_of(self._workload, params)

    def personal(self, job: LocalJob) -> Collection[str]:
        """Names of the parameters that stay on the client."""
        if "personal" not in job.method.needs.hooks:
            return ()
        return job.strategy.personal(self._setting)

    def _classes(self, job: LocalJob) -> Tensor:
        """The client's labels per class, if its strategy asks for them."""
        if not job.method.needs.classes:
            return torch.empty(0, dtype=torch.int64, device=self._device)
        if job.client not in self._class_counts:
            federation = self._workload.federation
            own = self._targets[torch.from_numpy(federation.train_indices(job.client))]
            self._class_counts[job.client] = class_sums(None, own, federation.num_classes)[1]
        return self._class_counts[job.client]

    def obstacle(self, job: LocalJob) -> str | None:
        """Why a job cannot be trained in a stack; found by trying its strategy's hooks once.

        Batches that are split give other results where samples of a batch influence each other.
        """
        network, hooks = self._network, job.method.needs.hooks
        joint = network.statistics or network.by_batch or network.draws
        if joint and job.train.accumulate > 1:
            return "gradient accumulation with batch norm or dropout"
        if not hooks & {"penalty", "batch_term"}:
            return None
        strategy = job.strategy
        if strategy not in self._obstacles:
            self._obstacles[strategy] = None
            params = stack_params([job.state.params])
            try:
                if "penalty" in hooks:
                    vmap(grad(strategy.penalty))(params, params)
                if "batch_term" in hooks:
                    self._try_term(job)
            except Exception as error:  # noqa: BLE001 - a user's code can fail in any way
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._obstacles[strategy] = f"{type(strategy).__name__} is not stacked: {reason}"
        return self._obstacles[strategy]

    def _try_term(self, job: LocalJob) -> None:
        """Runs a strategy's batch term once on two samples; raises where `torch.func` cannot."""
        local = self.of(job).local
        assert local is not None  # noqa: S101 - there is one for every batch term
        term = StackTerm(job.strategy, self._network)
        term.load([local], [job.state], capacity=1)
        x = self._inputs[:2].unsqueeze(0)
        targets = self._targets[:2].unsqueeze(0)
        live = torch.ones_like(targets, dtype=torch.bool)
        packed = self._network.pack(stack_params([job.state.params]))
        packed |= received(self._network, [job.state], next(iter(packed.values())))
        features = self._network.features(packed, x, live)
        logits = self._network.scores(packed, x, live)
        bound = term.bound(x, live)
        bound.gradients(features, logits, targets, live.to(features.dtype) / 2)
