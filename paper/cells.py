"""Cells of tables in pages: numbers as they are written there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pandas as pd

Lines: TypeAlias = list[Sequence[str]]
"""A table as cells; the first line is its head."""

DASH = "–"


def row(cells: Sequence[str]) -> str:
    """A line of a table in Markdown."""
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def number(value: float, digits: int = 1, *, sign: bool = False) -> str:
    """As pages write it: a proper minus, commas from a thousand on, a dash for none."""
    if pd.isna(value):
        return DASH
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    return text.replace("-", "−")


def around(mean: float, deviation: float, digits: int = 1) -> str:
    """Mean ± deviation, where there is one."""
    more = "" if pd.isna(deviation) else f" ± {number(deviation, digits)}"
    return number(mean, digits) + more
