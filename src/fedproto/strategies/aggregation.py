"""Combining updates into the next model: the weighted mean, and rules that bear hostile clients.

A strategy says how much each update counts; the rule says what is done with that. All rules work
on the ways that clients went from the sent weights, after `clip_norm` and the strategy's own scale.

Shapes: K clients, "…" the sides of a tensor.
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
from fedproto.types import ClientUpdate, ClientWeights, ServerState, Tensors

_ROUNDS_OF_WEISZFELD = 200
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class AggregateOptions(Options):
    """How the clients' updates become one, whatever the strategy."""

    rule: Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median"] = (
        option("mean", "by the strategy's weights: their mean, or a rule that bears outliers")
    )
    trim: float = option(
        0.1, "trimmed-mean: share of the clients cut off at each end, number by number", at_least=0
    )
    krum: int = option(1, "krum, multi-krum: hostile clients expected in a cohort", at_least=0)
    clip_norm: float | Literal["median"] | None = option(
        None, "longest way from the sent weights; longer ones are shortened; 'median' of the cohort"
    )

    clip_times: float = option(1.0, "clip_norm 'median': so many times the median", above=0)
    drop_beyond: float | None = option(
        None,
        "updates that went further than so many times the median of the cohort are not used",
        above=1,
    )
    max_share: float | None = option(
        None,
        "largest weight of a client, in multiples of an equal share; what is cut goes to others",
        at_least=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trim >= 0.5:
            raise ConfigError(f"trim must be below 0.5, or nobody is left, not {self.trim!r}")
        if isinstance(self.clip_norm, float) and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm must be above 0 or 'median', not {self.clip_norm!r}")

    @property
    def plain(self) -> bool:
        """Whether updates are averaged as they are."""
        return self.rule == "mean" and self.clip_norm is None and self.max_share is None

    def check_fits(self, cohort: int, *, pooled: bool, weighs_tensors: bool) -> None:
        """Checks that the rule has a meaning for a strategy and a cohort.

        Args:
            cohort: Clients per round.
            pooled: Whether the strategy trains on the pooled data.
            weighs_tensors: Whether it weighs clients tensor by tensor.

        Raises:
            ConfigError: If it has none; the message says why.
        """
        if pooled and not self.plain:
            raise ConfigError(
                "aggregate.rule and aggregate.clip_norm need several clients; centralised training"
                " has one model and nothing to combine"
            )
        if self.rule == "geometric-median" and weighs_tensors:
            raise ConfigError(
                "aggregate.rule 'geometric-median' takes one weight per client, and this strategy"
                " weighs tensor by tensor; use 'median' or 'trimmed-mean'"
            )
        if self.rule in ("krum", "multi-krum") and self.krum and cohort < 2 * self.krum + 3:
            raise ConfigError(
                f"aggregate.krum = {self.krum} hostile clients need a schedule.cohort of at least"
                f" {2 * self.krum + 3}, not {cohort}"
            )


MEAN = AggregateOptions()


def combine(
    options: AggregateOptions,
    state: ServerState,
    updates: Sequence[ClientUpdate],
    weights: ClientWeights,
) -> tuple[ServerState, Tensor]:
    """Combines updates by a strategy's weights.

    Parameters go the combined way from the old ones. Buffers (batch-norm statistics) are combined
    by the clients' weights and never go beyond, which could make a variance negative; integer and
    boolean buffers (counters) keep their type and take the largest value of any client.

    Returns:
        The next state, its memory as before, and what each client counted in the end, ``[K]``.
    """
    if options.max_share is not None:
        weights = _capped(weights, options.max_share / len(updates))
    clip, weights = _by_client(options, state, updates, weights)
    scale = weights.scale if clip is None else clip * weights.scale
    params = {}
    for name, old in state.params.items():
        share = (weights.tensor or {}).get(name, weights.client)
        values = [update.params[name] for update in updates]
        params[name] = _combined(options, old, values, share, scale)
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


def as_remembered(
    options: AggregateOptions,
    state: ServerState,
    updates: Sequence[ClientUpdate],
    ways: Sequence[str],
) -> Sequence[ClientUpdate]:
    """Updates as the server's memory sees them: bounded by the same rule as the weights.

    Memory is made of sums over clients, and one client's part could be as long as it likes. Where
    the rule changes anything, every client's part becomes what the rule makes of all of them, so
    that sums and means are those of the rule.

    Args:
        options: The rule.
        state: What clients were sent.
        updates: The cohort's.
        ways: Names in their payloads that are ways, from zero, like those of the weights.
    """
    if options.plain:
        return updates
    sent = {name: torch.zeros_like(updates[0].payload[name]) for name in ways}
    told = [{name: update.payload[name] for name in ways} for update in updates]
    params = _made_of(options, state.params, [update.params for update in updates], updates)
    payload = _made_of(options, sent, told, updates)
    return [
        replace(update, params=params or update.params, payload={**update.payload, **payload})
        for update in updates
    ]


def _made_of(
    options: AggregateOptions,
    origin: Tensors,
    ends: Sequence[Tensors],
    updates: Sequence[ClientUpdate],
) -> Tensors:
    """Where the rule leads from an origin, all clients alike; empty where it is the plain mean."""
    start = ServerState(0, origin, {})
    moved = [
        replace(update, params=end, buffers={}) for update, end in zip(updates, ends, strict=True)
    ]
    equal = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64)
    clip, _ = _by_client(options, start, moved, ClientWeights(equal))
    if clip is None and options.rule == "mean":
        return {}
    return combine(options, start, moved, ClientWeights(equal))[0].params


