"""The command that compares runs: a table with verdicts, and figures when asked for."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fedproto.cli.terminal import Directories, Metric, Target, echo, print_table
from fedproto.config import flatten
from fedproto.data.tasks import is_share
from fedproto.errors import ConfigError, printable, unknown_name
from fedproto.measures.scores import CLIENT_SCORES
from fedproto.report.arrangement import Arrangement, arrange
from fedproto.report.figures import FigureFormat, FigureWidth, save_figures
from fedproto.report.results import StoredRun, find_runs, main_score
from fedproto.report.statistics import FEWEST_PAIRS
from fedproto.report.summary import Summary, summarize

Baseline = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="What to compare with; by default FedAvg, or the method with most pairs.",
    ),
]
Margin = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="Differences within ± this are equivalent; 0.01 by default for scores from 0 to 1,"
        " none for other metrics.",
    ),
]
# What a narrow terminal does without, first things first.
_LEAST = (
    "wall s",
    "MB",
    "loss",
    "mean over rounds",
    "mean over rounds %",
    "at zero %",
    "rounds",
    "seeds",
    "worst tenth %",
    "mean client %",
    "95 % interval",
    "p",
)
_MOST_NOTICES = 5


def compare(
    directories: Directories,
    metric: Metric = None,
    target: Target = None,
    baseline: Baseline = None,
    margin: Margin = None,
    each: Annotated[bool, typer.Option("--each", help="One row per run, not per group.")] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder for figures.")] = None,
    plot_format: Annotated[
        FigureFormat, typer.Option(help="Format of the figures.")
    ] = FigureFormat.png,
    plot_width: Annotated[
        FigureWidth, typer.Option(help="Width of the figures: of a column, a page or a screen.")
    ] = FigureWidth.screen,
    as_json: Annotated[bool, typer.Option("--json", help="The table as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="The table as CSV.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    as_latex: Annotated[bool, typer.Option("--latex", help="The table as LaTeX.")] = False,
) -> None:
    """Compare methods under each condition, seed by seed; seeds of one method share a row."""
    runs = find_runs(directories, lambda text: echo(text, err=True))
    metric = metric or main_score(runs)
    _check_target(target, metric)
    arrangement = _arranged(runs, metric)
    shown = arrangement.split() if each else arrangement
    rows = summarize(shown, metric, target, baseline, margin)
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
    elif as_markdown or as_latex:
        table = _table(rows, metric, target)
        echo(table.latex() if as_latex else table.markdown())
    else:
        _table(rows, metric, target).print()
    if plots is not None:
        for path in save_figures(arrangement, metric, plots, plot_format, plot_width, rows):
            echo(f"wrote {path}", err=True)


def print_comparison(directories: Iterable[Path]) -> None:
    """The table of runs that have just ended."""
    runs = find_runs(directories)
    metric = runs[0].config.stop.metric or main_score(runs)
    _table(summarize(_arranged(runs, metric), metric), metric, None).print()


def _check_target(target: float | None, metric: str) -> None:
    if target is not None and is_share(metric) and not 0 <= target <= 1:
        raise ConfigError(
            f"--target {target:g}: {metric} lies between 0 and 1; write {target / 100:g} for"
            f" {target:g} %"
        )


def _arranged(runs: list[StoredRun], metric: str) -> Arrangement:
    begun = [run for run in runs if run.records]
    if not begun:
        raise ConfigError("none of these runs has finished a round yet")
    known = {name for run in begun for record in run.records for name in record.metrics}
    if metric not in known:
        raise ConfigError(unknown_name("metric", metric, known))
    arrangement = arrange(begun)
    notices = arrangement.notices
    for text in notices[:_MOST_NOTICES]:
        typer.echo(text, err=True)
    if len(notices) > _MOST_NOTICES:
        typer.echo(f"and {len(notices) - _MOST_NOTICES} more seeds stored twice", err=True)
    return arrangement


def _print_csv(rows: Sequence[Summary]) -> None:
    """One line a row; a figure's deviation beside its mean, lists with spaces between.

    Scores are fractions, traffic is in bytes, time in seconds.
    """
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


@dataclass(frozen=True)
class _Table:
    """The comparison as text: the titles of the rows, and the columns by their heads."""

    rows: list[str]
    columns: Mapping[str, list[str]]
    sections: list[str]
    title: str
    caption: str

    def print(self) -> None:
        """Writes it to the terminal, without the columns for which there is no room."""
        print_table(
            self.rows,
            self.columns,
            least=_LEAST,
            sections=self.sections,
            title=self.title,
            caption=self.caption,
        )

    def markdown(self) -> str:
        """A table for GitHub, documentation and notebooks."""
        lines = self._lines([("|", "\\|")])
        rule = ["---", *["---:"] * len(self.columns)]
        body = "\n".join(f"| {' | '.join(cells)} |" for cells in [lines[0], rule, *lines[1:]])
        return f"{body}\n\n{self.title}; {self.caption}."

    def latex(self) -> str:
        """A table for papers, which needs the package booktabs."""
        escaped = [(sign, f"\\{sign}") for sign in "%&_#"]
        head, *rows = (" & ".join(cells) for cells in self._lines([*escaped, *_LATEX.items()]))
        body = [f"{rows[0]} \\\\"]
        for index, row in enumerate(rows[1:], start=1):
            rule = "\\midrule\n" if self.sections[index] != self.sections[index - 1] else ""
            body.append(f"{rule}{row} \\\\")
        kinds = "l" + "r" * len(self.columns)
        return "\n".join(
            [
                f"\\begin{{tabular}}{{{kinds}}}\n\\toprule\n{head} \\\\\n\\midrule",
                *body,
                f"\\bottomrule\n\\end{{tabular}}\n% {self.title}; {self.caption}",
            ]
        )

    def _lines(self, escaped: Iterable[tuple[str, str]]) -> list[list[str]]:
        """The head and the rows as cells, with some characters replaced."""
        body = zip(self.rows, *self.columns.values(), strict=True)
        lines = [["method", *self.columns], *map(list, body)]
        for before, after in escaped:
            lines = [[cell.replace(before, after) for cell in line] for line in lines]
        return lines


_LATEX = {"±": "$\\pm$", "−": "$-$", "–": "--", "δ": "$\\delta$", "α": "$\\alpha$", "·": "$\\cdot$"}


# Long: all columns of the table, in their order.
def _table(rows: Sequence[Summary], metric: str, target: float | None) -> _Table:
    # Scores between 0 and 1 are shown as percentages, losses and margins as they are.
    factor, digits, unit = (100, 1, " %") if is_share(metric) else (1, 3, "")
    cells: dict[str, Callable[[Summary], str]] = {
        metric + unit: lambda row: _shown(row, metric, factor, digits)
    }
    compared = [row.against for row in rows if row.against is not None]
    enough = any(each.difference.pairs >= FEWEST_PAIRS for each in compared)
    if compared:
        cells["difference"] = lambda row: _difference(row, factor, digits, words=enough)
    if enough:
        cells["95 % interval"] = lambda row: _interval(row, factor, digits)
        cells["p"] = _p_value
    for name in CLIENT_SCORES.values():
        if any(name in row.values for row in rows):
            cells[f"{name} %"] = partial(_shown, name=name, factor=100, digits=1)
    cells["loss"] = lambda row: _shown(row, "loss")
    cells["mean over rounds" + unit] = lambda row: _shown(row, "mean over rounds", factor, digits)
    if target is not None:
        cells[f"rounds to {target:g}"] = lambda row: _shown(row, "rounds to target", digits=0)
    cells["seeds"] = lambda row: str(len(row.seeds))
    cells["rounds"] = lambda row: (
        str(row.rounds) if row.rounds >= row.planned else f"{row.rounds} of {row.planned}"
    )
    cells["MB"] = lambda row: (
        f"{1e-6 * (row.values['bytes up'][0] + row.values['bytes down'][0]):.1f}"
    )
    cells["wall s"] = lambda row: _shown(row, "seconds", digits=0, spread=False)
    return _Table(
        rows=[row.title for row in rows],
        columns={name: [cell(row) for row in rows] for name, cell in cells.items()},
        sections=[row.condition for row in rows],
        title=f"{metric} and loss: mean over the last 10 % of the rounds",
        caption=_caption(rows, metric),
    )


def _caption(rows: Sequence[Summary], metric: str) -> str:
    parts = []
    if any(len(row.seeds) > 1 for row in rows):
        parts.append("±: sample standard deviation over seeds")
    compared = [row.against for row in rows if row.against is not None]
    if compared:
        bases = " or ".join(dict.fromkeys(each.baseline for each in compared))
        parts.append(f"difference: from {bases} on the same seeds")
        tests = compared[0].comparisons
        margin = compared[0].margin
        if tests:
            parts.append(f"p: corrected for {tests} comparison{'s' if tests > 1 else ''} (Holm)")
            inside = "" if margin is None else _margin(margin, metric)
            parts.append(f"better or worse: p < 0.05{inside}")
        if any(not each.difference.pairs >= FEWEST_PAIRS for each in compared):
            parts.append(f"fewer than {FEWEST_PAIRS} seeds decide nothing")
        if any(each.at_round is not None for each in compared):
            parts.append("@ n: unfinished runs, compared at round n")
    return "; ".join(parts)


def _margin(margin: float, metric: str) -> str:
    unit = "" if not is_share(metric) else " point" if margin == 0.01 else " points"
    return f", equivalent: interval within ± {100 * margin if unit else margin:g}{unit}"


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
    text = f"{row.against.difference.mean * factor:+.{digits}f}"
    if words:
        text += f" {row.against.verdict}"
    return text if row.against.at_round is None else f"{text} @ {row.against.at_round}"


def _interval(row: Summary, factor: float, digits: int) -> str:
    found = None if row.against is None else row.against.difference
    if found is None or found.low is None or found.high is None:
        return "–"
    return f"{found.low * factor:+.{digits}f} to {found.high * factor:+.{digits}f}"


def _p_value(row: Summary) -> str:
    p = None if row.against is None else row.against.corrected_p
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"
