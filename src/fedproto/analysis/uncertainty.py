"""Calibration and entropy of predictions, and entropy of features.

Calibration asks whether predictions of 80 % confidence are right in 80 % of the cases. They are put
into bins by confidence, the largest softmax probability (Guo et al. 2017). Sums per bin add up over
batches, clients and pixels, so that maps of any size take no memory.

``H_S = H(M(W; X))`` is the pixel-wise Shannon entropy of the softmax: low where the model is
confident. ``H_E = H(Ê(W; X))`` is that of the features, normalised to sum to 1 over the channels:
high where many channels respond. Both are in nats; the channels are dimension 1.

Shapes: B samples, C classes, S bins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

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
    """Sums per bin of equal width: predictions, correct ones and confidences, ``[3, S]``."""
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


def shannon_entropy(probabilities: Tensor, dim: int = 1) -> Tensor:
    """``H(p) = −Σ p log p`` along a dimension, with ``0 log 0 = 0``."""
    summed: Tensor = torch.special.xlogy(probabilities, probabilities).sum(dim=dim)
    return -summed


def softmax_entropy(scores: Tensor) -> Tensor:
    """``H_S``: scores ``[B, C, …]`` before the softmax to entropies ``[B, …]``, at most log C."""
    return shannon_entropy(torch.softmax(scores, dim=1))


def feature_entropy(features: Tensor) -> Tensor:
    """``H_E``: features ``[B, D, …]`` to entropies ``[B, …]``, at most log D.

    The paper's features come out of a ReLU. Of others the negative part is taken for zero; where no
    channel responds at all the entropy is 0.
    """
    positive = features.clamp(min=0)
    total = positive.sum(dim=1, keepdim=True)
    return shannon_entropy(torch.where(total > 0, positive / total, 0))


def upsampled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps ``[B, h, w]`` brought to the size of their images, ``[B, H, W]``."""
    return F.interpolate(maps.unsqueeze(1), size, mode="bilinear", align_corners=False).squeeze(1)


def relative(entropy: Tensor, channels: int) -> NDArray[np.float64]:
    """Entropies as shares of the largest possible one."""
    return np.asarray(entropy.double().cpu().numpy() / np.log(max(channels, 2)))
