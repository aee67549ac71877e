"""Local training: its options, the step that a batch makes, and a strategy's batch term.

A step, with F the local objective (the batch's loss and every term that a strategy adds to it):

1. ``g = ∇F(w)``. With SAM (Foret et al. 2021) ``g = ∇F(w + ρ ∇F(w) / ‖∇F(w)‖)``: the gradient that
   is normalised is that of the whole objective, over all trainable parameters together, and the
   proximal, the linear and every other term are evaluated at the perturbed weights too. Both
   passes see the same batch and the same dropout masks; batch-norm statistics and other buffers
   follow the first pass only. The reported loss is that at w.
2. Centralisation (Yong et al. 2020): of every tensor with more than one dimension, the mean over
   each output (filter or row) is subtracted. The perturbation of SAM is not centralised.
3. Clipping: ``g ← g · min(1, c / ‖g‖)``, with the L2 norm over all trainable parameters.
4. The optimizer adds weight decay, at w, and momentum; so neither centralisation nor clipping sees
   them.

The frozen models of a batch term run in evaluation mode and without gradients. The model "received"
is the one the job started from; any other name is a group of the client's memory or of the
broadcast that holds a model. Tensors that the group lacks are those of the received model: all of
them until there is such a group, and the buffers where it holds parameters alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedproto.engines.layers import BatchNormPolicy, statistics_names
from fedproto.errors import ConfigError
from fedproto.models.base import features_of
from fedproto.options import Options, option
from fedproto.strategies.base import Strategy
from fedproto.strategies.values import Batch, Local, Outputs
from fedproto.types import ServerState, Tensors, part

RHO = 0.05


@dataclass(frozen=True)
class TrainOptions(Options):
    """Local training on a client. Every job starts with a new optimizer state."""

    epochs: int = option(20, "local epochs F", at_least=1)
    batch_size: int = option(10, "samples per step", at_least=1)
    optimizer: Literal["sgd", "adam", "sam"] = option(
        "sgd", "optimizer of local training; 'sam' is sgd with sharpness-aware gradients"
    )
    lr: float = option(0.01, "initial learning rate", above=0)
    lr_schedule: Literal["constant", "polynomial", "exponential", "cosine"] = option(
        "constant", "learning rate over the rounds; 'cosine': lr·(1 + cos(π·round/rounds))/2"
    )
    lr_power: float = option(0.9, "for 'polynomial': lr·(1 − round/rounds)^power", above=0)
    lr_decay: float = option(0.998, "for 'exponential': lr·decay^round", above=0, at_most=1)
    momentum: float = option(0.0, "momentum of sgd and sam", at_least=0, at_most=1)
    weight_decay: float = option(0.0, "weight decay (L2)", at_least=0)
    rho: float = option(RHO, "sam: radius ρ of the perturbation", above=0)
    clip_norm: float | None = option(
        None, "clip the gradient of each step to this L2 norm", above=0
    )
    centralize: bool = option(
        False, "subtract from a weight's gradient its mean over each output (filter or row)"
    )
    batch_norm: BatchNormPolicy = option(
        "average", "batch-norm statistics: averaged like weights, never changed, or never sent"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho != RHO and self.optimizer != "sam":
            raise ConfigError(f"rho is for optimizer = 'sam' only, not for '{self.optimizer}'")

    @cached_property
    def kind(self) -> TrainOptions:
        """What jobs have in common whose steps differ in their rate and number alone."""
        return replace(self, lr=1.0, epochs=1, lr_schedule="constant", lr_power=1.0, lr_decay=1.0)

    @property
    def plain(self) -> bool:
        """Whether the rule is ``w −= lr · g`` and nothing else."""
        sgd = self.optimizer == "sgd" and not self.momentum and not self.weight_decay
        return sgd and self.clip_norm is None and not self.centralize

    @property
    def memoryless(self) -> bool:
        """Whether a step is a multiple of its own gradient alone, whatever came before.

        Such steps add up: weights move by ``−lr`` times the sum of the gradients that were
        followed, be they perturbed, centralised or clipped.
        """
        return self.optimizer != "adam" and not self.momentum

    @property
    def rate_needs_rounds(self) -> bool:
        """Whether the learning rate depends on how many rounds there will be."""
        return self.lr_schedule in ("polynomial", "cosine")

    def lr_at(self, round_: int, rounds: int) -> float:
        """The learning rate of a round, the first of which is 0; constant within it."""
        if self.lr_schedule == "constant":
            return self.lr
        if self.lr_schedule == "exponential":
            return self.lr * self.lr_decay**round_
        if self.lr_schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * round_ / rounds)) / 2
        return float(self.lr * (1 - round_ / rounds) ** self.lr_power)

    def shared_buffers(self, model: nn.Module, buffers: Tensors) -> Tensors:
        """Those of a model's buffers that are sent: all, but for statistics that stay local."""
        if self.batch_norm != "local":
            return buffers
        kept = statistics_names(model)
        return {name: tensor for name, tensor in buffers.items() if name not in kept}

    def optimizer_for(self, model: nn.Module, lr: float | Tensor) -> torch.optim.Optimizer:
        """The optimizer of one job; for a CUDA graph if its rate lies on the device."""
        params, captured = list(model.parameters()), isinstance(lr, Tensor)
        if self.optimizer == "adam":
            fused = all(parameter.is_cuda for parameter in params)
            return torch.optim.Adam(
                params, lr=lr, weight_decay=self.weight_decay, fused=fused, capturable=captured
            )
        return torch.optim.SGD(
            params,
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            fused=captured or None,
        )


