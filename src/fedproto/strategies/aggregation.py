"""Combining updates into the next model: the weighted mean, and rules that bear hostile clients.

A strategy says how much each update counts; the rule says what is done with that. All rules work
on the ways that clients went from the sent weights, after `clip_norm` and the strategy's own scale.

Shapes: K clients, R rows of a tensor, "…" its other sides.
"""

# Long: the options of averaging with what each of them does.
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
from fedproto.strategies.rules import (
    among,
    cap_attention,
    geometric_median,
    krum,
    median,
    trimmed_mean,
)
from fedproto.types import ClientWeights, ServerState, Tensors, Updates


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
                " weighs tensor by tensor or class by class; use 'median' or 'trimmed-mean'"
            )
        if self.rule in ("krum", "multi-krum") and self.krum and cohort < 2 * self.krum + 3:
            raise ConfigError(
                f"aggregate.krum = {self.krum} hostile clients need a schedule.cohort of at least"
                f" {2 * self.krum + 3}, not {cohort}"
            )


MEAN = AggregateOptions()


def combine(
    options: AggregateOptions, state: ServerState, updates: Updates, weights: ClientWeights
) -> tuple[ServerState, Tensor]:
    """Combines updates by a strategy's weights.

    Parameters go the combined way from the old ones. Buffers (batch-norm statistics) are combined
    by the clients' weights and never go beyond, which could make a variance negative; integer and
    boolean buffers (counters) keep their type and take the largest value of any client.

    Returns:
        The next state, its memory as before, and what each client counted in the end, ``[K]``.
    """
    if options.max_share is not None:
        weights = _capped(weights, options.max_share)
    clip, weights = _by_client(options, state, updates, weights)
    scale = weights.scale if clip is None else clip * weights.scale
    params = {}
    for name, old in state.params.items():
        share = (weights.tensor or {}).get(name, weights.client)
        values = [update.params[name] for update in updates]
        combined = _combined if share.dim() == 1 else _combined_rows
        params[name] = combined(options, old, values, share, scale)
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


def as_remembered(options: AggregateOptions, state: ServerState, updates: Updates) -> Updates:
    """Updates as the server's memory sees them: where the rule leads, all clients alike.

    Memory is made of sums and means over clients, which are then those of the rule, and one
    client's part cannot be as long as it likes.
    """
    ends = [update.params for update in updates]
    made = _made_of(options, state.params, ends, updates)
    return updates if made is None else [replace(update, params=made) for update in updates]


def summed(options: AggregateOptions, updates: Updates, parts: Sequence[Tensors]) -> Tensors:
    """The sum of what clients add to memory, as the rule bounds the way of the weights."""
    zeros = {name: torch.zeros_like(one) for name, one in parts[0].items()}
    made = _made_of(options, zeros, parts, updates) if zeros else None
    if made is not None:
        return {name: len(parts) * one for name, one in made.items()}
    return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in zeros}


def _made_of(
    options: AggregateOptions, origin: Tensors, ends: Sequence[Tensors], updates: Updates
) -> Tensors | None:
    """Where the rule leads from an origin, all clients alike; None where it is the plain mean."""
    if options.drop_beyond is not None:
        # Clients keep what they made: to shorten an honest one's sets its memory and the server's
        # apart. So only that is shortened which would not be used at all among the weights.
        options = replace(options, clip_times=max(options.clip_times, options.drop_beyond))
    start = ServerState(0, origin, {})
    moved = [
        replace(update, params=end, buffers={}) for update, end in zip(updates, ends, strict=True)
    ]
    equal = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64)
    clip, _ = _by_client(options, start, moved, ClientWeights(equal))
    if clip is None and options.rule == "mean":
        return None
    return combine(options, start, moved, ClientWeights(equal))[0].params


def _capped(weights: ClientWeights, times: float) -> ClientWeights:
    """Weights of which none is above so many equal shares, tensor by tensor where they are so.

    Equal among those who have a share at all, in a row that is not of all clients.
    """

    def capped(share: Tensor) -> Tensor:
        if share.dim() == 1:
            return cap_attention(share, times / len(share))
        share = share.clone()
        for share_k in share.unbind(dim=1):
            holds_k = share_k > 0
            if bool(holds_k.any()):
                share_k[holds_k] = cap_attention(share_k[holds_k], times / int(holds_k.sum()))
        return share

    tensor = weights.tensor and {name: capped(share) for name, share in weights.tensor.items()}
    return replace(weights, client=capped(weights.client), tensor=tensor)


def _by_client(
    options: AggregateOptions, state: ServerState, updates: Updates, weights: ClientWeights
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
        chosen = krum(gram, options.krum, one=options.rule == "krum")
        weights = replace(
            weights,
            client=among(weights.client, chosen),
            tensor=weights.tensor
            and {name: among(share, chosen) for name, share in weights.tensor.items()},
        )
    elif options.rule == "geometric-median":
        weights = replace(weights, client=geometric_median(gram, weights.client))
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
        between = median if options.rule == "median" else trimmed_mean
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


def _combined_rows(
    options: AggregateOptions,
    old: Tensor,
    values: Sequence[Tensor],
    share_kr: Tensor,
    scale: Tensor | float,
) -> Tensor:
    """One tensor whose rows have shares of their own; a row in which nobody has one stays."""
    if options.rule in ("median", "trimmed-mean"):
        rows = old.clone()
        for row, share_k in enumerate(share_kr.unbind(dim=1)):
            holders = share_k.nonzero().flatten()
            if len(holders):
                own = [values[holder][row] for holder in holders.tolist()]
                ways = scale[holders] if isinstance(scale, Tensor) else scale
                rows[row] = _combined(options, old[row], own, share_k[holders], ways)
        return rows
    share_kr = share_kr * torch.as_tensor(scale, dtype=share_kr.dtype).view(-1, 1)
    sides = (-1, *[1] * (old.dim() - 1))
    stays = (1 - share_kr.sum(dim=0)).to(old)
    combined = old * stays.view(sides)
    for value, share_r in zip(values, share_kr.to(old), strict=True):
        combined.addcmul_(value, share_r.view(sides))
    return combined


def _gram(state: ServerState, updates: Updates) -> Tensor:
    """Inner products of the clients' ways from the sent parameters, ``[K, K]``."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, old in state.params.items():
        way_k = torch.stack([(update.params[name] - old).double().flatten() for update in updates])
        total += (way_k @ way_k.t()).cpu()
    return total
