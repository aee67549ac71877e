"""What a task is: the loss, which features belong to which class, and the scores of a model.

A model's scores are computed from a tally, a vector of sums over samples: adding the tallies of
batches, clients or machines gives that of all of them.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from fedproto.options import Options, option

LARGEST_LOSS = 1e6
"""A mean test loss beyond this is not believed: models that bad are refused as updates."""


@dataclass(frozen=True)
class TaskOptions(Options):
    """What is asked of a task beyond its data."""

    background_prototype: bool = option(
        False, "segmentation: the background has a prototype like the object classes"
    )


@dataclass(frozen=True)
class Task(abc.ABC):
    """What is learned.

    Attributes:
        headline: The score by which models are compared first.
        label_maps: Whether targets are maps with a label per pixel, class 0 the background.
        class_score: What a class is scored by.
        one_label: Whether a sample has one label and the loss is its plain cross-entropy, which
            faster paths compute by themselves.
    """

    headline: ClassVar[str]
    label_maps: ClassVar[bool] = False
    class_score: ClassVar[str] = "accuracy"
    one_label: ClassVar[bool] = False

    class_names: tuple[str, ...] = ()
    options: TaskOptions = field(default_factory=TaskOptions)

    @abc.abstractmethod
    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over a batch."""

    @abc.abstractmethod
    def loss_terms(self, targets: Tensor) -> Tensor:
        """Over how many terms `loss` is the mean, as a number on the targets' device."""

    @abc.abstractmethod
    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Feature vectors ``[N, D]`` and their labels ``[N]``."""

    @abc.abstractmethod
    def tally(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Sums over a batch from which `metrics` are computed, in float64."""

    @abc.abstractmethod
    def metrics(self, tally: Tensor) -> dict[str, float]:
        """The scores from the summed tallies of all batches."""

    def feature_shape(self, features: Tensor) -> tuple[int, int]:
        """Channels of a feature vector, and vectors per sample, of a batch ``[B, D, ...]``."""
        return features.shape[1], features[0, 0].numel()

    def labels_per_sample(self, input_shape: tuple[int, ...]) -> int:
        """How many labels a sample of such a shape has."""
        del input_shape
        return 1

    @abc.abstractmethod
    def tally_counts(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, int]:
        """How many counts a tally has before the summed loss, and what one sample adds to them."""

    def reason_to_refuse_tally(
        self, tally: Tensor, num_examples: int, num_classes: int, input_shape: tuple[int, ...]
    ) -> str | None:
        """Why a tally that a client sent cannot be one of so many samples; None when it can."""
        length, each = self.tally_counts(num_classes, input_shape)
        if tally.shape != (length + 1,):
            return f"its test sums have shape {tuple(tally.shape)}, not ({length + 1},)"
        if not bool((torch.isfinite(tally) & (tally >= 0)).all()):
            return "its test sums are not finite, non-negative numbers"
        counts, loss = tally[:-1], float(tally[-1])
        if bool((counts != counts.round()).any()) or float(counts.sum()) > num_examples * each:
            return f"its test counts are not those of {num_examples} samples"
        if loss > LARGEST_LOSS * num_examples * each:
            return f"its test loss of {loss:g} is beyond belief"
        return None
