"""What jobs of one stack have in common, and the terms that strategies add to their loss.

Shapes: J jobs, B samples of a batch, C classes, D feature channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.engines.augment import AugmentOptions
from fedproto.engines.base import LocalJob
from fedproto.engines.stacking.formulas import Fuse
from fedproto.engines.stacking.network import (
    Network,
    RowLayout,
    TermGradients,
    stack_params,
)
from fedproto.engines.training import TrainOptions, frozen_weights
from fedproto.strategies.base import PERSONAL, Strategy
from fedproto.strategies.values import Batch, Local, Objective, Outputs
from fedproto.types import ServerState, Tensors, part, under


@dataclass(frozen=True)
class Member:
    """A job of a stack, its client's side of it, and the closed-form terms of its loss."""

    job: LocalJob
    local: Local
    objective: Objective


@dataclass(frozen=True)
class StackKind:
    """The properties that the jobs of a stack have in common.

    Attributes:
        term_of: The strategy, if it has a batch term.
        term_inputs: Names of the tensors that it sees; of memory there may be none yet.
        augment: Augmentation of training images.
        proximal: Whether any job is pulled to the received weights.
        linear: Whether any job has a term that is linear in the weights.
        calibrated: Whether any job changes logits before the loss.
    """

    train: TrainOptions
    term_of: Strategy | None
    term_inputs: frozenset[str]
    augment: AugmentOptions | None
    proximal: bool
    linear: bool
    calibrated: bool

    @classmethod
    def of(cls, job: LocalJob, objectives: Sequence[Objective]) -> StackKind:
        """The kind of a stack of jobs like this one, with these closed-form terms."""
        term_of = job.strategy if "batch_term" in job.method.needs.hooks else None
        sent_and_kept = _without_models(job.strategy, job.broadcast, job.memory)
        return cls(
            train=job.train.kind,
            term_of=term_of,
            term_inputs=frozenset(() if term_of is None else sent_and_kept),
            augment=job.augment,
            proximal=any(one.proximal for one in objectives),
            linear=any(one.linear is not None for one in objectives),
            calibrated=any(one.calibrated for one in objectives),
        )

    @property
    def rows(self) -> int:
        """Rows of a model's size per job, beside weights and the optimizer's own."""
        nearby = self.train.optimizer == "sam"
        return self.proximal + self.linear + (not self.in_place) + nearby + self.train.centralize

    @property
    def in_place(self) -> bool:
        """Whether gradients are subtracted as they are computed, weight decay's with the terms'."""
        return replace(self.train, weight_decay=0.0).plain and self.term_of is None

    @property
    def whole(self) -> bool:
        """Whether a step can be one kernel: plain descent with at most a proximal term."""
        plain = self.train.plain and self.term_of is None
        return plain and not (self.linear or self.calibrated or self.augment)


class StackObjectives:
    """Buffers for the closed-form terms of a stack's jobs, and their gradients.

    Attributes:
        received: The weights that jobs started from, if any term needs them.
        proximal: Strength of each job's pull to them, ``[J]``.
    """

    def __init__(
        self, kind: StackKind, network: Network, layout: RowLayout, weights: Tensor, classes: int
    ) -> None:
        self._network, self._layout = network, layout
        self.received = torch.zeros_like(weights) if kind.proximal else None
        self._linear = torch.zeros_like(weights) if kind.linear else None
        self.proximal = weights.new_zeros(len(weights))
        self._calibration: tuple[Tensor, ...] = ()
        if kind.calibrated:
            scale = weights.new_ones(len(weights), classes)
            self._calibration = scale, torch.zeros_like(scale)

    def load(self, weights: Tensor, objectives: Sequence[Objective]) -> None:
        """Takes the objectives of the leading jobs, which start from these weights."""
        self.proximal.zero_()
        pulls = torch.tensor([one.proximal for one in objectives], dtype=self.proximal.dtype)
        self.proximal[: len(objectives)].copy_(pulls)
        if self.received is not None:
            self.received.copy_(weights)
        if self._linear is not None:
            self._linear.zero_()
            views = self._layout.views(self._linear)
            for index, objective in enumerate(objectives):
                if objective.linear is not None:
                    alone = {name: one[None] for name, one in objective.linear.items()}
                    for name, tensor in self._network.pack(alone).items():
                        views[name][index].copy_(tensor[0])
        if self._calibration:
            scale, offset = self._calibration
            scale.fill_(1)
            offset.zero_()
            for index, objective in enumerate(objectives):
                if objective.scale is not None:
                    scale[index].copy_(objective.scale)
                if objective.offset is not None:
                    offset[index].copy_(objective.offset)

    def calibration(self, size: int) -> tuple[Tensor, ...]:
        """Factors and offsets of the leading jobs' logits; empty if there are none."""
        return tuple(one[:size] for one in self._calibration)

    def descend(self, flat: Tensor, rate: Tensor, decay: float, fuse: Fuse) -> None:
        """Moves the leading jobs' weights against the gradients of weight decay and the terms."""
        size, rate = len(flat), rate.unsqueeze(1)
        received = None if self.received is None else self.received[:size]
        linear = None if self._linear is None else self._linear[:size]
        if decay or received is not None or linear is not None:
            shrink = rate * decay if decay else None
            pull = rate * self.proximal[:size].unsqueeze(1)
            fuse(descend_by_terms)(flat, rate, shrink, pull, received, linear)

    def add_gradient(self, gradient: Tensor, flat: Tensor) -> None:
        """Adds the gradient of the closed-form terms to that of the leading jobs' loss."""
        size = len(flat)
        if self.received is not None:
            gradient.add_(self.proximal[:size].unsqueeze(1) * (flat - self.received[:size]))
        if self._linear is not None:
            gradient.add_(self._linear[:size])


