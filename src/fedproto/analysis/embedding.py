"""t-SNE of features in two dimensions, without approximation, in blocks that fit the cache.

Written here because scikit-learn, with SciPy, would add 143 MB to an installation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedproto.errors import ConfigError

STEPS = 1000
_EXAGGERATED = 250
_EXAGGERATION = 12.0
_BLOCK = 2**17
"""Pairs of points that are computed together; their values fit into a core's cache."""


def embed(e_nd: NDArray[np.float32], *, perplexity: float = 30.0) -> NDArray[np.float64]:
    """t-SNE (van der Maaten & Hinton 2008): a point in the plane per feature vector.

    Starts from the first two principal components; nothing in it is random. Only the nearest
    neighbours, three times the perplexity in number, have an affinity; learning rate, gains and
    momentum are scikit-learn's.
    """
    number = len(e_nd)
    if number < 4:
        raise ConfigError(f"t-SNE needs at least four feature vectors, not {number}")
    if not np.isfinite(e_nd).all():
        raise ConfigError("t-SNE needs finite feature vectors; has the model diverged?")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # blocks are small, and the bits do not depend on the machine
    try:
        return _points(e_nd, min(perplexity, (number - 1) / 3))
    finally:
        torch.set_num_threads(threads)


def _points(e_nd: NDArray[np.float32], perplexity: float) -> NDArray[np.float64]:
    number = len(e_nd)
    e = torch.from_numpy(np.ascontiguousarray(e_nd)).double()
    near_nn = _affinities(e, perplexity)
    y_n2 = _principal(e).float()
    gain_n2, velocity_n2 = torch.ones_like(y_n2), torch.zeros_like(y_n2)
    rate = max(number / _EXAGGERATION / 4, 50.0)
    for step in range(STEPS):
        early = step < _EXAGGERATED
        gradient_n2 = _gradient(y_n2, near_nn, _EXAGGERATION if early else 1.0)
        turned = velocity_n2 * gradient_n2 < 0
        gain_n2 = torch.where(turned, gain_n2 + 0.2, gain_n2 * 0.8).clamp_(min=0.01)
        velocity_n2 = (0.5 if early else 0.8) * velocity_n2 - rate * gain_n2 * gradient_n2
        y_n2 = y_n2 + velocity_n2
    return y_n2.double().numpy()


def _affinities(e_nd: Tensor, perplexity: float) -> Tensor:
    """Affinities of all pairs of vectors, symmetric and of sum one, ``[N, N]``."""
    number = len(e_nd)
    count = min(number - 1, int(3 * perplexity + 1))
    square_nk, index_nk = (
        torch.cat(parts)
        for parts in zip(
            *(
                torch.cdist(part, e_nd).square().topk(count + 1, largest=False)
                for part in e_nd.split(1024)
            ),
            strict=True,
        )
    )
    # A vector is its own nearest neighbour, unless others are just the same.
    itself = index_nk == torch.arange(number).unsqueeze(1)
    itself[~itself.any(dim=1), -1] = True
    square_nk = square_nk[~itself].view(number, count)
    index_nk = index_nk[~itself].view(number, count)
    chance_nk = _calibrated(square_nk, math.log(perplexity))
    near_nn = torch.zeros(number, number).scatter_(1, index_nk, chance_nk.float())
    return near_nn.add_(near_nn.t().clone()).div_(2 * number)


def _calibrated(square_nk: Tensor, entropy: float) -> Tensor:
    """Gaussian affinities of each vector's neighbours, with a width that gives the entropy."""
    square_nk = square_nk - square_nk[:, :1].clone()
    scale_n1 = square_nk.mean(dim=1, keepdim=True).clamp(min=1e-300)
    low_n1, high_n1 = torch.full_like(scale_n1, -60.0), torch.full_like(scale_n1, 60.0)
    for _ in range(60):
        beta_n1 = (low_n1 + high_n1) / 2
        weight_nk = torch.exp(-square_nk / scale_n1 * beta_n1.exp())
        chance_nk = weight_nk / weight_nk.sum(dim=1, keepdim=True)
        found_n1 = torch.special.entr(chance_nk).sum(dim=1, keepdim=True)
        wide = found_n1 > entropy
        low_n1 = torch.where(wide, beta_n1, low_n1)
        high_n1 = torch.where(wide, high_n1, beta_n1)
    return chance_nk


def _principal(e_nd: Tensor) -> Tensor:
    """The first two principal components, scaled down, ``[N, 2]``."""
    centred_nd = e_nd - e_nd.mean(dim=0)
    axes_d2: Tensor = torch.linalg.eigh(centred_nd.t() @ centred_nd).eigenvectors.flip(1)[:, :2]
    if axes_d2.shape[1] < 2:
        axes_d2 = torch.cat([axes_d2, torch.zeros_like(axes_d2)], dim=1)
    # The sign of an axis is arbitrary: its largest component is made positive.
    sign_2 = axes_d2.gather(0, axes_d2.abs().argmax(dim=0, keepdim=True)).sign()
    y_n2 = centred_nd @ (axes_d2 * torch.where(sign_2 == 0, 1.0, sign_2))
    return y_n2 / y_n2[:, 0].std().clamp(min=1e-300) * 1e-4


def _gradient(y_n2: Tensor, near_nn: Tensor, exaggeration: float) -> Tensor:
    """The gradient of the Kullback-Leibler divergence by the points, ``[N, 2]``."""
    number = len(y_n2)
    one_n1, square_n1 = torch.ones(number, 1), y_n2.square().sum(dim=1, keepdim=True)
    left_n4 = torch.cat([-2 * y_n2, square_n1 + 1, one_n1], dim=1)
    right_4n = torch.cat([y_n2, one_n1, square_n1], dim=1).t().contiguous()
    point_3n = torch.cat([y_n2, one_n1], dim=1).t().contiguous()
    total, pull_3n, push_3n = -float(number), torch.empty_like(point_3n), point_3n.clone()
    rows = max(1, _BLOCK // number)
    for start in range(0, number, rows):
        part = slice(start, start + rows)
        # 1 / (1 + squared distance), which rounding must not make more than 1.
        q_bn = (left_n4[part] @ right_4n).clamp_(min=1).reciprocal_()
        total += float(q_bn.sum())
        pull_3n[:, part] = point_3n @ (near_nn[part] * q_bn).t()
        push_3n[:, part] = point_3n @ q_bn.square_().t()
    force_3n = exaggeration * pull_3n - push_3n / total
    return 4 * (force_3n[2:] * y_n2.t() - force_3n[:2]).t()
