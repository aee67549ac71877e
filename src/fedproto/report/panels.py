"""The page's panels on clients, classes and data, and the files they are read from."""

from __future__ import annotations

import base64
import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.config import RunConfig
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.statistics import class_counts, statistics
from fedproto.disk.files import content, explained, open_plain, open_regular
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import FedprotoError, StoreError
from fedproto.measures.scores import PER_CLASS, PER_CLIENT
from fedproto.report.results import StoredRun
from fedproto.report.style import class_colors
from fedproto.rng import Indices
from fedproto.store import RunStore
from fedproto.store.sweeps import run_directories
from fedproto.types import RoundRecord

MOST_BINS = 10
MOST_COLUMNS = 200


@dataclass(frozen=True)
class Holdings:
    """What each client holds: training samples and classes among its samples, ``[K]`` each."""

    size: Indices
    classes: Indices


class DataPanels:
    """Loads each data set once and remembers its panel."""

    def __init__(self, own: Federation | None = None) -> None:
        self._own = own
        self._panels: dict[DataSource | None, dict[str, Any]] = {}
        self._holdings: dict[DataSource | None, Holdings] = {}

    def of(self, configs: Iterable[RunConfig]) -> list[dict[str, Any]]:
        """One panel per data set that the runs use, in the order of the runs."""
        by_source = {config.data: config for config in configs}
        for source, config in by_source.items():
            if source not in self._panels:
                self._panels[source] = self._panel(config)
        return [self._panels[source] for source in by_source]

    def holdings(self, config: RunConfig) -> Holdings | None:
        """What the clients of a run hold; None where its data cannot be had."""
        self.of([config])
        return self._holdings.get(config.data)

    def _panel(self, config: RunConfig) -> dict[str, Any]:
        source, own = config.data, self._own
        options = config.to_dict().get("data", {"name": own.name if own else "own data"})
        panel: dict[str, Any] = {"name": options.pop("name"), "options": options}
        nothing: dict[str, Any] = dict.fromkeys(("statistics", "colors", "grid"))
        nothing["classes"] = []
        if source is None and own is None:
            return panel | nothing | {"problem": "given in Python, so it cannot be read again"}
        try:
            if source is not None:
                own = source.listed(data_root()) or source.load(data_root())
            assert own is not None  # noqa: S101 - one of the two is there
            return panel | self._shown(source, own) | {"problem": None}
        except FedprotoError as error:
            return panel | nothing | {"problem": str(error)}

    def _shown(self, source: DataSource | None, federation: Federation) -> dict[str, Any]:
        counts = class_counts(federation)
        sizes = np.array([len(client.train) for client in federation.clients], dtype=np.int64)
        self._holdings[source] = Holdings(sizes, (counts > 0).sum(axis=1))
        first = int(federation.has_label_maps)
        names = [str(name) for name in federation.class_names[first:]]
        return {
            "statistics": asdict(statistics(federation)),
            "classes": names or [str(label) for label in range(counts.shape[1])],
            "colors": class_colors(len(names) + 1, label_maps=True)[1:] if first else None,
            "grid": asdict(class_grid(counts)),
        }


def binned(of: Indices, values: NDArray[np.float64]) -> list[list[float]]:
    """How a quantity of clients goes with what they hold.

    Clients are put together by value, or by tenths where there are many.
    """
    known = ~np.isnan(values)
    of, values = of[known], values[known]
    if not len(of):
        return []
    levels = np.unique(of)
    if len(levels) > MOST_BINS:
        levels = np.unique(np.quantile(of, np.linspace(0, 1, MOST_BINS + 1)[:-1]))
    bins = np.searchsorted(levels, of, side="right")
    result = []
    for bin_ in np.unique(bins):
        inside = values[bins == bin_]
        low, high = np.quantile(inside, (0.25, 0.75))
        facts = (of[bins == bin_].mean(), inside.mean(), low, high, len(inside))
        result.append([float(f"{fact:.5g}") for fact in facts])
    return result


@dataclass(frozen=True)
class Grid:
    """A heat map small enough for a page, one byte a cell; neighbouring columns are averaged.

    Attributes:
        cells: Places on the scale row by row, as base64: 0 for an empty cell, else 1 to 255.
    """

    rows: int
    columns: int
    column_span: int
    total_rows: int
    total_columns: int
    low: float
    high: float
    cells: str


