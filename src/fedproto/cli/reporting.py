"""Commands that analyse trained runs and write the page about them: analyse, report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.console import Console
from rich.progress import track

from fedproto.api.predictor import analyse
from fedproto.api.table import Table
from fedproto.api.training import load
from fedproto.cli.terminal import Best, Directories, Metric, Target, echo, print_table
from fedproto.data import DataSource, Federation, data_root
from fedproto.engines.auto import threads
from fedproto.engines.base import available_cores
from fedproto.errors import ConfigError, DataError, FedprotoError
from fedproto.measures.scores import CLIENT_SCORES
from fedproto.report.analysing import PARTS
from fedproto.report.arrangement import arrange
from fedproto.report.html import write_page
from fedproto.report.panels import ClientData
from fedproto.report.results import StoredRun, find_runs

COLUMNS = {
    **{
        prefix + score: f"{title} %"
        for score in ("accuracy", "miou")
        for prefix, title in CLIENT_SCORES.items()
    },
    "ece": "ECE %",
    "aggregate_mean_margin": "AMM",
    "dissimilarity": "dissimilarity",
    "mmd": "MMD²",
}

Outcome: TypeAlias = "dict[str, float] | FedprotoError"
"""What was measured of a model; or why it was not analysed."""


def analyse_runs(
    directories: Directories,
    what: Annotated[
        list[str] | None,
        typer.Option(help=f"Compute this part or measure alone; repeatable: {', '.join(PARTS)}."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A finished run of strategy 'centralized', for MMD.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=4, help="Maximum number of features in the t-SNE.")
    ] = 2000,
    best: Best = False,
) -> None:
    """Analyse the newest models of runs; files go to the folder 'analysis' of each."""
    runs = find_runs(directories)
    titles = {group.runs[0].path: group.title for group in arrange(runs).split().groups}
    rows, failed = [], []
    for run, facts in zip(
        runs, _analysed(runs, what, best, reference=reference, samples=samples), strict=True
    ):
        if isinstance(facts, FedprotoError):
            failed.append(facts)
            continue
        cells = {
            column: f"{100 * facts[name]:.1f}" if column.endswith("%") else f"{facts[name]:.4g}"
            for name, column in COLUMNS.items()
            if name in facts
        }
        rows.append({"run": titles[run.path], **cells})
        echo(f"wrote {run.path / 'analysis'}", err=True)
    if rows:
        print_table(Table(rows))
    for error in failed[1:]:
        echo(f"error: {error}", err=True)
    if failed:
        raise failed[0]


def _analysed(
    runs: Sequence[StoredRun], what: Sequence[str] | None, best: bool, **options: Any
) -> Iterator[Outcome]:
    """The analysis of each run, in their order; on a CPU several are analysed at once."""
    data = {source: _federation(source) for source in {run.config.data for run in runs}}

    def analysed(run: StoredRun) -> Outcome:
        federation = data[run.config.data]
        if isinstance(federation, FedprotoError):
            return type(federation)(f"{run.path}: {federation}")
        try:
            result = load(run.path, data=federation, best=best)
            metrics: dict[str, float] = analyse(result, what, **options)["metrics"]
            return metrics
        except FedprotoError as error:
            return error

    cores = 1 if torch.cuda.is_available() else max(1, min(available_cores(), len(runs)))
    console = Console(stderr=True)
    pool = ThreadPoolExecutor(cores)
    # One thread each: two that wait for each other collapse on a machine that is busy.
    with threads(1) if cores > 1 else nullcontext():
        try:
            yield from track(
                pool.map(analysed, runs),
                "runs",
                len(runs),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
        finally:
            pool.shutdown(cancel_futures=True)


def _federation(source: DataSource | None) -> Federation | FedprotoError:
    """The data of runs, or why it cannot be loaded."""
    if source is None:
        return ConfigError(
            "runs that were started from Python with own data are analysed from there:"
            " fedproto.analyse(fedproto.load(run, model=..., data=...))"
        )
    try:
        return source.load(data_root())
    except FedprotoError as error:
        return DataError(
            f"{error}; to analyse a run takes its data: do so where that is, or name its folder"
            " with --data-root ('fedproto predict' and 'fedproto export' do without)"
        )


def report(
    directories: Directories,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: report.html in the directory.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    metric: Metric = None,
    target: Target = None,
    data: Annotated[
        bool,
        typer.Option("--data/--no-data", help="Show scores by clients' samples and classes."),
    ] = True,
) -> None:
    """Write a self-contained HTML page about finished or unfinished runs."""
    file = out or (directories[0] if len(directories) == 1 else Path()) / "report.html"
    problems = write_page(
        directories,
        file,
        title=title,
        metric=metric,
        target=target,
        data=ClientData() if data else None,
    )
    for problem in problems:
        echo(f"skipped: {problem}", err=True)
    echo(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
