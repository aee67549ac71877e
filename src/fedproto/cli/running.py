"""Commands that train: run, sweep, resume."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedproto.cli.data import prepare_all
from fedproto.cli.options import DataRoot
from fedproto.cli.outcome import conclude
from fedproto.cli.progress import progress_for
from fedproto.config import RunConfig
from fedproto.config.recipe import read_recipe
from fedproto.data import DataSource, Federation
from fedproto.errors import ConfigError, unknown_name
from fedproto.simulate import load_federations, simulate
from fedproto.store import RunStore, open_or_create
from fedproto.store.extending import extend
from fedproto.store.sinks import check_sinks, logging_to
from fedproto.store.sweeps import create_sweep, open_runs

Recipe = Annotated[
    str,
    typer.Argument(help="A TOML file, or the name of a bundled recipe (fedproto list recipes)."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change an option, e.g. schedule.delta=0.8."),
]
Scale = Annotated[
    str | None,
    typer.Option(help="A smaller version that the recipe describes, such as 'quick'."),
]
Out = Annotated[
    Path | None, typer.Option(help="Directory for the results; a new one under runs/ by default.")
]
Reuse = Annotated[
    bool, typer.Option("--reuse", help="Continue or reuse what --out holds, if it is the same.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON object a round on standard output, no progress.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL", help="Only the runs of this label; may be given several times."),
]
LogTo = Annotated[
    list[str] | None,
    typer.Option(
        "--log-to",
        metavar="NAME",
        help="Also send metrics to tensorboard or wandb; may be given several times.",
    ),
]
Rounds = Annotated[
    int | None, typer.Option(min=1, help="Go on to so many rounds in all, even if it is over.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No table at the end.")]


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    scale: Scale = None,
    out: Out = None,
    reuse: Reuse = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_to: LogTo = None,
    data_root: DataRoot = None,
) -> None:
    """Train one strategy as a recipe says."""
    del data_root
    check_sinks(log_to or [])
    configs = read_recipe(recipe, overrides or [], scale)
    if len(configs) > 1:
        raise ConfigError(
            f"recipe {recipe} describes {len(configs)} runs; start them with 'fedproto sweep'"
        )
    path = out or fresh_directory(recipe)
    config = next(iter(configs.values())).located()
    federations = _load([config])
    store = open_or_create(path, config) if reuse else RunStore.create(path, config)
    _carry_out([store], path, federations, log_to or [], as_json=as_json, quiet=quiet)


def sweep(
    recipe: Recipe,
    overrides: Overrides = None,
    scale: Scale = None,
    out: Out = None,
    reuse: Reuse = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    only: Only = None,
    log_to: LogTo = None,
    data_root: DataRoot = None,
) -> None:
    """Train all runs of a recipe together."""
    del data_root
    check_sinks(log_to or [])
    read = _labelled(read_recipe(recipe, overrides or [], scale), only or [])
    configs = {name: config.located() for name, config in read.items()}
    path = out or fresh_directory(recipe)
    federations = _load(configs.values())
    stores = create_sweep(path, configs, reuse=reuse)
    _carry_out(stores, path, federations, log_to or [], as_json=as_json, quiet=quiet)


def resume(
    directory: Annotated[Path, typer.Argument(help="Directory of a run or a sweep.")],
    as_json: AsJson = False,
    quiet: Quiet = False,
    log_to: LogTo = None,
    rounds: Rounds = None,
    data_root: DataRoot = None,
) -> None:
    """Continue a run or sweep that was stopped, or is to have more rounds."""
    del data_root
    check_sinks(log_to or [])
    if rounds is not None:
        extend(directory, rounds)
    stores = open_runs(directory)
    federations = _load(store.config for store in stores if not store.finished)
    _carry_out(stores, directory, federations, log_to or [], as_json=as_json, quiet=quiet)


def _carry_out(
    stores: Sequence[RunStore],
    path: Path,
    federations: Mapping[DataSource, Federation],
    log_to: Sequence[str],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    if not as_json:
        runs = "1 run" if len(stores) == 1 else f"{len(stores)} runs"
        typer.echo(f"{runs} in {path}", err=True)
    try:
        with (
            progress_for(stores, as_json) as progress,
            logging_to(log_to, stores, progress) as watcher,
        ):
            simulate(stores, watcher, federations)
    except KeyboardInterrupt:
        done = sum(len(store.records()) for store in stores)
        typer.echo(f"stopped; {done} rounds are safe: fedproto resume {path}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps({"finished": True, "directory": str(path)}))
    conclude(stores, quiet=quiet or as_json)


def _load(configs: Iterable[RunConfig]) -> dict[DataSource, Federation]:
    """Prepares, with progress, and loads the data of some runs."""
    configs = list(configs)
    prepare_all([config.data for config in configs if config.data is not None])
    return load_federations(configs)


def _labelled(configs: dict[str, RunConfig], labels: Sequence[str]) -> dict[str, RunConfig]:
    """The runs with one of the labels; all runs when none is given."""
    if not labels:
        return configs
    known = {config.title for config in configs.values()}
    for label in labels:
        if label not in known:
            raise ConfigError(f"--only: {unknown_name('label', label, known)}")
    return {name: config for name, config in configs.items() if config.title in labels}


def fresh_directory(recipe: str) -> Path:
    """A directory under runs/ that is not there yet, named after a recipe."""
    stem = Path(recipe).stem
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := Path("runs") / name).exists())
