"""Commands that look: list, info, check."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedproto.cli.options import AsJson, Directories
from fedproto.cli.tables import echo, plain
from fedproto.errors import StoreError
from fedproto.options.registry import extended
from fedproto.options.sources import summaries

KINDS = ("strategies", "datasets", "models", "engines", "measures", "sinks", "recipes")


def check(paths: Directories) -> None:
    """Look for damage in run directories and say what can be saved."""
    from fedproto.store.checking import check_run, check_sweep
    from fedproto.store.sweeps import is_sweep

    # What is there, not what a sweep's list names: the list may be what is damaged.
    runs = [file.parent for path in paths for file in sorted(path.rglob("run.json"))]
    sweeps = [
        path for path in dict.fromkeys((*paths, *(run.parent for run in runs))) if is_sweep(path)
    ]
    if not runs and not sweeps:
        raise StoreError(f"{paths[0]} holds no run: no run.json in it or below")
    broken = 0
    for verdict in (*map(check_sweep, sweeps), *map(check_run, runs)):
        state = "damaged" if verdict.faults else "whole"
        echo(f"{verdict.path}: {state}; {verdict.found}")
        for fault in verdict.faults:
            echo(f"  {fault}")
        if verdict.faults:
            echo(f"  what can be saved: {verdict.remedy}")
            broken += 1
    if broken:
        raise typer.Exit(1)


def list_known(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"Show only these, a line each: {', '.join(KINDS)}; with its options one of them,"
            " such as 'fedproto', or a section, such as 'train'; 'options' for all sections."
        ),
    ] = None,
    section: Annotated[
        str | None, typer.Argument(help="With 'options': only those of this section.")
    ] = None,
    as_json: AsJson = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="All options of everything, as a page.")
    ] = False,
) -> None:
    """List strategies, data sets, models, engines, measures, sinks, recipes and options."""
    if kind is None and not as_json and not markdown and not extended():
        known = {name: summaries(name) for name in KINDS}
    else:
        from fedproto.cli import catalogue  # imports everything that there is

        if markdown:
            echo(catalogue.as_markdown(), nl=False)
            return
        chosen = section if kind == catalogue.OPTIONS and section is not None else kind
        known = {name: catalogue.entries(name) for name in ([chosen] if chosen else KINDS)}
    if as_json:
        tables = {name: [asdict(entry) for entry in found] for name, found in known.items()}
        echo(json.dumps(tables, indent=2, ensure_ascii=False))
        return
    console = Console()
    for name, found in known.items():
        table = Table(title=name, title_justify="left", expand=True)
        widest = max((len(entry.name) for entry in found), default=0)
        table.add_column("name", no_wrap=True, min_width=widest)
        short = kind is None or kind in KINDS
        table.add_column("what it is", no_wrap=short, overflow="ellipsis" if short else "fold")
        for entry in found:
            table.add_row(plain(entry.name), plain(entry.summary))
            for option in entry.options if not short else []:
                table.add_row(
                    plain(f"  {option.name} = {option.default}"),
                    plain(f"{option.help} ({option.type})", "dim"),
                )
        console.print(table)
    if kind is None:
        console.print(
            "Options of each: fedproto list NAME. Sections of a recipe: fedproto list options."
        )
    elif kind in [entry.name for entry in summaries("strategies")]:
        console.print(
            "Sections that combine with every strategy (fedproto list SECTION): head, serve,"
            " server, aggregate, train, schedule."
        )


def info(as_json: AsJson = False) -> None:
    """Show versions, devices and which data sets can be loaded here."""
    from fedproto.data import DATASETS, data_root
    from fedproto.store.environment import devices, package_versions

    root = data_root()
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": package_versions(),
        "devices": devices(),
        "data root": str(root),
        "data sets": {name: DATASETS.get(name).status(root) for name in DATASETS.names()},
    }
    if as_json:
        echo(json.dumps(facts, indent=2))
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
        table.add_row(name, Text("\n").join(map(plain, lines)))
    Console().print(table)
