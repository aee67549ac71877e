"""Commands that analyse trained runs and write the page about them: analyse, report."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from fedproto.api.analysing import PARTS, analyse
from fedproto.api.table import Table
from fedproto.api.training import load
from fedproto.cli.terminal import Best, Directories, Metric, Target, echo, print_table
from fedproto.data import DataSource, Federation, data_root
from fedproto.errors import DataError, FedprotoError
from fedproto.measures.scores import CLIENT_SCORES
from fedproto.report.arrangement import arrange
from fedproto.report.html import write_page
from fedproto.report.results import find_runs

COLUMNS = {
    **{
        prefix + score: f"{title} %"
        for score in ("accuracy", "miou")
        for prefix, title in CLIENT_SCORES.items()
    },
    "aggregate_mean_margin": "AMM",
    "dissimilarity": "dissimilarity",
    "mmd": "MMD²",
}


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
    federation = cache(_federation)
    rows: list[dict[str, str]] = []
    failed: dict[str, FedprotoError] = {}  # what is wrong with all runs is said once
    for run in runs:
        try:
            result = load(run.path, data=federation(run.config.data), best=best)
            facts = analyse(result, what, reference=reference, samples=samples)["metrics"]
        except FedprotoError as error:
            failed.setdefault(str(error), error)
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
    if failed:
        *others, last = failed.values()
        for failure in others:
            echo(f"error: {failure}", err=True)
        raise last


def _federation(source: DataSource | None) -> Federation | None:
    """The data; None for data that was given in Python."""
    try:
        return None if source is None else source.load(data_root())
    except FedprotoError as error:
        raise DataError(
            f"{error}; to analyse a run takes its data: do so where that is, or name its folder"
            " with --data-root ('fedproto predict' and 'fedproto export' do without)"
        ) from None


def report(
    directories: Directories,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: report.html in the directory.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    metric: Metric = None,
    target: Target = None,
) -> None:
    """Write a self-contained HTML page about finished or unfinished runs."""
    file = out or (directories[0] if len(directories) == 1 else Path()) / "report.html"
    for problem in write_page(directories, file, title=title, metric=metric, target=target):
        echo(f"skipped: {problem}", err=True)
    echo(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
