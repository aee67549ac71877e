"""Commands that look: list, info, check."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedproto.registry import Registry, extended
from fedproto.sources import bundled_recipes, recipe_summary, registered

REGISTRIES = {
    "strategies": ("fedproto.strategies", "STRATEGIES"),
    "datasets": ("fedproto.data", "DATASETS"),
    "models": ("fedproto.models", "MODELS"),
    "engines": ("fedproto.engines", "ENGINES"),
    "measures": ("fedproto.measures.base", "MEASURES"),
    "sinks": ("fedproto.sinks", "SINKS"),
}
"""Where each registry is: a module, and its name there."""

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
    from fedproto.checking import check_run
    from fedproto.report.results import found_in

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
    brief = kind is None and not as_json and not extended()
    known = {name: _summaries(name) if brief else _entries(name) for name in kinds}
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
    from fedproto.data import DATASETS, data_root
    from fedproto.environment import devices, package_versions

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


def _summaries(kind: str) -> list[dict[str, Any]]:
    """Names and summaries alone, which need no import."""
    if kind == "recipes":
        found = {name: recipe_summary(path) for name, path in bundled_recipes().items()}
    else:
        found = registered(REGISTRIES[kind][0].removesuffix(".base"))
    return [{"name": name, "summary": text, "options": []} for name, text in found.items()]


def _entries(kind: str) -> list[dict[str, Any]]:
    """Names, summaries and options, also of plugins."""
    if kind == "recipes":
        return _summaries(kind)
    from fedproto.options import Options, describe

    module, variable = REGISTRIES[kind]
    registry: Registry[Any] = getattr(importlib.import_module(module), variable)
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
