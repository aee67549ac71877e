"""A user's own pictures named in a CSV or Parquet file with the columns path, label and client."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedproto.data.base import DATASETS
from fedproto.data.files import FileTree
from fedproto.data.own import Listing, OwnPictures, checked_classes
from fedproto.disk.files import open_regular
from fedproto.errors import DataError


@DATASETS.register("index")
@dataclass(frozen=True)
class IndexFile(OwnPictures):
    """Your own pictures in a CSV or Parquet file: path, label and, unless shared out, client."""

    def listing(self, path: Path) -> Listing:
        """Paths are relative to the index; without a column client the pictures are shared out."""
        rows = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
        if not rows:
            raise DataError(f"{path} has no rows")
        for column in ("path", "label"):
            if column not in rows[0]:
                raise DataError(
                    f"{path} has no column '{column}'; it has {', '.join(map(str, rows[0]))}"
                )
        names = [str(row["path"]) for row in rows]
        sources: dict[str, Path] = {}
        for number, name in enumerate(names, start=2):
            if name in sources:
                raise DataError(f"{path} row {number}: {name} is named twice")
            sources[name] = path.parent / name
            try:
                found = sources[name].is_file()
            except (OSError, ValueError) as error:  # too long, or not a name at all
                raise DataError(f"{path} row {number}: {name[:80]!r}: {error}") from None
            if not found:
                raise DataError(f"{path} row {number}: there is no file {sources[name]}")
        labels = [str(row["label"]) for row in rows]
        classes = _in_order(checked_classes(labels, self.classes, path), given=bool(self.classes))
        clients = [str(row["client"]) for row in rows] if "client" in rows[0] else None
        # The index is a source too: other labels make other data.
        tree = FileTree(path.parent, {**sources, path.name: path})
        return Listing(tree, names, labels, clients, classes)


def _in_order(classes: Sequence[str], *, given: bool) -> Sequence[str]:
    """Found classes that are whole numbers come in the order of the numbers: 2 before 10."""
    if given or not all(name.lstrip("-").isdigit() for name in classes):
        return classes
    return sorted(classes, key=int)


def _read_csv(path: Path) -> list[dict[str, Any]]:
    try:
        with io.TextIOWrapper(open_regular(path), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            rows: list[dict[str, Any]] = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from None
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise DataError(f"{path} row {number} has more or fewer fields than the first line")
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow: pip install 'fedproto[parquet]'") from None
    try:
        with open_regular(path) as file:
            rows: list[dict[str, Any]] = parquet.read_table(file).to_pylist()
    except (OSError, ArrowException, ValueError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from None
    return rows
