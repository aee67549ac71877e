"""Where tables and figures go: the terminal, CSV, PNG and PDF, and where each of them came from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from fedproto.errors import StoreError
from fedproto.store.environment import describe_environment

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

    def table(
        self, title: str, columns: Sequence[str], groups: Iterable[Iterable[Sequence[str]]]
    ) -> None:
        """Prints a table with a line after every group; figures are on the right."""
        self.say(title)
        shown = Table()
        rows = [list(group) for group in groups]
        for index, column in enumerate(columns):
            names = all(row[index][:1].isalpha() for group in rows for row in group)
            shown.add_column(column, justify="left" if names else "right", no_wrap=True)
        for group in rows:
            for row in group:
                shown.add_row(*row)
            shown.add_section()
        self.console.print(shown)

    def track(self, items: Sequence[T], doing: str) -> Iterator[T]:
        """Goes through items with a bar on a terminal."""
        console = Console(stderr=True)
        yield from track(items, doing, console=console, disable=not console.is_terminal)

    def csv(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
        """Writes figures; None is an empty field."""
        path = self.folder / f"{name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
        self.written.append(path)
        return path

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
