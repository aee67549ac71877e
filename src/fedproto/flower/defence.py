"""Which rule combines the updates of real clients: a name for what bears hostile ones.

A defence is a choice of ``[aggregate]`` options. It is resolved when a run over Flower is made, so
that the run's own description says how it was combined, and a simulation of the same description
gives the same bits. A recipe with an ``[aggregate]`` of its own keeps it.
"""

from __future__ import annotations

from dataclasses import replace

from fedproto.config import RunConfig
from fedproto.strategies.aggregation import AggregateOptions

CLIP = AggregateOptions(drop_beyond=3.0, clip_norm="median", clip_times=1.5, max_share=1.5)
"""Updates beyond three times the median norm are rejected, those beyond 1.5 times are clipped, and
no client's weight exceeds one and a half equal shares: honest clients are hardly affected."""

DEFENCES = {
    "none": AggregateOptions(),
    "clip": CLIP,
    "median": replace(CLIP, rule="median"),
    "trimmed-mean": replace(CLIP, rule="trimmed-mean"),
    "multi-krum": replace(CLIP, rule="multi-krum"),
    "geometric-median": replace(CLIP, rule="geometric-median"),
}


def defended(config: RunConfig) -> RunConfig:
    """A run as it is carried out with real clients."""
    if config.aggregate != AggregateOptions() or config.strategy.pooled:
        return config
    return replace(config, aggregate=DEFENCES[config.flower.defence])
