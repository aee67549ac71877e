"""Entropy of predictions and of features.

``H_S = H(M(W; X))`` is the pixel-wise Shannon entropy of the softmax: low where the model is
confident. ``H_E = H(Ê(W; X))`` is that of the features, normalised to sum to 1 over the channels:
high where many channels respond. Both are in nats; the channels are dimension 1.

Shapes: B samples, C classes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses


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
