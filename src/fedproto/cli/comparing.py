"""Commands about the records of runs: compare, best, report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedproto.api.table import comparison
from fedproto.cli.terminal import AsJson, Directories, Metric, Target, echo, print_table
from fedproto.config.recipe import recipe_text
from fedproto.data.tasks import is_share, lower_is_better
from fedproto.errors import ConfigError
from fedproto.report.arrangement import Arrangement, arrange
from fedproto.report.figures import FigureFormat, FigureWidth, save_figures
from fedproto.report.html import write_page
from fedproto.report.results import StoredRun, find_runs, main_score
from fedproto.report.summary import summarize
from fedproto.store import RunStore

Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Method to compare with; default: FedAvg, or the method with most pairs.",
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(min=0, help="Margin of equivalence; default: 0.01 for shares, else none."),
]
_MOST_NOTICES = 5


def compare(
    directories: Directories,
    metric: Metric = None,
    target: Target = None,
    baseline: Baseline = None,
    margin: Margin = None,
    each: Annotated[bool, typer.Option("--each", help="One row per run, not per group.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Write figures to this folder.")] = None,
    plot_format: Annotated[FigureFormat, typer.Option(help="Format of the figures.")] = "png",
    plot_width: Annotated[FigureWidth, typer.Option(help="Width of the figures.")] = "page",
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as Markdown.")
    ] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="Print the table as LaTeX.")] = False,
) -> None:
    """Compare methods under each condition, seed by seed; seeds of one method share a row."""
    found = find_runs(directories, lambda text: echo(f"left out: {text}", err=True))
    runs = [tested for run in found for tested in run.all_tested()]
    metric = main_score(runs, metric)
    if target is not None and is_share(metric) and not 0 <= target <= 1:
        raise ConfigError(
            f"--target {target:g}: {metric} lies between 0 and 1; write {target / 100:g} for"
            f" {target:g} %"
        )
    arrangement = _arranged(runs)
    shown = arrangement.split() if each else arrangement
    rows = summarize(shown, metric, target, baseline, margin)
    if len({run.config.evaluate.every for run in runs if not run.config.strategy.pooled}) > 1:
        echo(
            "not all runs were tested after the same rounds; on the same data they are compared at"
            " the rounds they share",
            err=True,
        )
    table = comparison(rows, metric, target)
    if as_json:
        echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif as_csv:
        echo(table.to_csv(), nl=False)
    elif as_latex:
        echo(table.to_latex(), nl=False)
    elif as_markdown:
        echo(table.to_markdown(), nl=False)
    else:
        print_table(table)
    if plots is not None:
        for path in save_figures(arrangement, metric, plots, plot_format, plot_width, rows):
            echo(f"wrote {path}", err=True)


def print_comparison(directories: Iterable[Path]) -> None:
    """The table of runs that have just ended."""
    runs = find_runs(directories)
    metric = main_score(runs, runs[0].config.stop.metric)
    print_table(comparison(summarize(_arranged(runs), metric), metric))


def best(
    directories: Directories,
    by: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Score to choose by; default: a validation score."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of configurations to list.")] = 10,
) -> None:
    """Sort configurations by a score; print the best as a recipe on standard output."""
    runs = [run for run in find_runs(directories) if run.records]
    metric = main_score(runs, by)
    if by is None:
        metric = f"validation_{metric.removeprefix('validation_')}"
    rows = [row for row in summarize(arrange(runs), metric) if metric in row.values]
    if not rows:
        raise ConfigError(
            "these runs have no validation score to choose by; train with data.validation = 0.1,"
            " or name a score: --by accuracy"
        )
    if not metric.startswith("validation_"):
        echo(f"{metric} is a score on test data: the best one is biased upwards", err=True)
    rows.sort(key=lambda row: row.values[metric][0], reverse=not lower_is_better(metric))
    if len({len(row.seeds) for row in rows}) > 1:
        echo("not all configurations have the same number of seeds", err=True)
    echo(str(comparison(rows[:top], metric, brief=True)), err=True)
    winner = RunStore.open(Path(rows[0].directories[0])).config
    tables = winner.to_recipe()
    if len(rows[0].seeds) > 1:
        tables["sweep"] = {"seed": rows[0].seeds}
    given = "" if winner.data and winner.model else ", without the data or model given in Python"
    echo(f"\nbest by {metric}: {rows[0].title}; its recipe{given}:", err=True)
    typer.echo(recipe_text(tables), nl=False)


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


def _arranged(runs: list[StoredRun]) -> Arrangement:
    begun = [run for run in runs if run.records]
    if not begun:
        raise ConfigError("none of these runs has finished a round yet")
    arrangement = arrange(begun)
    notices = arrangement.notices
    for text in notices[:_MOST_NOTICES]:
        echo(text, err=True)
    if len(notices) > _MOST_NOTICES:
        echo(f"and {len(notices) - _MOST_NOTICES} more seeds stored twice", err=True)
    return arrangement
