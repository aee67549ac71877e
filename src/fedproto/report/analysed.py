"""What `fedproto analyse` left in a run directory, checked before it is shown.

    analysis/scores.json        accuracy or IoU per client and per class
    analysis/calibration.json   expected calibration error and the bins of a reliability diagram
    analysis/embedding.json     features in the plane
    analysis/maps/*.png         entropy and segmentation maps

Whatever of these is missing is None; what is damaged is None too, with a sentence that says so.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.disk.files import content, open_plain
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import StoreError

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
