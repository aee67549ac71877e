"""How far two models' features are apart: MMD and the paper's FFD.

The squared maximum mean discrepancy (Gretton et al. 2012) of two distributions under the Gaussian
kernel ``k(x, y) = exp(−‖x − y‖² / 2σ²)`` is ``E k(x, x') + E k(y, y') − 2 E k(x, y)``. Everything
here estimates this square without bias, so that a value may fall slightly below zero. σ is the
median distance between the reference's features.

Shapes: N and M feature vectors of D channels, K groups (clients).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.errors import ConfigError

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

    With `paired`, row i of both belongs to the same sample: the two are then not independent, and
    the estimate leaves ``k(x_i, y_i)`` out, as it leaves out ``k(x_i, x_i)``. It gives exactly 0
    for equal features.
    """
    _check(x_nd, y_md, paired)
    n, m = len(x_nd), len(y_md)
    x, y = _scaled(x_nd, y_md, bandwidth)
    within = _symmetric_sum(x) / (n * (n - 1)) + _symmetric_sum(y) / (m * (m - 1))
    across = _sum(x, y)
    if not paired:
        return within - 2 * across / (n * m)
    same = float(torch.exp(-(x - y).square().sum(dim=1) / 2).double().sum())
    return within - 2 * (across - same) / (n * (n - 1))


def grouped_mmd2(x_nd: Tensor, y_nd: Tensor, sizes: Sequence[int], bandwidth: float) -> Tensor:
    """`mmd2` of paired features of several groups, ``[K]``; NaN for fewer than two."""
    _check(x_nd, y_nd, paired=True, least=0)
    if sum(sizes) != len(x_nd):
        raise ConfigError(f"groups of {sum(sizes)} rows do not fit {len(x_nd)} features")
    pairs = zip(x_nd.split(list(sizes)), y_nd.split(list(sizes)), strict=True)
    found = [mmd2(x, y, bandwidth, paired=True) if len(x) > 1 else math.nan for x, y in pairs]
    return torch.tensor(found, dtype=torch.float64)


def feature_discrepancy(mmd2_a: float, mmd2_b: float) -> float:
    """``FFD(A, B) = (MMD_B − MMD_A) / MMD_B × 100``: how much nearer A is than the baseline B.

    MMD² are taken after the last round; an estimate of A below 0 is as near as can be told, and
    counts as 0.
    """
    if not mmd2_b > 0:
        raise ConfigError(f"FFD needs a baseline whose MMD² is above 0, not {mmd2_b:g}")
    return (1 - math.sqrt(max(mmd2_a, 0.0) / mmd2_b)) * 100


def _check(x_nd: Tensor, y_md: Tensor, paired: bool, least: int = 2) -> None:
    if x_nd.ndim != 2 or y_md.ndim != 2 or x_nd.shape[1] != y_md.shape[1]:
        raise ConfigError(
            f"features of shapes {tuple(x_nd.shape)} and {tuple(y_md.shape)} cannot be compared:"
            " both must be vectors of as many channels"
        )
    if min(len(x_nd), len(y_md)) < least:
        raise ConfigError("MMD needs at least two feature vectors of each model")
    if paired and len(x_nd) != len(y_md):
        raise ConfigError(f"{len(x_nd)} and {len(y_md)} features cannot be paired")


def _scaled(x_nd: Tensor, y_md: Tensor, bandwidth: float) -> tuple[Tensor, Tensor]:
    """In units of σ and around the reference's mean, where products lose the fewest digits."""
    centre = y_md.mean(dim=0) if len(y_md) else y_md.new_zeros(y_md.shape[1])
    return (x_nd - centre) / bandwidth, (y_md - centre) / bandwidth


def _left(x: Tensor) -> Tensor:
    """With `_right`, one matrix product gives ``−‖x − y‖² / 2`` of all pairs."""
    half = x.square().sum(dim=-1, keepdim=True) / -2
    return torch.cat([x, half, torch.ones_like(half)], dim=-1)


def _right(y: Tensor) -> Tensor:
    half = y.square().sum(dim=-1, keepdim=True) / -2
    return torch.cat([y, torch.ones_like(half), half], dim=-1).transpose(-1, -2).contiguous()


def _sum(x: Tensor, y: Tensor) -> float:
    """``Σ_ij k(x_i, y_j)``."""
    left, right = _left(x), _right(y)
    held = x.new_empty(min(BLOCK, len(x)), len(y))
    total = x.new_zeros((), dtype=torch.float64)
    for rows in left.split(BLOCK):
        block = held[: len(rows)]
        torch.mm(rows, right, out=block)
        total += block.exp_().sum()
    return float(total)


def _symmetric_sum(x: Tensor) -> float:
    """``Σ_{i≠j} k(x_i, x_j)``, from the upper triangle."""
    left, right = _left(x), _right(x)
    total = x.new_zeros((), dtype=torch.float64)
    for start in range(0, len(x), BLOCK):
        rows = left[start : start + BLOCK]
        block = (rows @ right[:, start:]).exp_()
        itself = block[:, : len(rows)]
        total += itself.sum() - itself.diagonal().sum() + 2 * block[:, len(rows) :].sum()
    return float(total)
