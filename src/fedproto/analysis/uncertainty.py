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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.types import VOID

BINS = 15
RELIABILITY = ("bin count", "bin accuracy", "bin confidence")
"""The tables of a reliability diagram."""


def tally_confidence(logits: Tensor, targets: Tensor, bins: int = BINS) -> Tensor:
    """Sums per bin of equal width: predictions, correct ones and confidences, ``[3, S]``."""
    confidence, predicted = torch.softmax(logits.double(), dim=1).max(dim=1)
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


def reliability(tally: Tensor) -> dict[str, dict[str, float]]:
    """A reliability diagram: the count, accuracy and confidence of each bin that is not empty.

    Bins go by their upper end.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in RELIABILITY}
    for bin_, (count, correct, confidence) in enumerate(tally.T.tolist(), start=1):
        if count:
            values = count, correct / count, confidence / count
            for name, value in zip(RELIABILITY, values, strict=True):
                found[name][f"{bin_ / tally.shape[1]:.4g}"] = value
    return found


def shannon_entropy(probabilities: Tensor, dim: int = 1) -> Tensor:
    """``H(p) = −Σ p log p`` along a dimension, with ``0 log 0 = 0``."""
    summed: Tensor = torch.special.xlogy(probabilities, probabilities).sum(dim=dim)
    return -summed


def softmax_entropy(logits: Tensor) -> Tensor:
    """``H_S``: logits ``[B, C, …]`` to entropies ``[B, …]``, at most log C."""
    return shannon_entropy(torch.softmax(logits, dim=1))


def feature_entropy(features: Tensor) -> Tensor:
    """``H_E``: features ``[B, D, …]`` to entropies ``[B, …]``, at most log D.

    The paper's features come out of a ReLU. Of others the negative part is taken for zero; where no
    channel responds at all the entropy is 0.
    """
    positive = features.clamp(min=0)
    total = positive.sum(dim=1, keepdim=True)
    return shannon_entropy(torch.where(total > 0, positive / total, 0))


def upsampled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps ``[B, h, w]`` resized to their images, ``[B, H, W]``."""
    return F.interpolate(maps.unsqueeze(1), size, mode="bilinear", align_corners=False).squeeze(1)


def relative(entropy: Tensor, channels: int) -> NDArray[np.float64]:
    """Entropies as shares of the largest possible one."""
    return np.asarray(entropy.double().cpu().numpy() / np.log(max(channels, 2)))
