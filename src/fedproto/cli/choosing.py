"""Commands that choose among configurations: best, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedproto.api.progress import progress_for
from fedproto.api.table import Table, comparison
from fedproto.api.tuning import planned, tune, tuned_recipe
from fedproto.cli.running import Overrides, Recipe, fresh_directory, load
from fedproto.cli.terminal import Directories, echo
from fedproto.config.recipe import read_tables, recipe_text
from fedproto.data.tasks import lower_is_better
from fedproto.disk.files import explained, write_atomically
from fedproto.errors import ConfigError
from fedproto.report.arrangement import arrange
from fedproto.report.results import find_runs, main_score
from fedproto.report.summary import summarize
from fedproto.store import RunStore

TUNED = "tuned.toml"


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
    metric = by or f"validation_{metric.removeprefix('validation_')}"
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
    echo(f"\nbest by {metric}: {rows[0].title}; its recipe:", err=True)
    typer.echo(recipe_text(tables), nl=False)


def tune_recipe(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs; a stopped tuning continues there.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan without training.")
    ] = False,
) -> None:
    """Choose hyperparameters by validation data, with the same budget for every method."""
    tables = read_tables(recipe, overrides or [])
    tuning = planned(tables)
    rungs = ", then ".join(f"{number} for {rounds} rounds" for number, rounds in tuning.rungs)
    echo(
        f"{len(tuning.methods)} methods, each with {rungs} ({tuning.rounds_per_method} rounds in"
        " all)",
        err=True,
    )
    if dry_run:
        return
    federations = load([trial.config for trial in tuning.trials])
    path = out or fresh_directory(f"{Path(recipe).stem}-tuned")
    total = len(tuning.methods) * tuning.rounds_per_method
    try:
        with progress_for([], total=total) as callback:
            choices = tune(tuning, path / "trials", federations, [callback])
    except KeyboardInterrupt:
        echo("stopped; the same command continues from there", err=True)
        raise typer.Exit(130) from None
    tuned = tuned_recipe(tables, [trial for trial, _ in choices])
    with explained(path):
        write_atomically(path / TUNED, recipe_text(tuned).encode())
    rows = [
        {"method": trial.method, "validation": score, **trial.chosen} for trial, score in choices
    ]
    echo(str(Table(rows)))
    echo(f"\ntrain them with: fedproto sweep {path / TUNED}", err=True)
