"""What clients tell of their features, declared and merged: sums and counts per class."""

from __future__ import annotations

import torch

from fedproto.errors import TrainingError
from fedproto.strategies.contract import Declared, Setting
from fedproto.types import Prototypes, Updates

LONGEST = 3.0
"""Prototypes longer than this times the cohort's median are shortened."""


def feature_sizes(setting: Setting, num_examples: int) -> tuple[int, int, int]:
    """Classes, channels, and feature vectors that so many samples give."""
    features = setting.features
    if features is None:
        raise TrainingError(
            "prototypes need the shape of the model's features, and the model could not tell: its"
            " features(x) must take a batch of one input"
        )
    return setting.num_classes, features.channels, num_examples * features.per_sample


def prototypes_declared(
    setting: Setting, num_examples: int, sum_name: str, count_name: str
) -> dict[str, Declared]:
    """Prototypes as sums and counts, of no more feature vectors than so many samples give."""
    classes, channels, vectors = feature_sizes(setting, num_examples)
    return {
        sum_name: Declared((classes, channels), setting.float_type, zero_where=count_name),
        count_name: Declared((classes,), torch.int64, low=0, high=vectors, total=vectors),
    }


def merged_prototypes(updates: Updates, sum_name: str, count_name: str) -> Prototypes:
    """Prototypes of the clients' pooled data, in double precision, where the updates lie.

    They go to all clients, so no client may make them absurd: one that is longer than `LONGEST`
    times the cohort's median is shortened to that.
    """
    told = Prototypes.stack(
        [
            Prototypes(update.payload[sum_name].double(), update.payload[count_name])
            for update in updates
        ]
    )
    length_kc = told.mean.norm(dim=-1)
    usual = torch.where(told.seen, length_kc, torch.nan).nanmedian().nan_to_num(0)
    shorter_kc = (LONGEST * usual / length_kc.clamp(min=1e-300)).clamp(max=1)
    return Prototypes(told.sum * shorter_kc.unsqueeze(-1), told.count).merged()