def class_grid(counts: Indices) -> Grid:
    """How many samples of each class the clients have, rows are classes.

    A cell holds ``log10`` of the number of samples, of their mean where clients are joined.
    """
    span = math.ceil(len(counts) / MOST_COLUMNS)
    present = _join_rows(np.ones((len(counts), 1)), span)
    means = (_join_rows(counts.astype(np.float64), span) / present).T
    held = means > 0
    values = np.log10(means, out=np.zeros_like(means), where=held)
    low = float(values[held].min()) if held.any() else 0.0
    high = max(low + 0.01, float(values[held].max()) if held.any() else 0.0)
    places = 1 + np.rint(254 * (values - low) / (high - low))
    cells = np.where(held, places, 0).astype(np.uint8)
    return Grid(
        rows=values.shape[0],
        columns=values.shape[1],
        column_span=span,
        total_rows=counts.shape[1],
        total_columns=len(counts),
        low=low,
        high=high,
        cells=base64.b64encode(cells.tobytes()).decode(),
    )


def _join_rows(values: NDArray[np.float64], span: int) -> NDArray[np.float64]:
    return np.add.reduceat(values, np.arange(0, len(values), span), axis=0)


class AttentionShares:
    """Each client's mean weight in multiples of a uniform share; grows with the run."""

    def __init__(self) -> None:
        self._sum: defaultdict[int, float] = defaultdict(float)
        self._rounds: Counter[int] = Counter()

    def add(self, record: RoundRecord) -> None:
        """Takes in one more round; one of a single client says nothing and is left out."""
        weights = record.attention
        if len(weights) > 1:
            for client, weight in weights.items():
                self._sum[client] += weight * len(weights)
                self._rounds[client] += 1

    def means(self) -> dict[int, float]:
        """By client that took part: 1 is the uniform share, 2 twice as much."""
        return {client: total / self._rounds[client] for client, total in self._sum.items()}


MOST_POINTS = 4000
MOST_PICTURE_BYTES = 12_000_000
# What was seen first, then what was made of it.
_KINDS_OF_MAP = ("picture", "truth", "prediction", "softmax-entropy", "feature-entropy")
_DAMAGES = (
    StoreError,
    DamagedError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
"""What comes of a file that holds anything at all."""
_COLOR = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True)
class Scores:
    """How good the final model is for each client and each class."""

    round: int
    measure: str
    clients: dict[int, float]
    classes: dict[str, float | None]


@dataclass(frozen=True)
class Analysis:
    """All that was computed from a run's final checkpoint."""

    scores: Scores | None = None
    calibration: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None
    maps: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_analysis(run: Path) -> Analysis:
    """Reads the analysis of a run directory, as far as there is one."""
    folder = run / "analysis"
    problems: list[str] = []

    def part(name: str, check: Callable[[dict[str, Any]], Any]) -> Any:
        file = folder / name
        if not file.exists():
            return None
        try:
            return check(read_json(content(file)))
        except _DAMAGES:
            problems.append(f"{file} is damaged; make it again with 'fedproto analyse {run}'")
            return None

    return Analysis(
        scores=part("scores.json", _scores),
        calibration=part("calibration.json", _calibration),
        embedding=part("embedding.json", _embedding),
        maps=sorted((folder / "maps").glob("*.png"), key=_place_of_map),
        problems=problems,
    )


def embedded_pictures(paths: list[Path]) -> dict[Path, str]:
    """Pictures as data addresses, as many as a page should carry."""
    addresses: dict[Path, str] = {}
    room = MOST_PICTURE_BYTES
    for path in paths:
        try:
            with open_plain(path, os.O_RDONLY) as file:  # no link: it could lead to any file
                picture = file.read(room + 1)
        except OSError:
            continue
        if len(picture) <= room:
            room -= len(picture)
            encoded = base64.b64encode(picture).decode()
            addresses[path] = f"data:image/png;base64,{encoded}"
    return addresses


def _scores(given: dict[str, Any]) -> Scores:
    clients, classes = given["per_client"], given["per_class"]
    measure = "miou" if "miou" in clients else "accuracy"
    per_class = classes["iou" if "iou" in classes else "accuracy"]
    return Scores(
        round=int(given["round"]),
        measure=measure,
        clients={
            int(client): value
            for client, given in zip(clients["client"], clients[measure], strict=True)
            if (value := _number(given)) is not None
        },
        classes={
            str(name): _number(value)
            for name, value in zip(classes["class"], per_class, strict=True)
        },
    )


def _calibration(given: dict[str, Any]) -> dict[str, Any]:
    bins = [
        {name: _finite(one[name]) for name in ("low", "high", "confidence", "accuracy", "count")}
        for one in given["bins"]
        if one["count"]
    ]
    return {"round": int(given["round"]), "ece": _finite(given["ece"]), "bins": bins}