TINY = 1e-12
"""Added to the norm that a perturbation is divided by: without a gradient there is none."""


def take_step(
    model: nn.Module,
    train: TrainOptions,
    optimizer: torch.optim.Optimizer,
    compute_gradient: Callable[[], Tensor],
) -> Tensor:
    """Makes one local step.

    Args:
        model: Whose weights are updated.
        train: What is done to the gradient.
        optimizer: Of the model's parameters.
        compute_gradient: Leaves the gradient of the local objective at the model's present weights
            in the parameters, in place of any before, and returns the loss.

    Returns:
        The loss before the step.
    """
    loss = compute_gradient()
    params = [one for one in model.parameters() if one.grad is not None]
    if train.optimizer == "sam":
        _compute_perturbed(model, params, train.rho, compute_gradient)
    if train.centralize:
        for one in params:
            assert one.grad is not None  # noqa: S101 - those without one are left out
            centralize(one.grad)
    if train.clip_norm is not None:
        nn.utils.clip_grad_norm_(params, train.clip_norm)
    optimizer.step()
    return loss


@torch.no_grad()
def centralize(gradient: Tensor, start: int = 1) -> None:
    """Subtracts the mean over the dimensions from `start` on; nothing where there are none."""
    if gradient.dim() > start:
        gradient.sub_(gradient.mean(dim=tuple(range(start, gradient.dim())), keepdim=True))


def _compute_perturbed(
    model: nn.Module, params: Sequence[Tensor], rho: float, compute_gradient: Callable[[], Tensor]
) -> None:
    """Replaces the gradient by that at ``w + ρ g / ‖g‖``; weights and buffers stay as they were."""
    changed = [*params, *model.buffers()]
    with torch.no_grad():
        before = [one.clone() for one in changed]
        gradients = [one.grad for one in params if one.grad is not None]
        norm = torch.stack([torch.linalg.vector_norm(one) for one in gradients]).norm()
        for one, gradient in zip(params, gradients, strict=True):
            one.add_(gradient * (rho / (norm + TINY)))
    compute_gradient()
    with torch.no_grad():
        for one, value in zip(changed, before, strict=True):
            one.copy_(value)


RECEIVED = "received"


def outputs_of(model: nn.Module, x: Tensor) -> Outputs:
    """Features and logits of a batch in one pass, of a model with a head."""
    features, head = features_of(model)(x), cast("Callable[[Tensor], Tensor]", model.head)
    return Outputs(features.flatten(1), head(features))


def frozen_weights(name: str, local: Local, received: ServerState) -> Tensors:
    """The tensors of a frozen model, by name."""
    kept = {} if name == RECEIVED else part(name, local.memory) or part(name, local.broadcast)
    return {**received.params, **received.buffers, **kept}


class BatchTerm:
    """The batch term of one job after another, with room for the frozen models."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, nn.Module] = {}

    def begin_job(self, strategy: Strategy, local: Local, received: ServerState) -> None:
        """Loads the frozen models of a job."""
        self._strategy, self._local = strategy, local
        for name in strategy.needs.frozen:
            if name not in self._copies:
                copied = copy.deepcopy(self._model)
                self._copies[name] = copied.requires_grad_(False).eval()
            tensors = frozen_weights(name, local, received)
            self._copies[name].load_state_dict(dict(tensors), strict=False)

    def __call__(self, x: Tensor, outputs: Outputs, targets: Tensor) -> Tensor | None:
        """The term of a batch, under the model in training."""
        with torch.no_grad():
            names = self._strategy.needs.frozen
            frozen = {name: outputs_of(self._copies[name], x) for name in names}
        weight = outputs.logits.new_full((len(x),), 1 / len(x))
        batch = Batch(outputs.features, outputs.logits, targets, weight, frozen)
        return self._strategy.batch_term(self._local, batch)
