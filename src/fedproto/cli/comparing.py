"""The command that compares runs: a table, and figures when asked for."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedproto.errors import ConfigError, unknown_name
from fedproto.report.figures import save_figures
from fedproto.report.results import StoredRun, find_runs, group_by_seed, main_score
from fedproto.report.summary import Summary, summarize
from fedproto.tasks import is_share


def add_to(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command()(compare)


def compare(
    directories: Annotated[list[Path], typer.Argument(help="Runs, sweeps or folders of them.")],
    metric: Annotated[
        str | None, typer.Option(help="The score to compare by; the task's main one by default.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Also show when this score is reached.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="One row per run, not per group.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures as PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="The table as CSV.")] = False,
) -> None:
    """Compare runs; those that differ only in the seed share a row."""
    runs = find_runs(directories, _say)
    metric = metric or main_score(runs)
    _check_target(target, metric)
    groups = _groups(runs, metric, each)
    rows = summarize(groups, metric, target)
    if len({run.config.evaluate.every for run in runs if not run.config.strategy.pooled}) > 1:
        typer.echo(
            "not all runs were tested after the same rounds; on the same data they are compared at"
            " the rounds they share",
            err=True,
        )
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif as_csv:
        _print_csv(rows)
    else:
        _print_table(_with_seeds(rows) if each else rows, metric, target)
    if plots is not None:
        for path in save_figures(groups, metric, plots):
            typer.echo(f"wrote {path}", err=True)


def _with_seeds(rows: Iterable[Summary]) -> list[Summary]:
    return [replace(row, title=f"{row.title} · seed {row.seeds[0]}") for row in rows]


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _check_target(target: float | None, metric: str) -> None:
    if target is not None and is_share(metric) and not 0 <= target <= 1:
        raise ConfigError(
            f"--target {target:g}: {metric} lies between 0 and 1; write {target / 100:g} for"
            f" {target:g} %"
        )


def _print_csv(rows: Sequence[Summary]) -> None:
    """One line a row; a figure's deviation beside its mean, lists with spaces between."""
    flat = []
    for row in rows:
        cells: dict[str, Any] = {
            name: " ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in asdict(row).items()
            if name != "values"
        }
        for name, (mean, deviation) in row.values.items():
            cells |= {name: mean, f"{name} std": deviation}
        flat.append(cells)
    names = list(dict.fromkeys(name for cells in flat for name in cells))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)


def print_comparison(directories: Iterable[Path]) -> None:
    """The table of runs that have just ended."""
    runs = find_runs(directories)
    metric = runs[0].config.stop.metric or main_score(runs)
    groups = _groups(runs, metric, each=False)
    _print_table(summarize(groups, metric, None), metric, None)


def comparison_table(rows: list[Summary], metric: str, target: float | None) -> Table:
    """The rows for a terminal."""
    table = Table(
        title=f"{metric} and loss: mean over the last 10 % of the rounds",
        caption="area: mean of the curve over all rounds; ±: standard deviation over seeds",
    )
    table.add_column("run", min_width=12)
    columns: dict[str, Callable[[Summary], str]] = {
        "seeds": lambda row: str(row.runs),
        "rounds": lambda row: str(row.rounds),
    }
    # Scores between 0 and 1 are shown as percentages, losses and margins as they are.
    percent = is_share(metric)
    factor, digits, unit = (100, 1, " %") if percent else (1, 3, "")
    columns[metric + unit] = lambda row: _shown(row, metric, factor, digits)
    columns["loss"] = lambda row: _shown(row, "loss")
    columns["area" + unit] = lambda row: _shown(row, "area", factor, digits)
    if target is not None:
        columns[f"rounds to {target:g}"] = lambda row: _shown(row, "rounds to target", digits=0)
    columns["MB up"] = lambda row: _shown(row, "bytes up", 1e-6, 1, spread=False)
    columns["MB down"] = lambda row: _shown(row, "bytes down", 1e-6, 1, spread=False)
    columns["s"] = lambda row: _shown(row, "seconds", digits=0, spread=False)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.title, *(cell(row) for cell in columns.values()))
    return table


def _groups(runs: list[StoredRun], metric: str, each: bool) -> list[list[StoredRun]]:
    begun = [run for run in runs if run.records]
    if not begun:
        raise ConfigError("none of these runs has finished a round yet")
    known = {name for run in begun for record in run.records for name in record.metrics}
    if metric not in known:
        raise ConfigError(unknown_name("metric", metric, known))
    return [[run] for run in begun] if each else group_by_seed(begun)


def _shown(
    row: Summary, name: str, factor: float = 1, digits: int = 3, *, spread: bool = True
) -> str:
    if name not in row.values:
        return "–"
    mean, std = (value * factor for value in row.values[name])
    return f"{mean:.{digits}f}" + (f" ± {std:.{digits}f}" if spread and row.runs > 1 else "")


def _print_table(rows: list[Summary], metric: str, target: float | None) -> None:
    console = Console()
    # A pipe or a file has no width of its own; rows are then never cut.
    wide = console if console.is_terminal else Console(width=160)
    wide.print(comparison_table(rows, metric, target))
