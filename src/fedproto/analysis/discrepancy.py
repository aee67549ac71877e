"""How far two models' features are apart: MMD.

The squared maximum mean discrepancy (Gretton et al. 2012) of two distributions under the Gaussian
kernel ``k(x, y) = exp(−‖x − y‖² / 2σ²)`` is ``E k(x, x') + E k(y, y') − 2 E k(x, y)``. Everything
here estimates this square without bias, so that a value may fall slightly below zero. σ is the
median distance between the reference's features.

Shapes: N and M feature vectors of D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
"""Rows of a kernel matrix that are held at once."""

MEDIAN_SAMPLES = 2000
"""Vectors from which the median distance is taken; more change it in the third digit."""


def median_bandwidth(y_md: Tensor, max_samples: int = MEDIAN_SAMPLES) -> float:
    """The median heuristic: σ is the median Euclidean distance between different vectors.

    It is 1 where that is 0, or fewer than two vectors are given.
    """
    few = y_md[:max_samples]
    distances = torch.pdist(few.double() if few.device.type == "cpu" else few)
    median = float(distances.median()) if len(distances) else 0.0
    return median if median > 0 else 1.0


def mmd2(x_nd: Tensor, y_md: Tensor, bandwidth: float, *, paired: bool = False) -> float:
    """The unbiased estimate of MMD² in quadratic time, in blocks of bounded memory.

    Takes at least two vectors of each model. With `paired`, row i of both belongs to the same
    sample: the two are then not independent, and the estimate leaves ``k(x_i, y_i)`` out, as it
    leaves out ``k(x_i, x_i)``. It gives exactly 0 for equal features.
    """
    n, m = len(x_nd), len(y_md)
    # Around the reference's mean, where products lose the fewest digits.
    centre = y_md.mean(dim=0)
    x, y = (x_nd - centre) / bandwidth, (y_md - centre) / bandwidth
    within = (_sum(x, x) - n) / (n * (n - 1)) + (_sum(y, y) - m) / (m * (m - 1))
    across = _sum(x, y)
    if not paired:
        return within - 2 * across / (n * m)
    same = float(torch.exp(-(x - y).square().sum(dim=1) / 2).double().sum())
    return within - 2 * (across - same) / (n * (n - 1))


def _sum(x: Tensor, y: Tensor) -> float:
    """``Σ_ij k(x_i, y_j)``; one matrix product gives ``−‖x − y‖² / 2`` of a block's pairs."""
    of_x, of_y = (part.square().sum(dim=1, keepdim=True) / -2 for part in (x, y))
    left = torch.cat([x, of_x, torch.ones_like(of_x)], dim=1)
    right = torch.cat([y, torch.ones_like(of_y), of_y], dim=1).T.contiguous()
    return sum(float((rows @ right).exp_().sum()) for rows in left.split(BLOCK))
