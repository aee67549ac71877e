"""Semantic segmentation: a label per pixel, class 0 the background, 255 void.

Shapes: B images, C classes with the background, D feature channels, H×W pixels, h×w the size of the
encoder's feature map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.tasks.base import Task
from fedproto.types import VOID

BACKGROUND = 0


@dataclass(frozen=True)
class Segmentation(Task):
    """A label per pixel; void pixels count nowhere.

    The scores of a model have the size of the label maps, ``[B, C, H, W]`` and ``[B, H, W]``.
    """

    headline = "miou"
    label_maps = True
    class_score = "iou"

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy, the mean over the pixels that are not void; 0 where all of them are."""
        return _summed_loss(scores, targets) / self.loss_terms(targets).clamp(min=1)

    def loss_terms(self, targets: Tensor) -> Tensor:
        """The pixels that are not void."""
        return (targets != VOID).sum()

    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """A feature vector per position of the feature map, with the label of the nearest pixel.

        Positions on void belong to no class, and neither do those on the background unless the
        option says so.
        """
        size = features.shape[-2:]
        near = F.interpolate(targets.unsqueeze(1).float(), size, mode="nearest-exact")
        labels = near.flatten().long()
        if not self.options.background_prototype:
            labels = labels.masked_fill(labels == BACKGROUND, VOID)
        vectors = features.movedim(1, -1).flatten(end_dim=-2)
        counted = labels != VOID
        return vectors[counted], labels[counted]

    def tally(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The confusion matrix (rows: true classes, columns: predicted), and the summed loss."""
        num_classes = scores.shape[1]
        pair = targets * num_classes + scores.argmax(dim=1)
        pair = torch.where(targets == VOID, num_classes**2, pair)
        counts = torch.bincount(pair.flatten(), minlength=num_classes**2 + 1)[:-1]
        loss = _summed_loss(scores.float(), targets).double()
        return torch.cat([counts.double(), loss.unsqueeze(0)])

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


def _summed_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets, ignore_index=VOID, reduction="sum")
