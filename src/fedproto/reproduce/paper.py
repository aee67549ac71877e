"""What the paper prints, read from ``paper.toml``; None where it prints nothing."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Printed:
    """A figure of the paper, and what stands behind its ±."""

    mean: float
    std: float | None = None


@functools.cache
def paper() -> dict[str, Any]:
    """All tables of the paper."""
    text = (Path(__file__).parent / "paper.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def printed(*keys: str) -> Printed | None:
    """A figure by its place, such as ``printed("accuracy", "mnist", "FedAvg")``."""
    place: Any = paper()
    for key in keys:
        if not isinstance(place, dict) or key not in place:
            return None
        place = place[key]
    if isinstance(place, dict):
        return Printed(float(place["mean"]), place.get("std"))
    return Printed(float(place))


def printed_at_delta(label: str, delta: float) -> Printed | None:
    """The ablation table's accuracy of a row at one δ."""
    row, deltas = paper()["ablation"].get(label), paper()["deltas"]["values"]
    if row is None or delta not in deltas:
        return None
    return Printed(row["deltas"][deltas.index(delta)])
