"""Download, check and show data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
)

from fedproto.api.table import Table
from fedproto.callback import Callback
from fedproto.cli.terminal import echo, print_table
from fedproto.config.recipe import apply_overrides
from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.data.federation import Federation, cautions, statistics
from fedproto.data.fetch import check as check_files
from fedproto.data.fetch import fetch as fetch_files
from fedproto.errors import DataError
from fedproto.options import read_options
from fedproto.report.figures import class_mix_figure
from fedproto.report.style import save_figure

group = typer.Typer(name="data", help=__doc__, no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A data set (fedproto list datasets).")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change an option, e.g. clients=50."),
]


@group.command()
def fetch(name: Name) -> None:
    """Download the official files of a data set into the data root."""
    source = DATASETS.get(name)
    with _bars(DownloadColumn()) as callback:
        written = fetch_files(source, data_root(), callback)
    for path in written:
        echo(f"wrote {path}")
    if source.licence:
        echo(f"licence: {source.licence}")
    if not written:
        echo(f"all files of {name} are in {data_root() / source.folder} already")


@group.command()
def check(name: Name) -> None:
    """Verify the checksums of the files of a data set."""
    source, root = DATASETS.get(name), data_root()
    damaged = []
    for file in check_files(source, root):
        echo(f"{'ok ' if file.good else 'BAD'} {file.path}: {file.state}")
        if not file.good:
            damaged.append(file.path)
    for download in source.downloads:
        if not (root / download.path).exists():
            echo(f"not there: {root / download.path}")
    if damaged:
        raise DataError(f"{name}: {damaged[0]} is damaged; fetch it again")


@group.command()
def stats(name: Name, settings: Settings = None) -> None:
    """Count the classes, clients and samples of a federation."""
    federation = _load(_configured(name, settings))
    figures = statistics(federation)
    print_table(Table([{"": key, name: value} for key, value in figures.items()]))
    for caution in cautions(federation.about()):
        echo(caution)


@group.command()
def plot(
    name: Name,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the PNG files.")] = None,
) -> None:
    """Draw how classes are spread over clients."""
    federation = _load(_configured(name, settings))
    file = (out or Path("plots")) / f"{name}-classes.png"
    echo(f"wrote {save_figure(class_mix_figure(federation), file)}")


def prepare_all(sources: Sequence[DataSource]) -> None:
    """Decodes what is not decoded yet, with a progress bar on a terminal."""
    with _bars(MofNCompleteColumn(), transient=True) as callback:
        for source in dict.fromkeys(sources):
            source.prepare(data_root(), callback)


@contextmanager
def _bars(amount: ProgressColumn, *, transient: bool = False) -> Iterator[Callback]:
    """Progress bars; a line for each without a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), amount
    tasks: dict[str, Any] = {}
    with Progress(
        *columns, console=console, transient=transient, disable=not console.is_terminal
    ) as bars:

        class Bar(Callback):
            def on_progress(self, name: str, done: int, total: int | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(name)
                    if not console.is_terminal:
                        echo(f"{name} …", err=True)
                bars.update(tasks[name], completed=done, total=total)

        yield Bar()


def _configured(name: str, settings: list[str] | None) -> DataSource:
    return read_options(DATASETS.get(name), apply_overrides({}, settings or []), name)


def _load(source: DataSource) -> Federation:
    prepare_all([source])
    return source.load(data_root())
