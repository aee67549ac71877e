"""The parts of the page beside tables and curves: clients, classes, weights, analyses.

Tables of scores come from a run's records or from what `fedproto analyse` wrote to its folder
``analysis``, whichever is newer. A missing file is None; a damaged one is None too, with a sentence
that says so.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedproto.disk.files import content, open_plain
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import StoreError
from fedproto.measures.scores import PER_CLASS, PER_CLIENT, summarize_clients
from fedproto.report.results import StoredRun
from fedproto.types import RoundRecord

IOU = "iou_"
MOST_PICTURE_BYTES = 2_000_000
QUANTILES = 101
_COLOR = re.compile(r"#[0-9a-fA-F]{6}")

EMBEDDING = "embedding"
# All that reading and checking a file of arbitrary content can raise.
_DAMAGES = (
    *(StoreError, DamagedError, ValueError, TypeError),
    *(LookupError, AttributeError, ArithmeticError),
)

T = TypeVar("T")


@dataclass(frozen=True)
class PageRun:
    """A run as the page needs it.

    Attributes:
        tables: The newest of each name, and after how many rounds it was taken.
        problems: Damaged files, each in a sentence.
    """

    run: StoredRun
    tables: dict[str, tuple[int, dict[str, float]]]
    embedding: dict[str, Any] | None = None
    maps: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def page_run(run: StoredRun) -> PageRun:
    """Reads a run's analysis."""
    problems: list[str] = []

    def part(read: Callable[[], T | None]) -> T | None:
        try:
            return read()
        except StoreError as error:
            problems.append(str(error))
            return None

    measured = part(lambda: read_measured(run.path))
    taken = [(record.round + 1, record.tables) for record in run.records]
    if measured is not None:
        taken.append((measured.round, measured.tables))
    taken.sort(key=lambda one: one[0])
    maps = run.path / "analysis" / "maps"
    linked = maps.is_symlink() or maps.parent.is_symlink()  # they could lead to any pictures
    return PageRun(
        run,
        {name: (round_, table) for round_, tables in taken for name, table in tables.items()},
        part(lambda: read_part(run.path, EMBEDDING, _embedding)),
        [] if linked else sorted(maps.glob("*.png")),
        problems,
    )


def mean_shares(records: Iterable[RoundRecord]) -> dict[int, float]:
    """Each client's mean weight in multiples of a uniform share, over rounds of several clients."""
    total: defaultdict[int, float] = defaultdict(float)
    rounds: Counter[int] = Counter()
    for record in records:
        if len(record.attention) > 1:
            for client, weight in record.attention.items():
                total[client] += weight * len(record.attention)
                rounds[client] += 1
    return {client: weight / rounds[client] for client, weight in total.items()}


def _embedding(given: dict[str, Any]) -> dict[str, Any]:
    points = list(zip(given["x"], given["y"], given["class"], strict=True))
    names, colors = [str(name) for name in given["classes"]], [str(c) for c in given["colors"]]
    prototypes = int(given.get("prototypes", 0))  # the last points; none in files of before
    if not all(_COLOR.fullmatch(color) for color in colors) or len(colors) < len(names):
        raise ValueError("no colour")
    if not 0 <= prototypes <= len(points) or any(
        not (is_finite(x) and is_finite(y) and 0 <= label < len(names)) for x, y, label in points
    ):
        raise ValueError("no such point")
    return {
        "round": int(given["round"]),
        "x": [round(float(x), 3) for x, _, _ in points],
        "y": [round(float(y), 3) for _, y, _ in points],
        "class": [int(label) for _, _, label in points],
        "prototypes": prototypes,
        "classes": names,
        "colors": colors,
    }


def embedded_pictures(paths: Iterable[Path]) -> dict[str, str]:
    """Pictures as data addresses, by the names of their files; too large ones are left out."""
    addresses: dict[str, str] = {}
    for path in paths:
        try:
            with open_plain(path, os.O_RDONLY) as file:  # no link: it could lead to any file
                picture = file.read(MOST_PICTURE_BYTES + 1)
        except OSError:
            continue
        if len(picture) <= MOST_PICTURE_BYTES:
            addresses[path.stem] = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    return addresses


def fairness(runs: Sequence[PageRun]) -> dict[str, Any] | None:
    """Mean client, worst tenth and share at zero, each the mean over seeds; quantiles of all."""
    found = [one.tables[PER_CLIENT] for one in runs if PER_CLIENT in one.tables]
    tables = [
        {int(client): value for client, value in table.items() if client.isdecimal()}
        for _, table in found
    ]
    if not any(tables):
        return None
    values = [value for table in tables for value in table.values()]
    per_seed = [summarize_clients(list(table.values())) for table in tables if table]
    mean, worst, zero = np.mean(per_seed, axis=0).tolist()
    return {
        "round": max(round_ for round_, _ in found),
        "clients": len(values),
        "seeds": len(tables),
        "mean": mean,
        "zero": zero,
        "worst": worst,
        "quantiles": _quantiles(values),
    }


def attention(runs: Sequence[PageRun]) -> dict[str, Any] | None:
    """Quantiles of the clients' weights, all seeds together; None where no round had two."""
    weights = [weight for one in runs for weight in mean_shares(one.run.records).values()]
    return {"quantiles": _quantiles(weights)} if weights else None


def _quantiles(values: Sequence[float]) -> list[float]:
    found = np.quantile(values, np.linspace(0, 1, QUANTILES)).tolist()
    return [round(value, 5) for value in found]


def classes(runs: Sequence[PageRun]) -> dict[str, float] | None:
    """The score per class, the mean over the seeds."""
    tables = [one.tables[PER_CLASS][1] for one in runs if PER_CLASS in one.tables]
    if not any(tables):  # segmentation records IoU per class in every test
        tables = [
            {
                name.removeprefix(IOU): value
                for name in dict.fromkeys(n for record in one.run.records for n in record.metrics)
                if name.startswith(IOU) and (value := one.run.final(name)) is not None
            }
            for one in runs
        ]
    means = {
        name: round(float(np.mean([table[name] for table in tables if name in table])), 5)
        for name in dict.fromkeys(name for table in tables for name in table)
    }
    return means or None


@dataclass(frozen=True)
class Measured:
    """What an analysis measured.

    Attributes:
        round: Number of rounds after which the model was looked at.
        reference: The run that MMD compares with.
    """

    round: int
    reference: str | None
    metrics: dict[str, float]
    tables: dict[str, dict[str, float]]


def read_measured(run: Path) -> Measured | None:
    """The measures of a run's newest analysis; None where there is none.

    Raises:
        StoreError: If they are damaged.
    """

    def check(given: dict[str, Any]) -> Measured:
        round_, tables = int(given.pop("round")), given.pop("tables", {})
        numbers = {"": given, **tables}
        found = {
            str(name): {str(key): float(value) for key, value in table.items() if is_finite(value)}
            for name, table in numbers.items()
        }
        return Measured(round_, given.get("reference"), found.pop(""), found)

    return read_part(run, "measures", check)


def is_finite(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_part(run: Path, name: str, check: Callable[[dict[str, Any]], T]) -> T | None:
    """A file of a run's analysis as `check` makes it; None where there is none.

    Raises:
        StoreError: If it is damaged.
    """
    file = run / "analysis" / f"{name}.json"
    if not file.exists():
        return None
    try:
        return check(read_json(content(file)))
    except _DAMAGES as error:
        raise StoreError(
            f"{file} cannot be read ({error}); make it again: fedproto analyse {run}"
        ) from None
