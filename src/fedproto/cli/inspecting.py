"""Commands that look: list, info, check."""

from __future__ import annotations

import enum
import inspect
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedproto.checking import check_run
from fedproto.data import DATASETS, data_root
from fedproto.engines import ENGINES
from fedproto.environment import devices, package_versions
from fedproto.measures.base import MEASURES
from fedproto.models import MODELS
from fedproto.options import Options, describe
from fedproto.recipe import bundled_recipes, recipe_summary
from fedproto.registry import Registry
from fedproto.report.results import found_in
from fedproto.sinks import SINKS
from fedproto.strategies import STRATEGIES

REGISTRIES: dict[str, Registry[Any]] = {
    "strategies": STRATEGIES,
    "datasets": DATASETS,
    "models": MODELS,
    "engines": ENGINES,
    "measures": MEASURES,
    "sinks": SINKS,
}
Kind = enum.Enum("Kind", {name: name for name in (*REGISTRIES, "recipes")}, type=str)  # type: ignore[misc]


def add_to(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("list")(list_known)
    app.command()(info)
    app.command()(check)


def check(
    paths: Annotated[list[Path], typer.Argument(help="Runs, sweeps or folders of them.")],
) -> None:
    """Look for damage in run directories and say what can be saved."""
    broken = 0
    for directory in found_in(paths):
        verdict = check_run(directory)
        typer.echo(f"{directory}: {'damaged' if verdict.faults else 'whole'}; {verdict.found}")
        for fault in verdict.faults:
            typer.echo(f"  {fault}")
        if verdict.faults:
            typer.echo(f"  what can be saved: {verdict.remedy}")
            broken += 1
    if broken:
        raise typer.Exit(1)


def list_known(
    kind: Annotated[
        Kind | None, typer.Argument(help="Show only these, with their options.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List strategies, data sets, models, engines, measures, sinks and recipes."""
    kinds = [kind.value] if kind else [each.value for each in Kind]
    known = {name: _entries(name) for name in kinds}
    if as_json:
        typer.echo(json.dumps(known, indent=2, ensure_ascii=False))
        return
    console = Console()
    for name, entries in known.items():
        table = Table("name", "what it is", title=name, title_justify="left", expand=True)
        for entry in entries:
            table.add_row(entry["name"], entry["summary"])
            for option in entry["options"] if kind else []:
                table.add_row(
                    f"  {option['name']} = {option['default']}",
                    f"[dim]{option['help']} ({option['type']})[/dim]",
                )
        console.print(table)
    if kind is None:
        console.print("Options of each: fedproto list strategies (or datasets, models).")


def info(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show versions, devices and which data sets can be loaded here."""
    root = data_root()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": package_versions(),
        "devices": devices(),
        "data root": str(root),
        "data sets": {name: DATASETS.get(name).status(root) for name in DATASETS.names()},
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None)
    for name, fact in facts.items():
        lines = (
            [f"{key}: {value or 'not installed'}" for key, value in fact.items()]
            if isinstance(fact, dict)
            else [fact]
            if isinstance(fact, str)
            else fact
        )
        table.add_row(name, "\n".join(lines))
    Console().print(table)


def _entries(kind: str) -> list[dict[str, Any]]:
    if kind == "recipes":
        return [
            {"name": name, "summary": recipe_summary(path), "options": []}
            for name, path in bundled_recipes().items()
        ]
    registry = REGISTRIES[kind]
    entries = []
    for name in registry.names():
        cls = registry.get(name)
        options = describe(cls) if issubclass(cls, Options) else []
        entries.append(
            {
                "name": name,
                "summary": (inspect.getdoc(cls) or "").splitlines()[0],
                "options": [vars(option) for option in options],
            }
        )
    return entries
