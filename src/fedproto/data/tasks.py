"""Tasks: the loss, the classes of features, and the scores of a model.

A model's scores are computed from a tally, a vector of sums over samples: adding the tallies of
batches, clients or machines gives that of all of them.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import ConfigError, unknown_name
from fedproto.types import VOID

LARGEST_LOSS = 1e6
"""Largest plausible mean test loss: worse models are rejected as updates."""


@dataclass(frozen=True)
class Task(abc.ABC):
    """A task: its loss, and the scores of a model.

    Attributes:
        headline: The score by which models are compared first.
        label_maps: Whether targets are maps with a label per pixel, class 0 the background.
        one_label: Whether a sample has one label and the loss is its plain cross-entropy, which
            faster paths compute by themselves.
    """

    headline: ClassVar[str]
    label_maps: ClassVar[bool] = False
    one_label: ClassVar[bool] = False

    class_names: tuple[str, ...] = ()

    @abc.abstractmethod
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over a batch."""

    def loss_and_slope(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient in the logits."""
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = self.loss(logits, targets)
            (slope,) = torch.autograd.grad(loss, logits)
        return loss.detach(), slope

    @abc.abstractmethod
    def loss_terms(self, targets: Tensor) -> Tensor:
        """The number of terms that `loss` averages, on the targets' device."""

    @abc.abstractmethod
    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Feature vectors ``[N, D]`` and their labels ``[N]``."""

    @abc.abstractmethod
    def tally(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sums over a batch from which `metrics` are computed, in float64."""

    @abc.abstractmethod
    def metrics(self, tally: Tensor) -> dict[str, float]:
        """The scores from the summed tallies of all batches."""

    def feature_shape(self, features: Tensor) -> tuple[int, int]:
        """Channels of a feature vector, and vectors per sample, of a batch ``[B, D, ...]``."""
        return features.shape[1], features[0, 0].numel()

    def labels_per_sample(self, input_shape: tuple[int, ...]) -> int:
        """The number of labels of a sample of such a shape."""
        return 1

    @abc.abstractmethod
    def tally_counts(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, int]:
        """The number of counts before the summed loss, and what one sample adds to them."""

    def reason_to_refuse_tally(
        self, tally: Tensor, num_examples: int, num_classes: int, input_shape: tuple[int, ...]
    ) -> str | None:
        """Why a client's tally is impossible for `num_examples` samples; None if it is not."""
        length, each = self.tally_counts(num_classes, input_shape)
        if tally.shape != (length + 1,):
            return f"its test sums have shape {tuple(tally.shape)}, not ({length + 1},)"
        if not bool((torch.isfinite(tally) & (tally >= 0)).all()):
            return "its test sums are not finite, non-negative numbers"
        counts, loss = tally[:-1], float(tally[-1])
        if bool((counts != counts.round()).any()) or float(counts.sum()) > num_examples * each:
            return f"its test counts are not those of {num_examples} samples"
        if loss > LARGEST_LOSS * num_examples * each:
            return f"its test loss of {loss:g} is implausibly large"
        return None


aten = torch.ops.aten
MEAN, NO_CLASS = 1, -100
"""PyTorch's codes for the mean, and for the ignored label."""


@dataclass(frozen=True)
class Classification(Task):
    """One label per sample."""

    headline = "accuracy"
    one_label = True

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(logits, targets)

    def loss_and_slope(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As automatic differentiation gives them, to the last bit, without its own cost."""
        log_p = torch.log_softmax(logits, dim=1)
        loss, terms = aten.nll_loss_forward(log_p, targets, None, MEAN, NO_CLASS)
        slope = aten.nll_loss_backward(
            torch.ones_like(loss), log_p, targets, None, MEAN, NO_CLASS, terms
        )
        return loss, aten._log_softmax_backward_data(slope, log_p, 1, logits.dtype)

    def loss_terms(self, targets: Tensor) -> Tensor:
        """The samples."""
        return torch.tensor(len(targets), device=targets.device)

    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One feature vector per sample."""
        return features.flatten(1), targets

    def tally(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Samples, correct ones and summed loss."""
        samples = torch.tensor(len(targets), dtype=torch.float64, device=logits.device)
        correct = (logits.argmax(dim=1) == targets).sum().double()
        loss = F.cross_entropy(logits.double(), targets, reduction="sum")
        return torch.stack([samples, correct, loss])

    def metrics(self, tally: Tensor) -> dict[str, float]:
        """Accuracy and mean loss."""
        samples, correct, loss = tally.tolist()
        return {"accuracy": correct / samples, "loss": loss / samples}

    def feature_shape(self, features: Tensor) -> tuple[int, int]:
        """One vector per sample, whatever the shape of the features."""
        return features.flatten(1).shape[1], 1

    def tally_counts(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, int]:
        """Samples and correct ones."""
        return 2, 2

    def reason_to_refuse_tally(
        self, tally: Tensor, num_examples: int, num_classes: int, input_shape: tuple[int, ...]
    ) -> str | None:
        """Also checks the number of samples and of correct ones."""
        if tally.shape == (3,):
            samples, correct, _ = tally.tolist()
            if samples != num_examples or correct > samples:
                return f"it claims {correct:g} of {samples:g} test samples; it has {num_examples}"
        return super().reason_to_refuse_tally(tally, num_examples, num_classes, input_shape)


BACKGROUND = 0


@dataclass(frozen=True)
class Segmentation(Task):
    """A label per pixel; void pixels are ignored.

    The logits have the size of the label maps, ``[B, C, H, W]`` and ``[B, H, W]``.
    """

    headline = "miou"
    label_maps = True

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, the mean over the pixels that are not void; 0 where all of them are."""
        return _summed_loss(logits, targets) / self.loss_terms(targets).clamp(min=1)

    def loss_terms(self, targets: Tensor) -> Tensor:
        """The pixels that are not void."""
        return (targets != VOID).sum()

    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A feature vector per position of the feature map, with the label of the nearest pixel.

        Positions on void or the background belong to no class.
        """
        size = features.shape[-2:]
        near = F.interpolate(targets.unsqueeze(1).float(), size, mode="nearest-exact")
        labels = near.flatten().long()
        vectors = features.movedim(1, -1).flatten(end_dim=-2)
        counted = (labels != VOID) & (labels != BACKGROUND)
        return vectors[counted], labels[counted]

    def tally(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The confusion matrix (rows: true classes, columns: predicted), and the summed loss."""
        loss = _summed_loss(logits.float(), targets).double()
        return torch.cat([confusion(logits, targets).flatten().double(), loss.unsqueeze(0)])

    def tally_counts(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, int]:
        """The confusion matrix; every pixel that is not void is in it once."""
        return num_classes**2, self.labels_per_sample(input_shape)

    def labels_per_sample(self, input_shape: tuple[int, ...]) -> int:
        """One per pixel."""
        return math.prod(input_shape[1:])

    def metrics(self, tally: Tensor) -> dict[str, float]:
        """IoU per class and on average, pixel accuracy and mean loss.

        A class that is neither in the label maps nor predicted has no IoU and enters no mean.
        """
        confusion, loss = tally[:-1].double(), float(tally[-1])
        num_classes = math.isqrt(len(confusion))
        confusion = confusion.reshape(num_classes, num_classes)
        correct = confusion.diagonal()
        union = confusion.sum(dim=0) + confusion.sum(dim=1) - correct
        present = [label for label in range(num_classes) if union[label] > 0]
        iou = {label: float(correct[label] / union[label]) for label in present}
        objects = [value for label, value in iou.items() if label != BACKGROUND]
        pixels = float(confusion.sum())
        metrics = {f"iou_{self._name(label)}": value for label, value in iou.items()}
        if objects:
            metrics["miou"] = sum(objects) / len(objects)
        if iou:
            metrics["miou_with_background"] = sum(iou.values()) / len(iou)
            metrics["pixel_accuracy"] = float(correct.sum()) / pixels
            metrics["loss"] = loss / pixels
        return metrics

    def _name(self, label: int) -> str:
        return self.class_names[label] if label < len(self.class_names) else str(label)


def confusion(logits: Tensor, targets: Tensor) -> Tensor:
    """Labels by true class (rows) and predicted class (columns), ``[C, C]``; void is left out."""
    classes = logits.shape[1]
    pair = targets * classes + logits.argmax(dim=1)
    pair = torch.where((targets >= 0) & (targets < classes), pair, classes**2)
    counts = torch.bincount(pair.flatten(), minlength=classes**2 + 1)[:-1]
    return counts.reshape(classes, classes)


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, ignore_index=VOID, reduction="sum")


TASKS: dict[str, type[Task]] = {"classification": Classification, "segmentation": Segmentation}


def lower_is_better(metric: str) -> bool:
    """Whether small values of a metric are good: those of losses and errors, not of scores."""
    return metric.endswith(("loss", "ece", "mmd", "dissimilarity")) or metric.startswith("at_zero")


def is_share(metric: str) -> bool:
    """Whether a metric lies between 0 and 1, and is shown in per cent."""
    return metric.endswith("accuracy") or "iou" in metric


def headline(metrics: Iterable[str]) -> str:
    """The score by which models are compared first, among the names of those that were taken.

    That of the task; on the validation part where nothing else was tested.
    """
    taken = set(metrics)
    names = [prefix + task.headline for prefix in ("", "validation_") for task in TASKS.values()]
    return next((name for name in names if name in taken), names[0])


def loss_beside(metric: str) -> str:
    """The loss on the samples that a score was taken on."""
    return "validation_loss" if metric.startswith("validation_") else "loss"


def task_named(name: str, class_names: Iterable[str] = ()) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    return TASKS[name](tuple(class_names))
