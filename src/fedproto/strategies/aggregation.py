"""Aggregation: how updates are combined into the next model, by their mean or the median.

A strategy gives each update a weight; the rule says how updates are combined under these weights.
All rules work on the updates ``w_k − sent``, after `clip_norm` and the strategy's own scale.

Shapes: K clients, R rows of a tensor, "…" its other sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedproto.equations import weighted_average
from fedproto.errors import ConfigError
from fedproto.options import Options, option
from fedproto.types import ClientWeights, ServerState, Tensors, Updates


@dataclass(frozen=True)
class AggregateOptions(Options):
    """Aggregation of updates, for every strategy."""

    rule: Literal["mean", "median"] = option(
        "mean", "how updates are combined: weighted mean, or weighted median of every number"
    )
    clip_norm: float | Literal["median"] | None = option(
        None, "clip each update to this L2 norm; 'median': relative to the cohort's median norm"
    )
    clip_times: float = option(
        1.0,
        "clip_norm 'median': multiple of the median norm; at most 3/10 of the number of clients, or"
        " 1.5 of fewer than five",
        above=0,
    )
    drop_beyond: float | None = option(
        None, "reject updates whose L2 norm exceeds this multiple of the cohort's median", above=1
    )
    max_share: float | None = option(
        None,
        "largest weight of a client, as a multiple of an equal share; the rest goes to the others",
        at_least=1,
    )
    max_claim: float | None = option(
        None,
        "bound claims by the cohort: samples and class counts to this multiple of the median (25"
        " times that where clients are drawn by size), statistics to the usual range",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.clip_norm, float) and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm must be above 0 or 'median', not {self.clip_norm!r}")

    @property
    def distrusts(self) -> bool:
        """Whether amounts and statistics that clients report are bounded by the cohort."""
        return self.rule != "mean" or self.max_claim is not None

    @property
    def averages(self) -> bool:
        """Whether updates are combined by their weights alone."""
        return (self.rule, self.clip_norm, self.max_share) == ("mean", None, None)


def combine(
    options: AggregateOptions,
    state: ServerState,
    updates: Updates,
    weights: ClientWeights,
    slack: float = 1.0,
) -> tuple[ServerState, Tensor]:
    """Combines updates by a strategy's weights, clipped at `slack` times the usual norm.

    Parameters that the updates lack (personal ones) stay as they are. Buffers (batch-norm
    statistics) are combined by the clients' weights and never scaled, which could make a variance
    negative; integer and boolean buffers (counters) keep their type and take the largest value of
    any client.

    Returns:
        The next state, its memory as before, and each client's final weight, ``[K]``.
    """
    if (times := options.max_share) is not None:
        rows = {name: cap_shares(one, times) for name, one in (weights.tensor or {}).items()}
        weights = replace(weights, client=cap_shares(weights.client, times), tensor=rows)
    clip = _clip_factors(options, state.params, updates, weights.client, slack)
    scale = weights.scale if clip is None else clip * weights.scale
    params = dict(state.params)
    for name in updates[0].params:
        values = [update.params[name] for update in updates]
        share_k = (weights.tensor or {}).get(name, weights.client)
        params[name] = _combined(options, state.params[name], values, share_k, scale)
    buffers = {}
    for name, old in state.buffers.items():
        values = [update.buffers[name] for update in updates]
        if old.is_floating_point():
            buffers[name] = _combined(
                options, old, values, weights.client, 1.0 if clip is None else clip
            )
        else:
            buffers[name] = torch.stack(values).amax(dim=0)
    return ServerState(state.round + 1, params, buffers, state.memory), weights.client


def summed(options: AggregateOptions, updates: Updates, parts: Sequence[Tensors]) -> Tensors:
    """The sum of the clients' additions to memory, bounded by the rule as updates are."""
    if not parts[0]:
        return {}
    zeros = {name: torch.zeros_like(one) for name, one in parts[0].items()}
    added = [replace(one, params=own, buffers={}) for one, own in zip(updates, parts, strict=True)]
    weights = ClientWeights(equal_shares(len(updates)))
    # Clients keep their own side of this memory: clipping an honest one sets the two sides apart.
    # So only far longer ones are clipped where the longest updates are rejected.
    slack = 1.0 if options.drop_beyond is None else 2.0
    clip = _clip_factors(options, zeros, added, weights.client, slack)
    if options.rule == "mean" and clip is None:
        return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in zeros}
    mean, _ = combine(options, ServerState(0, zeros, {}), added, weights, slack)
    return {name: len(parts) * one for name, one in mean.params.items()}


def _clip_factors(
    options: AggregateOptions,
    origin: Tensors,
    updates: Updates,
    share_k: Tensor,
    slack: float = 1.0,
) -> Tensor | None:
    """Factors that clip the clients' updates, ``[K]``; None where none is clipped.

    Relative to the median, what a client adds to the mean is bounded by 3/10 of what equal updates
    of equal weight would add, but no usual update of a small cohort is clipped for that. An update
    of more than an equal weight is clipped as if it were as much longer.
    """
    if options.clip_norm is None:
        return None
    norm_k, largest = update_norms(origin, updates), options.clip_norm
    if largest == "median":
        times = slack * min(options.clip_times, max(1.5, 0.3 * len(norm_k)))
        largest = times * float(norm_k[norm_k > 0].median())  # NaN, which clips none, if none moved
        norm_k = norm_k * (len(updates) * share_k).clamp(min=1)
    clip = torch.where(norm_k > largest, largest / norm_k.clamp(min=1e-300), 1.0)
    return None if bool((clip == 1).all()) else clip


