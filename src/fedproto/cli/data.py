"""Get, check and look at data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
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
from fedproto.cli.terminal import AsJson, DataRoot, echo, print_table
from fedproto.config.recipe import apply_overrides
from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.fetch import OnBytes
from fedproto.data.fetch import check as check_files
from fedproto.data.fetch import fetch as fetch_files
from fedproto.data.sharing import SharedOut
from fedproto.data.statistics import statistics
from fedproto.errors import ConfigError, DataError
from fedproto.options import read_options
from fedproto.report.figures import class_mix_figure, draw_contact_sheet
from fedproto.report.style import save_figure

group = typer.Typer(name="data", help=__doc__, no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="A data set (fedproto list datasets).")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change an option, e.g. clients=50."),
]
ALPHAS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 1000.0)
"""The concentrations of the supplementary's figure."""

FORMATS = (("classes", ","), ("clients", ","), ("samples", ","), ("mean", ",.1f"), ("std", ",.1f"))


@group.command()
def fetch(name: Name, data_root_: DataRoot = None) -> None:
    """Download the official files of a data set into the data root."""
    del data_root_
    source = DATASETS.get(name)
    with _named(name), byte_progress() as on_bytes:
        written = fetch_files(source, data_root(), on_bytes)
    for path in written:
        echo(f"wrote {path}")
    if source.licence:
        echo(f"licence: {source.licence}")
    if not written:
        echo(f"all files of {name} are in {data_root() / source.folder} already")


@group.command()
def check(name: Name, data_root_: DataRoot = None) -> None:
    """Verify the files of a data set that are there."""
    del data_root_
    source, root = DATASETS.get(name), data_root()
    damaged = []
    with _named(name):
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
def stats(
    name: Name, settings: Settings = None, as_json: AsJson = False, data_root_: DataRoot = None
) -> None:
    """Show how many classes, clients and samples a federation has."""
    del data_root_
    source = _configured(name, settings)
    federations = {"here": _load(source)}
    listed = source.listed(data_root())
    if listed is not None:
        federations["by the official lists"] = listed
    rows = {title: statistics(federation) for title, federation in federations.items()}
    if as_json:
        echo(json.dumps({title: asdict(row) for title, row in rows.items()}, indent=2))
        return
    table = [
        {"": title} | {column: f"{asdict(row)[column]:{format_}}" for column, format_ in FORMATS}
        for title, row in rows.items()
    ]
    print_table(Table(table, title=name))
    for title, row in rows.items():
        echo(
            f"{title}: clients of {row.smallest:,} to {row.largest:,} samples;"
            f" {row.fewest_classes} to {row.most_classes} classes per client,"
            f" {row.mean_classes:.1f} on average;"
            f" {row.train:,} for training, {row.test:,} for the test ({row.test_set}),"
            f" {row.validation:,} for validation by the server"
        )
        if row.test_overlap:
            echo(
                f"{title}: {100 * row.test_overlap:.1f} % of the test samples are also in some"
                " client's training part; data.partition=class-sizes shares out without overlap"
            )


@group.command()
def plot(
    name: Name,
    settings: Settings = None,
    alpha: Annotated[
        list[float] | None,
        typer.Option(help="Concentration to draw a row for; those of the paper by default."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the PNG files.")] = None,
    data_root_: DataRoot = None,
) -> None:
    """Draw how classes are spread over clients, and a contact sheet of the clients' images."""
    del data_root_
    source = _configured(name, settings)
    federation = _load(source)
    folder = out or Path("plots")
    folder.mkdir(parents=True, exist_ok=True)
    rows = _rows(source, federation, alpha)
    written = [save_figure(class_mix_figure(rows), folder / f"{name}-classes.png")]
    if len(federation.input_shape) == 3:
        written.append(draw_contact_sheet(federation, folder / f"{name}-samples.png"))
    for path in written:
        echo(f"wrote {path}")


def prepare_all(sources: Sequence[DataSource]) -> None:
    """Decodes what is not decoded yet, with a progress bar on a terminal."""
    for source in dict.fromkeys(sources):
        with sample_progress() as callback:
            source.prepare(data_root(), callback)


@contextmanager
def sample_progress() -> Iterator[Callback]:
    """A bar for preparing samples, on a terminal."""
    with _bars(TextColumn("preparing"), MofNCompleteColumn(), transient=True) as bars:
        task = bars.add_task("preparing", total=None, visible=False)

        class Bar(Callback):
            def on_progress(self, done: int, total: int) -> None:
                bars.update(task, completed=done, total=total, visible=True)

        yield Bar()


@contextmanager
def byte_progress() -> Iterator[OnBytes | None]:
    """A bar per download; None where there is no terminal."""
    with _bars(TextColumn("{task.description}"), DownloadColumn()) as bars:
        tasks: dict[str, Any] = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file)
            bars.update(tasks[file], completed=done, total=total)

        yield None if bars.disable else show


def _bars(before: ProgressColumn, after: ProgressColumn, *, transient: bool = False) -> Progress:
    """Bars between two columns; none where there is no terminal."""
    console = Console(stderr=True)
    columns, hidden = (before, BarColumn(), after), not console.is_terminal
    return Progress(*columns, console=console, transient=transient, disable=hidden)


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _configured(name: str, settings: list[str] | None) -> DataSource:
    return read_options(DATASETS.get(name), apply_overrides({}, settings or []), name)


def _load(source: DataSource) -> Federation:
    prepare_all([source])
    return source.load(data_root())


def _rows(
    source: DataSource, federation: Federation, alphas: list[float] | None
) -> list[tuple[str, Federation]]:
    partition = source.partition if isinstance(source, SharedOut) else ""
    if alphas and partition != "quantity" and not partition.startswith("dirichlet"):
        raise ConfigError("--alpha: this partition has no concentration α")
    if not alphas and partition != "dirichlet":
        return [("", federation)]
    assert isinstance(source, SharedOut)  # noqa: S101 - narrows the type
    return [
        (f"α = {alpha:g}", replace(source, alpha=alpha).load(data_root()))
        for alpha in alphas or ALPHAS
    ]
