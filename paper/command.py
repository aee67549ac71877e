"""The command that reproduces the paper's tables and figures."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from fedproto.api.progress import progress_for
from fedproto.cli.data import prepare_all
from fedproto.engines.auto import threads
from fedproto.errors import ConfigError
from paper import reproduction
from paper.base import EXPERIMENTS
from paper.cases import SCALES, Scope
from paper.library import Library, run_name
from paper.output import Output
from paper.reproduction import ALL, Plan

Scale = enum.Enum("Scale", {name: name for name in SCALES}, type=str)  # type: ignore[misc]
_SMOKE = Scale("smoke")


# Long: its options are the command's documentation.
def reproduce(
    what: Annotated[
        list[str] | None, typer.Argument(help="Tables and figures (see --list), or 'all'.")
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="smoke: seconds; quick: minutes on a CPU; paper: as printed.")
    ] = _SMOKE,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="DATASET", help="Only this data set; may be given several times."),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Seeds per configuration; default: 1, or those of a study's recipes."
        ),
    ] = None,
    runs: Annotated[
        Path, typer.Option(help="Folder of the runs; those that exist in it are reused.")
    ] = Path("runs/reproduce"),
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for tables and figures; each scale (and --only) has its own inside."
        ),
    ] = Path("reproduced"),
    recipe: Annotated[
        list[str] | None,
        typer.Option(metavar="DATASET=RECIPE", help="Use this recipe for a data set."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[DATASET:]KEY=VALUE",
            help="Change an option of all runs, or of those of a data set.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and whether they exist.")
    ] = False,
    existing: Annotated[
        bool, typer.Option("--existing", help="Train nothing; make what the existing runs allow.")
    ] = False,
    first: Annotated[
        int | None,
        typer.Option(min=1, help="With --existing: use the first rounds alone, up to this number."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Minutes after which training stops, between rounds; call again to continue.",
        ),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
) -> None:
    """Reproduce tables and figures of the paper, from a checkout of the repository."""
    if list_all:
        _list()
        return
    if not what:
        raise ConfigError(f"name what to reproduce: {', '.join(EXPERIMENTS.names())} or {ALL}")
    if first is not None and not existing:
        raise ConfigError("--first is about runs that exist: add --existing")
    scope = Scope(
        scale=scale.value,
        seeds=seeds,
        only=tuple(only or ()),
        recipes=_recipes(recipe or []),
        settings=tuple(overrides or ()),
    )
    library = Library(runs, _notice, first)
    plan = reproduction.make_plan(what, scope, library, training=not existing)
    _announce(plan)
    with threads(1 if scope.scale == "smoke" else torch.get_num_threads()):
        try:
            if plan.missing and not existing:
                federations = reproduction.load_data(plan, prepare_all, _notice)
                if not dry_run:
                    done = reproduction.train(plan, library, federations, progress_for, minutes)
                    if not done:
                        _notice("out of time: the same command continues from here")
            if dry_run:
                _show_runs(plan)
            else:
                _render(plan, out, _command(what, plan, first))
        except KeyboardInterrupt:
            _notice("stopped; finished rounds are safe: the same command continues from there")
            raise typer.Exit(130) from None


def _render(plan: Plan, out: Path, command: str) -> None:
    scope = plan.scope
    facts = {"command": command, "scale": scope.scale, "seeds": scope.seeds}
    for name in plan.experiments:
        # The tables of some data sets replace no others.
        folder = out / scope.scale / "-".join(scope.only)
        output = Output(folder, _console(), _remark(scope))
        reproduction.render(plan, name, output, facts)
        for path in output.written:
            _notice(f"wrote {path}")


def _list() -> None:
    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", no_wrap=True)
    table.add_column("data sets")
    for name in EXPERIMENTS.names():
        experiment = EXPERIMENTS.get(name)
        table.add_row(name, experiment.title, ", ".join(experiment.cases))
    _console().print(table)


def _announce(plan: Plan) -> None:
    """Says what the figures can be compared with, before anything is computed."""
    names = dict.fromkeys(name for each in plan.experiments.values() for name in each.cases)
    stand_ins = [
        f"{case.stands_in} stands in for {case.title}"
        for case in plan.scope.cases(tuple(names))
        if case.stands_in
    ]
    if remark := _remark(plan.scope):
        _notice(f"{remark}, so a difference from its figures says nothing about the methods")
    for remark in stand_ins:
        _notice(remark)
    fate = "are to be trained" if plan.training else "are missing"
    _notice(f"{plan.found} runs exist, {len(plan.missing)} {fate}")


def _remark(scope: Scope) -> str:
    return "" if scope.scale == "paper" else f"scale {scope.scale}: not the paper's settings"


def _show_runs(plan: Plan) -> None:
    table = Table("data set", "run", "rounds", "where")
    found = [(each.request, str(each.run.path)) for one in plan.results.values() for each in one]
    for request, where in [*found, *((each, "to train") for each in plan.missing)]:
        rounds = str(request.config.schedule.rounds)
        table.add_row(request.case, run_name(request.config), rounds, where)
    _console().print(table)


def _recipes(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, separator, recipe = text.partition("=")
        if not separator or not recipe:
            raise ConfigError(f"--recipe {text}: write it as DATASET=RECIPE")
        found[name] = recipe
    return found


def _command(what: Sequence[str], plan: Plan, first: int | None) -> str:
    scope = plan.scope
    parts = ["fedproto reproduce", *what, f"--scale {scope.scale}"]
    parts += [] if plan.training else ["--existing"]
    parts += [f"--first {first}"] if first else []
    parts += [f"--seeds {scope.seeds}"] if scope.seeds else []
    parts += [f"--only {name}" for name in scope.only]
    parts += [f"--recipe {name}={recipe}" for name, recipe in scope.recipes.items()]
    parts += [f"--set {text}" for text in scope.settings]
    return " ".join(parts)


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    # A pipe or a file has no width of its own; rows are then never cut.
    return console if console.is_terminal else Console(stderr=stderr, width=140)


def _notice(text: str) -> None:
    typer.echo(text, err=True)