def _combined(
    options: AggregateOptions,
    old: Tensor,
    values: Sequence[Tensor],
    share_k: Tensor,
    scale: Tensor | float,
) -> Tensor:
    """One tensor of the next model from the clients' ones.

    With shares row by row, ``[K, R]``, a row without any share stays.
    """
    if options.rule == "median" and len(values) > 1:
        if isinstance(scale, Tensor):
            values = [
                torch.lerp(old, value, one)
                for value, one in zip(values, scale.tolist(), strict=True)
            ]
        share_k = _along(share_k.to(old.device), old.dim() + 1)
        found = torch.where(share_k.sum(dim=0) > 0, median(torch.stack(list(values)), share_k), old)
        return found if isinstance(scale, Tensor) or scale == 1 else torch.lerp(old, found, scale)
    if share_k.dim() == 2:
        share_k = share_k * torch.as_tensor(scale, dtype=share_k.dtype).view(-1, 1)
        combined = old * _along((1 - share_k.sum(dim=0)).to(old), old.dim())
        for value, share_r in zip(values, share_k.to(old), strict=True):
            combined.addcmul_(value, _along(share_r, old.dim()))
        return combined
    if isinstance(scale, Tensor):
        share_k = share_k * scale
        step = float(share_k.sum())
        if step == 0:
            return old.clone()
        return torch.lerp(old, weighted_average(values, share_k / step), step)
    target = weighted_average(values, share_k)
    return target if scale == 1 else torch.lerp(old, target, scale)


def _along(share: Tensor, dimensions: int) -> Tensor:
    """Shares of what lies along the first dimensions of a tensor with more of them."""
    return share.view(*share.shape, *[1] * (dimensions - share.dim()))


def update_norms(sent: Tensors, updates: Updates) -> Tensor:
    """L2 norms of the updates ``w_k − sent`` over all floating parameters, ``[K]``."""
    names = [name for name in updates[0].params if sent[name].is_floating_point()]
    if not names:
        return torch.zeros(len(updates), dtype=torch.float64)
    begun = [sent[name] for name in names]
    norms: list[Tensor] = []
    for update in updates:
        deltas = torch._foreach_sub([update.params[name] for name in names], begun)
        # On a CPU a norm takes some twenty times as long as a product; one that overflows is
        # infinite, as it should be.
        norms += (
            torch._foreach_norm(deltas)
            if deltas[0].is_cuda
            else [torch.dot(delta.flatten(), delta.flatten()).sqrt() for delta in deltas]
        )
    norm_k: Tensor = torch.stack(norms).double().view(len(updates), -1).norm(dim=1)
    return norm_k.cpu()


_TOLERANCE = 1e-9


def median(value_k: Tensor, share_k: Tensor) -> Tensor:
    """The weighted median of every number; the mean of the two middle ones where both are."""
    value_k, order = value_k.sort(dim=0)
    share_k = _along(share_k, value_k.dim()).expand_as(value_k).gather(0, order)
    cumulated_k, last = share_k.cumsum(dim=0), len(value_k) - 1
    lower = (cumulated_k < 0.5 - _TOLERANCE).sum(dim=0, keepdim=True).clamp(max=last)
    upper = (cumulated_k < 0.5 + _TOLERANCE).sum(dim=0, keepdim=True).clamp(max=last)
    both = value_k.gather(0, lower) + value_k.gather(0, upper)
    return (both / 2).squeeze(0)


def equal_shares(number: int) -> Tensor:
    """One share for each of some clients, ``[K]``."""
    return torch.full((number,), 1 / number, dtype=torch.float64)


def cap_shares(share_k: Tensor, times: float) -> Tensor:
    """Limits every share to a multiple of an equal one, and to what the others can outweigh.

    With ``[K, R]`` shares row by row among those that have any; the sum over a row stays.
    Orthogonal updates of one length with equal weights ``(1 − a) / (K − 1)`` sum up to the length
    of one with the weight ``a = 1 / (1 + √(K − 1))``: one half of two, 0.41 of three.
    """
    if share_k.dim() == 2:
        share_kr = share_k.clone()
        for one_k in share_kr.unbind(dim=1):
            if bool((holds_k := one_k > 0).any()):
                total = one_k.sum()
                one_k[holds_k] = total * cap_shares(one_k[holds_k] / total, times)
        return share_kr
    number = len(share_k)
    return cap_attention(share_k, min(times / number, 1 / (1 + math.sqrt(number - 1))))


def cap_attention(a_k: Tensor, cap: float) -> Tensor:
    """Limits every share to a cap; the excess goes to the others in proportion.

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
