"""Calibration: is a model that is 80 % sure right in 80 % of the cases?

Predictions are sorted into bins by their confidence, the largest probability of the softmax (Guo et
al. 2017). Sums per bin add up over batches, clients and pixels, so that maps of any number of
pixels take no memory.

Shapes: B samples, C classes, S bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedproto.types import VOID

BINS = 15


@dataclass(frozen=True)
class Bin:
    """Predictions of about the same confidence, in ``(low, high]``.

    Attributes:
        confidence: Mean confidence; the middle of the bin when it is empty.
        accuracy: Share of correct predictions; 0 when it is empty.
    """

    low: float
    high: float
    confidence: float
    accuracy: float
    count: int


def tally_confidence(scores: Tensor, targets: Tensor, bins: int = BINS) -> Tensor:
    """Sums per bin: predictions, correct ones and confidences.

    Args:
        scores: Before the softmax, ``[B, C, ...]``.
        targets: Labels ``[B]``, or label maps ``[B, ...]`` in which void counts nowhere.
        bins: How many bins of equal width.

    Returns:
        ``[3, S]`` in float64; to be added up over batches.
    """
    confidence, predicted = torch.softmax(scores.double(), dim=1).max(dim=1)
    correct = (predicted == targets).double()
    if targets.ndim > 1:
        counted = targets != VOID
        confidence, correct = confidence[counted], correct[counted]
    bin_ = (torch.ceil(confidence * bins).long() - 1).clamp(0, bins - 1)
    # Sums with a fixed order, bin by bin: scattered ones would differ in the last digit on a GPU.
    columns = []
    for number in range(bins):
        inside = bin_ == number
        columns.append(
            torch.stack(
                [
                    inside.sum().double(),
                    torch.where(inside, correct, 0).sum(),
                    torch.where(inside, confidence, 0).sum(),
                ]
            )
        )
    return torch.stack(columns, dim=1)


def calibration_error(tally: Tensor) -> float:
    """Expected calibration error: ``Σ_s n_s/n |accuracy_s − confidence_s|``; 0 for no samples."""
    count, correct, confidence = tally.double().cpu()
    return float((correct - confidence).abs().sum() / count.sum().clamp(min=1))


def reliability(tally: Tensor) -> list[Bin]:
    """The bins of a reliability diagram."""
    number = tally.shape[1]
    bins = []
    for bin_, (count, correct, confidence) in enumerate(tally.T.tolist()):
        low, high = bin_ / number, (bin_ + 1) / number
        bins.append(
            Bin(
                low=low,
                high=high,
                confidence=confidence / count if count else (low + high) / 2,
                accuracy=correct / count if count else 0.0,
                count=int(count),
            )
        )
    return bins