def descend_by_terms(
    w: Tensor,
    rate: Tensor,
    shrink: Tensor | None,
    pull: Tensor,
    received: Tensor | None,
    linear: Tensor | None,
) -> None:
    """``w −= shrink · w + pull · (w − received) + rate · linear``, in one pass where compiled."""
    shrunk = None if shrink is None else shrink * w
    if received is not None:
        w.lerp_(received, pull)
    if linear is not None:
        w.addcmul_(linear, rate, value=-1)
    if shrunk is not None:
        w.sub_(shrunk)


class StackTerm:
    """The batch term of a stack's jobs, which all have the same strategy.

    The tensors that the term depends on (class counts, memory, broadcast, frozen models) lie
    stacked in buffers whose addresses do not change, so that a captured graph finds them.
    """

    def __init__(self, strategy: Strategy, network: Network) -> None:
        self._strategy, self._network = strategy, network
        self._head: tuple[str, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._frozen: dict[str, dict[str, Tensor]] = {}

    def load(self, locals_: Sequence[Local], states: Sequence[ServerState], capacity: int) -> bool:
        """Takes the tensors of the leading jobs; returns whether new buffers had to be made."""
        self._head = locals_[0].head
        each = [self._tensors_of(local) for local in locals_]
        changed = _load(self._tensors, stack_params(each), capacity)
        for name in self._strategy.needs.frozen:
            pairs = zip(locals_, states, strict=True)
            own = [frozen_weights(name, local, state) for local, state in pairs]
            given = self._network.pack(stack_params(own))
            changed |= _load(self._frozen.setdefault(name, {}), given, capacity)
        return changed

    def bound(self, x: Tensor, live: Tensor) -> TermGradients:
        """The gradients of the term of the leading jobs for a batch ``[J, B, …]``."""
        size = len(x)
        tensors = {name: one[:size] for name, one in self._tensors.items()}
        outputs = {}
        for name, params in self._frozen.items():
            found = self._network.outputs({key: one[:size] for key, one in params.items()}, x, live)
            outputs[name] = found.features, found.logits

        def gradients(
            features: Tensor, logits: Tensor, targets: Tensor, weight: Tensor
        ) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = vmap(grad(self._one, argnums=(0, 1)))(
                features, logits, targets, weight, tensors, outputs
            )
            return found

        return gradients

    def _one(
        self,
        features: Tensor,
        logits: Tensor,
        targets: Tensor,
        weight: Tensor,
        tensors: Tensors,
        outputs: dict[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """One job's term."""
        number, steps, lr = tensors["numbers"].unbind()
        local = Local(
            num_examples=number,
            steps=steps,
            lr=lr,
            class_counts=tensors.get("classes"),
            params=part("params", tensors),
            broadcast=part("broadcast", tensors),
            memory=part("memory", tensors),
            head=self._head,
        )
        frozen = {name: Outputs(*found) for name, found in outputs.items()}
        batch = Batch(features, logits, targets, weight, frozen)
        found = self._strategy.batch_term(local, batch)
        return logits.sum() * 0 if found is None else found

    def _tensors_of(self, local: Local) -> dict[str, Tensor]:
        """A client's tensors, without the models that are there as frozen ones."""
        like = next(iter(local.params.values()))
        numbers = [float(local.num_examples), float(local.steps), float(local.lr)]
        return {
            "numbers": torch.tensor(numbers, dtype=like.dtype, device=like.device),
            **({} if local.class_counts is None else {"classes": local.class_counts}),
            **under("params", local.params),
            **_without_models(self._strategy, local.broadcast, local.memory),
        }


def _without_models(strategy: Strategy, broadcast: Tensors, memory: Tensors) -> Tensors:
    """What a client was sent and keeps, but for frozen models and the parameters of its own."""
    models = tuple(f"{name}/" for name in (PERSONAL, *strategy.needs.frozen))
    tensors = {**under("broadcast", broadcast), **under("memory", memory)}
    return {
        name: one for name, one in tensors.items() if not name.partition("/")[2].startswith(models)
    }


def _load(buffers: dict[str, Tensor], given: Tensors, capacity: int) -> bool:
    """Copies rows into buffers; makes new ones, and says so, if names or shapes have changed."""
    fits = buffers.keys() == given.keys() and all(
        buffers[name].shape[1:] == one.shape[1:] for name, one in given.items()
    )
    if not fits:
        buffers.clear()
        for name, one in given.items():
            buffers[name] = one.new_zeros((capacity, *one.shape[1:]))
    for name, one in given.items():
        buffers[name][: len(one)].copy_(one)
    return not fits
