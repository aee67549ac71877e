"""Rules that bear hostile clients, on plain tensors: what `combine` makes of clients' ways.

Shapes: K clients, R rows of a tensor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedproto.equations import weighted_average

_ROUNDS_OF_WEISZFELD = 200
_TOLERANCE = 1e-9


def median(value_k: Tensor, share_k: Tensor, trim: float) -> Tensor:
    """The weighted median of every number; the mean of the two middle ones where both are."""
    del trim
    value_k, cumulated_k = _sorted(value_k, share_k)
    lower = (cumulated_k < 0.5 - _TOLERANCE).sum(dim=0, keepdim=True)
    upper = (cumulated_k < 0.5 + _TOLERANCE).sum(dim=0, keepdim=True).clamp(max=len(value_k) - 1)
    both = value_k.gather(0, lower) + value_k.gather(0, upper)
    return (both / 2).squeeze(0)


def trimmed_mean(value_k: Tensor, share_k: Tensor, trim: float) -> Tensor:
    """The weighted mean of every number without the largest and the smallest ones."""
    cut = min(math.ceil(trim * len(value_k) - _TOLERANCE), (len(value_k) - 1) // 2)
    if cut == 0:
        return weighted_average(list(value_k), share_k)
    # Lighter ones first among equal values, so that the clients' order decides nothing.
    lighter_first = share_k.argsort(stable=True)
    share_k = share_k[lighter_first]
    value_k, order = value_k[lighter_first].sort(dim=0, stable=True)
    kept = slice(cut, len(value_k) - cut)
    kept_share_k = share_k[order[kept]]
    total = kept_share_k.sum(dim=0)
    equal = 1 / len(kept_share_k)
    kept_share_k = torch.where(total > 0, kept_share_k / torch.where(total > 0, total, 1), equal)
    return (value_k[kept] * kept_share_k.to(value_k.dtype)).sum(dim=0)


def _sorted(value_k: Tensor, share_k: Tensor) -> tuple[Tensor, Tensor]:
    value_k, order = value_k.sort(dim=0)
    return value_k, share_k[order].cumsum(dim=0)


def krum(gram: Tensor, hostile: int, *, one: bool) -> Tensor:
    """Which clients lie closest to their neighbours (Blanchard et al. 2017), ``[K]``, boolean."""
    number = len(gram)
    square = (gram.diagonal().unsqueeze(0) + gram.diagonal().unsqueeze(1) - 2 * gram).clamp(min=0)
    neighbours = max(1, min(number - hostile - 2, number - 1))
    score = square.sort(dim=1).values[:, 1 : neighbours + 1].sum(dim=1)
    # Clients that are each other's nearest, or were clipped to one length, are level: the first of
    # them is taken, where the last digits would let the machine's rounding choose.
    level = (score / score.max().clamp(min=1e-300)).round(decimals=5)
    best = level.argsort(stable=True)[: 1 if one else max(1, number - hostile)]
    return torch.zeros(number, dtype=torch.bool).index_fill(0, best, True)


def among(share_k: Tensor, chosen_k: Tensor) -> Tensor:
    """Shares of the chosen clients alone; as they were where all are chosen.

    A row ``[K, R]`` in which no chosen client has a share is nobody's.
    """
    if bool(chosen_k.all()):
        return share_k
    if share_k.dim() == 2:
        kept_kr = torch.where(chosen_k.unsqueeze(1), share_k, 0)
        total_r = kept_kr.sum(dim=0)
        return kept_kr / torch.where(total_r > 0, total_r, 1)
    kept_k = torch.where(chosen_k, share_k, 0)
    total = kept_k.sum()
    return kept_k / total if total > 0 else chosen_k.double() / chosen_k.sum()


def geometric_median(gram: Tensor, share_k: Tensor) -> Tensor:
    """Weights of the point with the least weighted sum of distances, by Weiszfeld's iteration.

    Distances are kept above a millionth of the largest, so that a point on a client is no trap
    (Pillutla et al. 2022, the smoothed form).
    """
    weight_k = share_k
    for _ in range(_ROUNDS_OF_WEISZFELD):
        toward_k = gram @ weight_k
        square_k = gram.diagonal() - 2 * toward_k + weight_k @ toward_k
        distance_k = square_k.clamp(min=0).sqrt()
        floor = float(distance_k.max()) * 1e-6
        if floor == 0:
            return weight_k
        next_k = share_k / distance_k.clamp(min=floor)
        next_k = next_k / next_k.sum()
        if bool((next_k - weight_k).abs().max() < _TOLERANCE):
            return next_k
        weight_k = next_k
    return weight_k


def cap_attention(a_k: Tensor, cap: float) -> Tensor:
    """Brings every share down to a cap; what is cut off goes to the others in proportion.

    It bounds what a client that lies about its margins can gain.

    Where K times the cap does not reach one, all shares become equal.
    """
    cap = max(cap, 1 / len(a_k))
    capped_k = torch.zeros_like(a_k, dtype=torch.bool)
    while bool((over_k := ~capped_k & (a_k > cap)).any()):
        capped_k |= over_k
        if bool(capped_k.all()):
            return torch.full_like(a_k, 1 / len(a_k))
        free = a_k[~capped_k].sum()
        left = 1 - cap * int(capped_k.sum())
        equal = left / int((~capped_k).sum())
        others_k = a_k * left / free if free > 0 else torch.full_like(a_k, equal)
        a_k = torch.where(capped_k, cap, others_k)
    return a_k
