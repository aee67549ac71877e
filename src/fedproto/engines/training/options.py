"""Local training: how many epochs in which batches, by which optimizer, at which rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import nn

from fedproto.engines.training.batch_norm import BatchNormPolicy, statistics_names
from fedproto.errors import ConfigError
from fedproto.options import Options, option
from fedproto.types import Tensors

RHO = 0.05


@dataclass(frozen=True)
class TrainOptions(Options):
    """What a client does with a received model. Optimizers are made anew for every job."""

    epochs: int = option(20, "local epochs F", at_least=1)
    batch_size: int = option(10, "samples per step", at_least=1)
    optimizer: Literal["sgd", "adam", "sam"] = option(
        "sgd", "optimizer of local training; 'sam' is sgd with sharpness-aware gradients"
    )
    lr: float = option(0.01, "learning rate at the start", above=0)
    lr_schedule: Literal["constant", "polynomial", "exponential", "cosine"] = option(
        "constant", "learning rate over the rounds; 'cosine': lr·(1 + cos(π·round/rounds))/2"
    )
    lr_power: float = option(0.9, "for 'polynomial': lr·(1 − round/rounds)^power", above=0)
    lr_decay: float = option(0.998, "for 'exponential': lr·decay^round", above=0, at_most=1)
    momentum: float = option(0.0, "momentum of sgd and sam", at_least=0, at_most=1)
    weight_decay: float = option(0.0, "weight decay (L2)", at_least=0)
    rho: float = option(RHO, "sam: distance at which the gradient is taken", above=0)
    clip_norm: float | None = option(
        None, "clip the gradient of each step to this L2 norm", above=0
    )
    centralize: bool = option(
        False, "subtract from a weight's gradient its mean over each output (filter or row)"
    )
    accumulate: int = option(
        1, "compute a step's gradient in so many parts, to save memory", at_least=1
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
    def follows_gradient(self) -> bool:
        """Whether the optimizer is given the gradient at the weights, and as it is."""
        return self.optimizer != "sam" and self.clip_norm is None and not self.centralize

    @property
    def plain(self) -> bool:
        """Whether the rule is ``w −= lr · g`` and nothing else."""
        sgd = self.optimizer == "sgd" and not self.momentum and not self.weight_decay
        return sgd and self.follows_gradient

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

    def optimizer_for(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer of one job."""
        if self.optimizer == "adam":
            fused = all(parameter.is_cuda for parameter in model.parameters())
            return torch.optim.Adam(
                model.parameters(), lr=lr, weight_decay=self.weight_decay, fused=fused
            )
        return torch.optim.SGD(
            model.parameters(), lr=lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
