"""Which rule combines the updates of real clients: a name for what bears hostile ones.

A defence is a choice of ``[aggregate]`` options. It is resolved when a run over Flower is made, so
that the run's own description says how it was combined, and a simulation of the same description
gives the same bits. A recipe with an ``[aggregate]`` of its own keeps it.
"""

from __future__ import annotations

from dataclasses import replace

from fedproto.aggregation import AggregateOptions
from fedproto.config import RunConfig

SHARE = 2.0
"""No client counts for more than so many equal shares."""

DEFENCES = {
    "none": AggregateOptions(),
    "clip": AggregateOptions(clip_norm="median", max_share=SHARE),
    "median": AggregateOptions(rule="median", max_share=SHARE),
    "trimmed-mean": AggregateOptions(rule="trimmed-mean", trim=0.2, max_share=SHARE),
    "multi-krum": AggregateOptions(rule="multi-krum", krum=2, clip_norm="median", max_share=SHARE),
    "geometric-median": AggregateOptions(
        rule="geometric-median", clip_norm="median", max_share=SHARE
    ),
}


def defended(config: RunConfig) -> RunConfig:
    """A run as it is carried out with real clients."""
    if config.aggregate != AggregateOptions() or config.strategy.pooled:
        return config
    return replace(config, aggregate=DEFENCES[config.flower.defence])