def _embedding(given: dict[str, Any]) -> dict[str, Any]:
    points = list(zip(given["x"], given["y"], given["class"], strict=True))
    names, colors = [str(name) for name in given["classes"]], [str(c) for c in given["colors"]]
    if not all(_COLOR.fullmatch(color) for color in colors) or len(colors) < len(names):
        raise ValueError("no colour")
    if any(not 0 <= int(label) < len(names) for _, _, label in points):
        raise ValueError("no such class")
    kept = points[:: math.ceil(len(points) / MOST_POINTS) or 1]
    return {
        "round": int(given["round"]),
        "method": str(given["method"]),
        "x": [round(_finite(x), 3) for x, _, _ in kept],
        "y": [round(_finite(y), 3) for _, y, _ in kept],
        "class": [int(label) for _, _, label in kept],
        "classes": names,
        "colors": colors,
        "left_out": len(points) - len(kept),
    }


def _place_of_map(path: Path) -> tuple[str, int, str]:
    """Maps of one picture together, in the order of their kinds."""
    picture, _, kind = path.stem.partition("-")
    rank = _KINDS_OF_MAP.index(kind) if kind in _KINDS_OF_MAP else len(_KINDS_OF_MAP)
    return picture, rank, kind


def _finite(value: Any) -> float:
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _number(value: Any) -> float | None:
    """A finite number; None for a client or class without test samples."""
    return None if value is None or not math.isfinite(value) else float(value)


_CHUNK = 1 << 20
CLASS = "class: "
"""How the curve of a class that was scored in training is called among the metrics."""


class RunFollower:
    """One run directory.

    Attributes:
        records: The rounds so far, without cohorts and weights.
        scores: Of the newest model whose clients were scored in training; None where none was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._described: object = None
        self._start_again()

    @property
    def run(self) -> StoredRun:
        """The run as the comparing functions want it."""
        return StoredRun(self.path, self.store.config, self.records)

    @property
    def stop_reason(self) -> str | None:
        """Why the run is over; None while it is not."""
        return self.store.reason_to_end(self.records)

    def update(self) -> None:
        """Reads what was written since the last time."""
        file = self.path / "rounds.jsonl"
        # Going back to a checkpoint puts another file in the place of this one.
        replaced = self._identity != _identity(file)
        if replaced or self._described != _identity(self.path / "run.json"):
            self._start_again()
        with (
            explained(file, " cannot be read", ""),
            contextlib.suppress(FileNotFoundError),
            open_regular(file) as lines,
        ):
            lines.seek(self._read)
            while chunk := lines.read(_CHUNK) + lines.readline():
                self._take(chunk)

    def _start_again(self) -> None:
        self.store = RunStore.open(self.path)
        self.records: list[RoundRecord] = []
        self.attention = AttentionShares()
        self.failures = 0
        self.scores: Scores | None = None
        self._described = _identity(self.path / "run.json")
        self._identity = _identity(self.path / "rounds.jsonl")
        self._read = 0
        self._reader = self.store.reader()

    def _take(self, chunk: bytes) -> None:
        # A last line without its end is still being written: it is read again the next time.
        self._read += chunk.rfind(b"\n") + 1
        for record in self._reader.read(chunk):
            self.attention.add(record)
            self.failures += len(record.failures)
            if PER_CLIENT in record.tables:
                self.scores = _recorded_scores(record)
            classes = record.tables.get(PER_CLASS, {})
            self.records.append(
                replace(
                    record,
                    metrics={
                        **record.metrics,
                        **{f"{CLASS}{name}": value for name, value in classes.items()},
                    },
                    tables={},
                    cohort=[],
                    stragglers=[],
                    dropped=[],
                    epochs={},
                    attention={},
                    failures={},
                )
            )


class Followers:
    """All runs in and below some directories, those included that begin later."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        self._known: dict[Path, RunFollower] = {}

    def update(self, *, forgiving: bool = False) -> tuple[list[RunFollower], list[str]]:
        """Reads what is new of all runs; a forgiving one says what it left out and why."""
        problems = []
        found: dict[Path, RunFollower] = {}
        for path in self.paths:
            if not path.exists():
                raise StoreError(f"{path} does not exist")
            for directory in run_directories(path):
                try:
                    follower = self._known.get(directory) or RunFollower(directory)
                    follower.update()
                except StoreError as error:
                    if not forgiving:
                        raise
                    problems.append(str(error))
                else:
                    found[directory] = follower
        self._known = found
        return list(found.values()), problems


def _recorded_scores(record: RoundRecord) -> Scores:
    return Scores(
        round=record.round + 1,
        measure="miou" if "mean_client_miou" in record.metrics else "accuracy",
        clients={int(client): value for client, value in record.tables[PER_CLIENT].items()},
        classes=dict(record.tables.get(PER_CLASS, {})),
    )


def _identity(path: Path) -> object:
    """Tells whether a file was replaced by another; not whether it grew."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