def _capped(weights: ClientWeights, cap: float) -> ClientWeights:
    """Weights of which none is above a cap, tensor by tensor where they are so."""
    tensor = weights.tensor and {
        name: cap_attention(share_k, cap) for name, share_k in weights.tensor.items()
    }
    return replace(weights, client=cap_attention(weights.client, cap), tensor=tensor)


def _by_client(
    options: AggregateOptions,
    state: ServerState,
    updates: Sequence[ClientUpdate],
    weights: ClientWeights,
) -> tuple[Tensor | None, ClientWeights]:
    """How far clients are shortened, ``[K]``, and their weights after rules that choose clients."""
    if options.clip_norm is None and options.rule in ("mean", "median", "trimmed-mean"):
        return None, weights
    gram = _gram(state, updates)
    clip: Tensor | None = None
    if options.clip_norm is not None:
        length = gram.diagonal().sqrt()
        longest: Tensor | float = (
            options.clip_times * length[length > 0].median()
            if options.clip_norm == "median" and bool((length > 0).any())
            else math.inf
            if options.clip_norm == "median"
            else options.clip_norm
        )
        clip = torch.where(length > longest, longest / length.clamp(min=1e-300), 1.0)
        clip = None if bool((clip == 1).all()) else clip
    scale = torch.as_tensor(weights.scale, dtype=torch.float64)
    scale = scale if clip is None else clip * scale
    gram = gram * torch.outer(scale.expand(len(updates)), scale.expand(len(updates)))
    if options.rule in ("krum", "multi-krum"):
        chosen = _krum(gram, options.krum, one=options.rule == "krum")
        weights = replace(
            weights,
            client=_among(weights.client, chosen),
            tensor=weights.tensor
            and {name: _among(share, chosen) for name, share in weights.tensor.items()},
        )
    elif options.rule == "geometric-median":
        weights = replace(weights, client=_geometric_median(gram, weights.client))
    return clip, weights


def _combined(
    options: AggregateOptions,
    old: Tensor,
    values: Sequence[Tensor],
    share: Tensor,
    scale: Tensor | float,
) -> Tensor:
    """One tensor of the next model from the clients' ones."""
    if options.rule in ("median", "trimmed-mean") and len(values) > 1:
        if isinstance(scale, Tensor):
            values = [
                torch.lerp(old, value, one)
                for value, one in zip(values, scale.tolist(), strict=True)
            ]
        between = _median if options.rule == "median" else _trimmed_mean
        found = between(torch.stack(list(values)), share.to(old.device), options.trim)
        return found if isinstance(scale, Tensor) or scale == 1 else torch.lerp(old, found, scale)
    if isinstance(scale, Tensor):
        share = share * scale
        step = float(share.sum())
        if step == 0:
            return old.clone()
        return torch.lerp(old, weighted_average(values, share / step), step)
    target = weighted_average(values, share)
    return target if scale == 1 else torch.lerp(old, target, scale)


def _median(value_k: Tensor, share_k: Tensor, trim: float) -> Tensor:
    """The weighted median of every number; the mean of the two middle ones where both are."""
    del trim
    value_k, cumulated_k = _sorted(value_k, share_k)
    lower = (cumulated_k < 0.5 - _TOLERANCE).sum(dim=0, keepdim=True)
    upper = (cumulated_k < 0.5 + _TOLERANCE).sum(dim=0, keepdim=True).clamp(max=len(value_k) - 1)
    both = value_k.gather(0, lower) + value_k.gather(0, upper)
    return (both / 2).squeeze(0)


def _trimmed_mean(value_k: Tensor, share_k: Tensor, trim: float) -> Tensor:
    """The weighted mean of every number without the largest and the smallest ones."""
    cut = min(math.ceil(trim * len(value_k) - _TOLERANCE), (len(value_k) - 1) // 2)
    if cut == 0:
        return weighted_average(list(value_k), share_k)
    value_k, order = value_k.sort(dim=0)
    kept = slice(cut, len(value_k) - cut)
    kept_share_k = share_k[order[kept]]
    total = kept_share_k.sum(dim=0)
    equal = 1 / len(kept_share_k)
    kept_share_k = torch.where(total > 0, kept_share_k / torch.where(total > 0, total, 1), equal)
    return (value_k[kept] * kept_share_k.to(value_k.dtype)).sum(dim=0)


def _sorted(value_k: Tensor, share_k: Tensor) -> tuple[Tensor, Tensor]:
    value_k, order = value_k.sort(dim=0)
    return value_k, share_k[order].cumsum(dim=0)


def _gram(state: ServerState, updates: Sequence[ClientUpdate]) -> Tensor:
    """Inner products of the clients' ways from the sent parameters, ``[K, K]``."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, old in state.params.items():
        way_k = torch.stack([(update.params[name] - old).double().flatten() for update in updates])
        total += (way_k @ way_k.t()).cpu()
    return total


def _krum(gram: Tensor, hostile: int, *, one: bool) -> Tensor:
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


def _among(share_k: Tensor, chosen_k: Tensor) -> Tensor:
    """Shares of the chosen clients alone; as they were where all are chosen."""
    if bool(chosen_k.all()):
        return share_k
    kept_k = torch.where(chosen_k, share_k, 0)
    total = kept_k.sum()
    return kept_k / total if total > 0 else chosen_k.double() / chosen_k.sum()


def _geometric_median(gram: Tensor, share_k: Tensor) -> Tensor:
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

    Args:
        a_k: Shares ``[K]`` that sum to one.
        cap: The largest share; where K of them do not reach one, all shares become equal.
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
