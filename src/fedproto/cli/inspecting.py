"""Commands that inspect: list, info, check."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from fedproto.cli.terminal import Directories, echo, plain, wide_console
from fedproto.config import CHOICES, SECTIONS
from fedproto.config.recipe import bundled_recipes, recipe_summary
from fedproto.config.run import dotted_names
from fedproto.data import DATASETS, data_root
from fedproto.engines.base import ENGINES
from fedproto.errors import ConfigError, StoreError, unknown_name
from fedproto.measures import MEASURES
from fedproto.options import Description, Options, Registry, describe
from fedproto.store.checking import check_run, check_sweep
from fedproto.store.run import devices, package_versions
from fedproto.store.sweeps import is_sweep

KINDS = ("strategies", "datasets", "models", "engines", "measures", "recipes")
OPTIONS = "options"
KIND_OF = {"strategy": "strategies", "data": "datasets", "model": "models"}


class Entry(NamedTuple):
    """An item of a list: name, summary and perhaps options."""

    name: str
    summary: str
    options: Sequence[Description] = ()


def check(paths: Directories) -> None:
    """Check run directories for damage, and name recoverable parts."""
    # What is there, not what a sweep's list names: the list may be what is damaged.
    runs = [file.parent for path in paths for file in sorted(path.rglob("run.json"))]
    sweeps = [
        path for path in dict.fromkeys((*paths, *(run.parent for run in runs))) if is_sweep(path)
    ]
    if not runs and not sweeps:
        raise StoreError(f"{paths[0]} holds no run: no run.json in it or below")
    broken = 0
    for result in (*map(check_sweep, sweeps), *map(check_run, runs)):
        state = "damaged" if result.faults else "OK"
        echo(f"{result.path}: {state} ({result.found})")
        for fault in result.faults:
            echo(f"  {fault}")
        if result.faults:
            echo(f"  recoverable: {result.remedy}")
            broken += 1
    if broken:
        raise typer.Exit(1)


def list_known(
    kind: Annotated[
        str | None,
        typer.Argument(
            help=f"What to list: {', '.join(KINDS)}; the name of one, or of a section such as"
            " 'train', for its options; 'options' for all sections."
        ),
    ] = None,
) -> None:
    """List strategies, data sets, models, engines, measures, recipes and options."""
    known = {name: entries(name) for name in ([kind] if kind else KINDS)}
    console = wide_console()
    for name, found in known.items():
        table = Table(title=name, title_justify="left")
        table.add_column("name", no_wrap=True)
        table.add_column("what it is")
        for entry in found:
            table.add_row(plain(entry.name), plain(entry.summary.replace("``", "")))
            for option in entry.options if name not in KINDS else []:
                table.add_row(
                    plain(f"  {option.name} = {option.default}"),
                    plain(f"{option.help} ({option.type})", "dim"),
                )
        console.print(table)
    if kind is None:
        console.print(
            "Options of each: fedproto list NAME. Sections of a recipe: fedproto list options."
        )
    elif kind in registries()["strategies"].names():
        console.print(
            "Sections that combine with every strategy (fedproto list SECTION): head, serve,"
            " privacy, server, aggregate, train, schedule."
        )


def info() -> None:
    """Show versions, devices and which data sets can be loaded here."""
    root = data_root()
    versions = {"python": platform.python_version(), **package_versions()}
    lines = [f"{name}: {version or 'not installed'}" for name, version in versions.items()]
    lines += ["", *devices(), "", f"data root: {root}"]
    lines += [f"{name}: {DATASETS.get(name).status(root)}" for name in DATASETS.names()]
    echo("\n".join(lines))


def registries() -> dict[str, Registry[Any]]:
    """The registries by kind; imports everything that can be named."""
    choices = {kind: CHOICES[section] for section, kind in KIND_OF.items()}
    return {**choices, "engines": ENGINES, "measures": MEASURES}


def entries(kind: str) -> list[Entry]:
    """All of a kind such as ``strategies``; all sections for ``options``; one section; one name."""
    known, kind = registries(), KIND_OF.get(kind, kind)
    if kind == "recipes":
        return [Entry(name, recipe_summary(path)) for name, path in bundled_recipes().items()]
    if kind == OPTIONS:
        return [_described(name, section) for name, section in SECTIONS.items()]
    if kind in known:
        found = [_described(name, known[kind].get(name)) for name in known[kind].names()]
        if kind == "engines":
            found.insert(0, Entry("auto", "The fastest for the device and the amount of work."))
        return found
    if kind in SECTIONS:
        return [_described(kind, SECTIONS[kind])]
    found = [_described(kind, each.get(kind)) for each in known.values() if kind in each.names()]
    if not found:
        names = [name for registry in known.values() for name in registry.names()]
        lists = [f"fedproto list {one.partition('.')[0]}" for one in dotted_names(kind)]
        hint = f"it is an option: {' or '.join(lists)}" if lists else None
        known_names = [*KINDS, OPTIONS, *SECTIONS, *names]
        raise ConfigError(unknown_name("kind, section or name", kind, known_names, hint))
    return found


def _described(name: str, cls: type) -> Entry:
    options = describe(cls) if issubclass(cls, Options) else []
    return Entry(name, (inspect.getdoc(cls) or "").splitlines()[0], options)
