"""Where tables and figures go: the terminal, CSV, PNG and PDF, and where each of them came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedproto.errors import StoreError
from fedproto.store.run import describe_environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")


class Output:
    """Takes what an experiment has to show."""

    def __init__(self, folder: Path, console: Console, remark: str = "") -> None:
        self.folder = folder
        self.console = console
        self.remark = remark
        self.written: list[Path] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"--out {folder} cannot be written: {error.strerror}") from None

    def say(self, text: str) -> None:
        """Prints a remark."""
        self.console.print(text, highlight=False, markup=False)

    def table(self, title: str, frame: pd.DataFrame, by: str = "data_set") -> None:
        """Prints a table with a line after every group; columns without a value are left out."""
        self.say(title if len(frame) else f"{title}: nothing to show yet")
        if frame.empty:
            return
        frame = frame.replace("", None).dropna(axis=1, how="all")
        shown = Table()
        for name, column in frame.items():
            words = column.map(lambda cell: isinstance(cell, str)).any()
            shown.add_column(
                name.replace("_", " "), justify="left" if words else "right", no_wrap=True
            )
        for _, group in frame.groupby(by, sort=False):
            for row in group.itertuples(index=False):
                shown.add_row(*map(_cell, row))
            shown.add_section()
        self.console.print(shown)

    def track(self, items: Sequence[T], doing: str) -> Iterator[T]:
        """Goes through items with a bar on a terminal."""
        console = Console(stderr=True)
        yield from track(items, doing, console=console, disable=not console.is_terminal)

    def csv(self, name: str, columns: Sequence[str], rows: Any) -> pd.DataFrame:
        """Writes rows, which may be a frame of more columns; returns what was written."""
        path = self.folder / f"{name}.csv"
        frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
        frame.to_csv(path, index=False)
        self.written.append(path)
        return frame

    def json(self, name: str, content: Any) -> None:
        """Writes plain values for another experiment to read."""
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        self.written.append(path)

    def markdown(self, name: str, text: str) -> None:
        """Writes a table in Markdown, for a page of the docs."""
        path = self.folder / f"{name}.md"
        path.write_text(text, encoding="utf-8")
        self.written.append(path)

    def figure(self, name: str, figure: Figure) -> None:
        """Writes a picture as PNG and as PDF; the same picture gives the same bytes."""
        if self.remark:
            below = filter(None, [figure.get_supxlabel(), self.remark])
            figure.supxlabel("\n".join(below), fontsize="small")
        for suffix, metadata in ((".png", {"Software": None}), (".pdf", {"CreationDate": None})):
            path = self.folder / (name + suffix)
            figure.savefig(path, dpi=150, metadata=metadata)
            figure.set_layout_engine("none")  # laid out once; the second file is the same picture
            self.written.append(path)

    def origin(self, name: str, facts: Mapping[str, Any]) -> None:
        """Writes beside the files which command, runs, commit and machine they come from."""
        path = self.folder / f"{name}.json"
        content = {
            **facts,
            "environment": describe_environment(),
            "files": [file.name for file in self.written],
        }
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.written.append(path)


def _cell(value: Any) -> str:
    """A value as it is printed: four digits of a fraction, all of a large number."""
    if pd.isna(value):
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
