"""The command that looks into trained runs: scores, calibration, measures, t-SNE, maps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedproto.analysis.runs import attention_spread, pearson
from fedproto.cli.options import DataRoot, Directories
from fedproto.cli.tables import print_table
from fedproto.data import DataSource, Federation, data_root
from fedproto.errors import ConfigError, FedprotoError
from fedproto.report.analysing import (
    MODEL_MEASURES,
    PARTS,
    AnalysisRequest,
    OnStep,
    analyse,
    possible_parts,
)
from fedproto.report.arrangement import arrange
from fedproto.report.results import StoredRun, find_runs
from fedproto.report.subject import open_subject
from fedproto.tasks import TASKS

MARGIN = "aggregate_mean_margin"
# The parts that the report page shows, and by what it is told whether one was made.
PAGE_PARTS = {
    "scores": "scores.json",
    "calibration": "calibration.json",
    "embedding": "embedding.json",
    "maps": "maps",
}
HEADLINES = tuple(task.headline for task in TASKS.values())
COLUMNS = {
    "accuracy": "accuracy %",
    "miou": "mIoU %",
    "worst tenth of clients": "10 % of clients below %",
    "ece": "ECE %",
    MARGIN: "AMM",
    "dissimilarity": "dissimilarity",
    "mmd": "MMD²",
    "attention": "attention ÷ equal",
}


def analyse_runs(
    directories: Directories,
    what: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part; may be given several times: {', '.join(PARTS)}."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A finished run of strategy 'centralized', for MMD.")
    ] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Of the measures only this; may be repeated: {', '.join(MODEL_MEASURES)}."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=4, help="Features in the t-SNE at most.")] = 2000,
    pictures: Annotated[int, typer.Option(min=0, help="Pictures that get maps.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a run.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Look into the newest models of runs; files go to the folder 'analysis' of each.

    Of several runs it also gives the correlation of the aggregate mean margin with the score.
    """
    del data_root
    request = AnalysisRequest(
        what=tuple(what or possible_parts(_say)),
        reference=None if reference is None else str(reference),
        samples=samples,
        pictures=pictures,
        measures=tuple(measure or ()),
    )
    runs = find_runs(directories)
    federations: dict[DataSource, Federation] = {}
    found = []
    with _progress(len(runs)) as step_of:
        for index, run in enumerate(runs):
            subject = open_subject(run.path, _federation(run, federations))
            found.append(analyse(subject, request, step_of(index, run)))
            if as_json:
                line = {"run": str(run.path), "round": subject.state.round, **found[-1]}
                typer.echo(json.dumps({**line, **_attention(run)}))
    if not as_json:
        _print_table(runs, found)
        for run in runs:
            typer.echo(f"wrote {run.path / 'analysis'}", err=True)
    _say_correlation(found, as_json)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def analyse_missing(directories: Sequence[Path]) -> None:
    """Makes what the report page shows of models, for all runs that lack some of it.

    A run that cannot be looked into, for want of its data or a checkpoint, is named and left out.
    """
    wanted = {name: PAGE_PARTS[name] for name in possible_parts(_say) if name in PAGE_PARTS}
    federations: dict[DataSource, Federation] = {}
    runs = find_runs(directories)
    with _progress(len(runs)) as step_of:
        for index, run in enumerate(runs):
            missing = [
                name for name, file in wanted.items() if not (run.path / "analysis" / file).exists()
            ]
            if not set(missing) - {"maps"}:  # only segmentation has them
                continue
            try:
                subject = open_subject(run.path, _federation(run, federations))
                analyse(subject, AnalysisRequest(what=tuple(missing)), step_of(index, run))
            except FedprotoError as error:
                typer.echo(f"not analysed: {error}", err=True)


def _federation(run: StoredRun, known: dict[DataSource, Federation]) -> Federation:
    source = run.config.data
    if source is None:
        raise ConfigError(
            f"{run.path} was started from Python with own data; look into it from there:"
            " fedproto.analyse(fedproto.load(run, model=..., data=...))"
        )
    if source not in known:
        known[source] = source.load(data_root())
    return known[source]


@contextmanager
def _progress(number: int) -> Iterator[Any]:
    """A bar on a terminal, silence elsewhere."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        bar = bars.add_task("", total=None)

        def step_of(index: int, run: StoredRun) -> OnStep:
            def step(text: str, done: int, total: int) -> None:
                title = f"{index + 1}/{number} {run.config.title}: {text}"
                bars.update(bar, description=title, completed=done, total=total)

            return step

        yield step_of


def _attention(run: StoredRun) -> dict[str, dict[str, float]]:
    spread = attention_spread(run.records)
    return {} if spread is None else {"attention": vars(spread)}


def _print_table(runs: Sequence[StoredRun], found: Sequence[dict[str, float]]) -> None:
    cells: dict[Path, dict[str, str]] = {}
    for run, facts in zip(runs, found, strict=True):
        cells[run.path] = {name: _shown(name, value) for name, value in facts.items()}
        spread = attention_spread(run.records)
        if spread is not None:
            cells[run.path]["attention"] = f"{spread.lowest:.2f} to {spread.highest:.2f}"
    groups = arrange(runs).split().groups
    rows = [cells[group.runs[0].path] for group in groups]
    columns = [name for name in COLUMNS if any(name in row for row in rows)]
    print_table(
        [group.title for group in groups],
        {COLUMNS[name]: [row.get(name, "–") for row in rows] for name in columns},
        least=[COLUMNS[name] for name in reversed(columns[1:])],
        caption="attention ÷ equal: smallest to largest weight relative to equal ones",
    )


def _shown(name: str, value: float) -> str:
    percent = COLUMNS.get(name, "").endswith("%")
    return f"{100 * value:.1f}" if percent else f"{value:.4g}"


def _say_correlation(found: Sequence[dict[str, float]], as_json: bool) -> None:
    """Prints the correlation of margin and score over runs, where there are enough of them."""
    metric = next((name for name in HEADLINES if any(name in facts for facts in found)), None)
    points = [
        (facts[MARGIN], facts[metric])
        for facts in found
        if metric is not None and MARGIN in facts and metric in facts
    ]
    if len(points) < 3:
        return
    try:
        result = pearson([margin for margin, _ in points], [score for _, score in points])
    except ConfigError as error:
        typer.echo(f"no correlation of AMM and {metric}: {error}", err=True)
        return
    if as_json:
        typer.echo(json.dumps({"correlation": ["aggregate_mean_margin", metric], **vars(result)}))
    else:
        typer.echo(
            f"AMM and {metric} over {result.number} runs: Pearson's ρ = {result.rho:.2f}"
            f" (p = {result.p_value:.2g})"
        )
