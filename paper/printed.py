"""What the paper prints, read from ``printed.toml``; None where it prints nothing."""

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
    text = (Path(__file__).parent / "printed.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def printed(*keys: str) -> Printed | None:
    """A figure by its keys, such as ``printed("accuracy", "mnist", "FedAvg")``."""
    found: Any = paper()
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            return None
        found = found[key]
    if isinstance(found, dict):
        return Printed(float(found["mean"]), found.get("std"))
    return Printed(float(found))


def printed_at_delta(label: str, delta: float) -> Printed | None:
    """The ablation table's accuracy of a row at one δ."""
    row, deltas = paper()["ablation"].get(label), paper()["deltas"]["values"]
    if row is None or delta not in deltas:
        return None
    return Printed(row["deltas"][deltas.index(delta)])
