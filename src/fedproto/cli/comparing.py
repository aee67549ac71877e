"""The command that compares runs: a table with verdicts, and figures when asked for."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fedproto.cli.options import Directories, Metric, Target
from fedproto.cli.tables import echo, print_table
from fedproto.config import flatten
from fedproto.data.tasks import is_share
from fedproto.errors import ConfigError, printable, unknown_name
from fedproto.report.arrangement import Arrangement, arrange
from fedproto.report.evidence import FEWEST_PAIRS
from fedproto.report.figures import save_figures
from fedproto.report.results import StoredRun, find_runs, main_score
from fedproto.report.summary import Summary, summarize

Baseline = Annotated[
    str | None, typer.Option(metavar="METHOD", help="What to compare with; the first by default.")
]
# What a narrow terminal does without, first things first.
_LEAST = ("s", "MB down", "MB up", "rounds", "95 % interval", "loss", "seeds")


def compare(
    directories: Directories,
    metric: Metric = None,
    target: Target = None,
    baseline: Baseline = None,
    each: Annotated[bool, typer.Option("--each", help="One row per run, not per group.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures as PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="The table as CSV.")] = False,
) -> None:
    """Compare methods under each condition, seed by seed; seeds of one method share a row."""
    runs = find_runs(directories, lambda text: echo(text, err=True))
    metric = metric or main_score(runs)
    _check_target(target, metric)
    arrangement = _arranged(runs, metric)
    shown = arrangement.split() if each else arrangement
    rows = summarize(shown, metric, target, baseline)
    if len({run.config.evaluate.every for run in runs if not run.config.strategy.pooled}) > 1:
        echo(
            "not all runs were tested after the same rounds; on the same data they are compared at"
            " the rounds they share",
            err=True,
        )
    if as_json:
        echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif as_csv:
        _print_csv(rows)
    else:
        _print(rows, metric, target)
    if plots is not None:
        for path in save_figures(arrangement, metric, plots):
            echo(f"wrote {path}", err=True)


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
            for name, value in flatten(asdict(replace(row, values={}))).items()
        }
        for name, (mean, deviation) in row.values.items():
            cells |= {name: mean, f"{name} std": deviation}
        flat.append(cells)
    names = list(dict.fromkeys(name for cells in flat for name in cells))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(map(csv_cell, names))
    writer.writerows([csv_cell(cells.get(name, "")) for name in names] for cells in flat)


def csv_cell(value: Any) -> Any:
    """A value for CSV; text that a spreadsheet would take for a formula begins with a quote."""
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@＝＋－＠") else text


def print_comparison(directories: Iterable[Path]) -> None:
    """The table of runs that have just ended."""
    runs = find_runs(directories)
    metric = runs[0].config.stop.metric or main_score(runs)
    _print(summarize(_arranged(runs, metric), metric), metric, None)


def _arranged(runs: list[StoredRun], metric: str) -> Arrangement:
    begun = [run for run in runs if run.records]
    if not begun:
        raise ConfigError("none of these runs has finished a round yet")
    known = {name for run in begun for record in run.records for name in record.metrics}
    if metric not in known:
        raise ConfigError(unknown_name("metric", metric, known))
    return arrange(begun)


def _print(rows: Sequence[Summary], metric: str, target: float | None) -> None:
    # Scores between 0 and 1 are shown as percentages, losses and margins as they are.
    percent = is_share(metric)
    factor, digits, unit = (100, 1, " %") if percent else (1, 3, "")
    cells: dict[str, Callable[[Summary], str]] = {
        metric + unit: lambda row: _shown(row, metric, factor, digits)
    }
    compared = [row.against for row in rows if row.against is not None]
    enough = any(each.difference.pairs >= FEWEST_PAIRS for each in compared)
    if compared:
        cells["difference"] = lambda row: _difference(row, factor, digits, words=enough)
    if enough:
        cells["95 % interval"] = lambda row: _interval(row, factor, digits)
    cells["loss"] = lambda row: _shown(row, "loss")
    cells["area" + unit] = lambda row: _shown(row, "area", factor, digits)
    if target is not None:
        cells[f"rounds to {target:g}"] = lambda row: _shown(row, "rounds to target", digits=0)
    cells["seeds"] = lambda row: str(len(row.seeds))
    cells["rounds"] = lambda row: str(row.rounds)
    cells["MB up"] = lambda row: _shown(row, "bytes up", 1e-6, 1, spread=False)
    cells["MB down"] = lambda row: _shown(row, "bytes down", 1e-6, 1, spread=False)
    cells["s"] = lambda row: _shown(row, "seconds", digits=0, spread=False)
    caption = "area: mean of the whole curve"
    if any(len(row.seeds) > 1 for row in rows):
        caption = f"±: sample standard deviation over seeds; {caption}"
    if compared:
        caption += f"; difference: from {compared[0].baseline} on the same seeds"
        caption += "" if enough else f" (fewer than {FEWEST_PAIRS} decide nothing)"
    print_table(
        [row.title for row in rows],
        {name: [cell(row) for row in rows] for name, cell in cells.items()},
        least=[*_LEAST, "area" + unit],
        sections=[row.condition for row in rows],
        title=f"{metric} and loss: mean over the last 10 % of the rounds",
        caption=caption,
    )


def _shown(
    row: Summary, name: str, factor: float = 1, digits: int = 3, *, spread: bool = True
) -> str:
    if name not in row.values:
        return "–"
    mean, deviation = row.values[name]
    around = "" if deviation is None or not spread else f" ± {deviation * factor:.{digits}f}"
    return f"{mean * factor:.{digits}f}{around}"


def _difference(row: Summary, factor: float, digits: int, *, words: bool) -> str:
    if row.against is None:
        return "–"
    number = f"{row.against.difference.mean * factor:+.{digits}f}"
    return f"{number} {row.against.verdict}" if words else number


def _interval(row: Summary, factor: float, digits: int) -> str:
    found = None if row.against is None else row.against.difference
    if found is None or found.low is None or found.high is None:
        return "–"
    return f"{found.low * factor:+.{digits}f} to {found.high * factor:+.{digits}f}"
