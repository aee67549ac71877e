"""Commands that train: run, sweep, resume, tune."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedproto.api.progress import progress_for, time_in_words
from fedproto.api.result import hardly_learned, refusals
from fedproto.api.table import Table
from fedproto.api.tuning import planned, tune, tuned_recipe
from fedproto.cli.comparing import print_comparison
from fedproto.cli.data import prepare_all
from fedproto.cli.terminal import echo
from fedproto.config import RunConfig
from fedproto.config.recipe import read_recipe, read_tables, recipe_text
from fedproto.data import DataSource, Federation
from fedproto.disk.files import explained, write_output
from fedproto.errors import ConfigError, counted, unknown_name
from fedproto.rounds import Run, load_federations, runs_from, train
from fedproto.rounds.run import demand_of, named_data
from fedproto.store import RunStore, open_or_create
from fedproto.store.sweeps import create_sweep, extend, inside, open_runs, run_directories
from fedproto.types import num_bytes

Recipe = Annotated[
    str, typer.Argument(help="A TOML file, or a bundled recipe by name (fedproto list recipes).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change an option, e.g. schedule.delta=0.8."),
]
Scale = Annotated[str | None, typer.Option(help="A smaller version of the recipe, e.g. 'quick'.")]
Out = Annotated[
    Path | None, typer.Option(help="Directory for the results; default: a new one under runs/.")
]
Reuse = Annotated[
    bool, typer.Option("--reuse", help="Continue the runs in --out, and train missing ones.")
]
Rounds = Annotated[
    int | None, typer.Option(min=1, help="Continue up to this total number of rounds.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Train two rounds, print time and disk space, and stop.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table at the end.")]


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    scale: Scale = None,
    out: Out = None,
    reuse: Reuse = False,
    quiet: Quiet = False,
    dry_run: DryRun = False,
) -> None:
    """Train one strategy, as a recipe describes."""
    configs = read_recipe(recipe, overrides or [], scale)
    if len(configs) > 1:
        raise ConfigError(
            f"recipe {recipe} describes {len(configs)} runs; start them with 'fedproto sweep'"
        )
    make = open_or_create if reuse else RunStore.create

    def create(path: Path, configs: Mapping[str, RunConfig]) -> list[RunStore]:
        return [make(path, *configs.values())]

    _start(recipe, configs, create, out, quiet=quiet, dry_run=dry_run)


def sweep(
    recipe: Recipe,
    overrides: Overrides = None,
    scale: Scale = None,
    out: Out = None,
    reuse: Reuse = False,
    quiet: Quiet = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Train runs with this label alone; repeatable."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train all runs of a recipe together."""
    configs = _labelled(read_recipe(recipe, overrides or [], scale), only or [])
    create = partial(create_sweep, reuse=reuse)
    _start(recipe, configs, create, out, quiet=quiet, dry_run=dry_run)


def resume(
    directory: Annotated[Path, typer.Argument(help="Directory of a run or a sweep.")],
    quiet: Quiet = False,
    rounds: Rounds = None,
) -> None:
    """Continue a stopped run or sweep, or extend it by more rounds."""
    if rounds is not None:
        prolong(directory, rounds)
    stores = open_runs(directory)
    federations = load(store.config for store in stores if not store.finished)
    _train(stores, directory, federations, quiet=quiet)


def prolong(directory: Path, rounds: int) -> None:
    """Extends runs, unless only a program can continue them: that is said before any changes."""
    for path in run_directories(directory):
        named_data(RunStore.open(path).config)
    extend(directory, rounds)


def tune_recipe(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
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
            choices = tune(tuning, inside(path, "trials"), federations, [callback])
    except KeyboardInterrupt:
        echo(f"stopped; the same command with --out {path} continues", err=True)
        raise typer.Exit(130) from None
    tuned, file = tuned_recipe(tables, [trial for trial, _ in choices]), path / "tuned.toml"
    write_output(file, recipe_text(tuned).encode())
    rows = [
        {"method": trial.method, "validation": score, **trial.chosen} for trial, score in choices
    ]
    echo(str(Table(rows)))
    echo(f"\ntrain them with: fedproto sweep {file}", err=True)


def _start(
    recipe: str,
    configs: Mapping[str, RunConfig],
    create: Callable[[Path, Mapping[str, RunConfig]], list[RunStore]],
    out: Path | None,
    *,
    quiet: bool,
    dry_run: bool,
) -> None:
    """Trains new runs, whose data is loaded before their directories are made."""
    configs = {name: config.located() for name, config in configs.items()}
    federations = load(configs.values())
    if dry_run:
        _rehearse(configs, federations)
    else:
        path = out or fresh_directory(recipe)
        _train(create(path, configs), path, federations, quiet=quiet)


def _train(
    stores: Sequence[RunStore],
    path: Path,
    federations: Mapping[DataSource, Federation],
    *,
    quiet: bool,
) -> None:
    begun = sum(bool(store.records()) for store in stores)
    over = sum(store.finished for store in stores)
    found = (
        f"; found {over} finished and {begun - over} begun,"
        f" {len(stores) - begun} to be trained from the start"
    )
    plan = _plan([store.config for store in stores], federations, f" in {path}")
    echo(plan + (found if begun else ""), err=True)
    try:
        with progress_for(stores) as progress:
            train(runs_from(stores, federations), [progress])
    except KeyboardInterrupt:
        done = sum(len(store.records()) for store in stores)
        echo(f"stopped; {done} rounds are safe: fedproto resume {path}", err=True)
        raise typer.Exit(130) from None
    conclude(stores, quiet=quiet)
    if not quiet:
        ways = f"fedproto report {path}, fedproto compare {path}"
        first = f", fedproto export {stores[0].path}" if stores else ""
        echo(f"next: {ways}{first}", err=True)


def _plan(
    configs: Sequence[RunConfig], federations: Mapping[DataSource, Federation], where: str = ""
) -> str:
    """Runs, rounds, and the disk space of the weights in checkpoints."""
    size = 0
    sizes: dict[tuple[object, object], int] = {}
    for config in configs:
        kept, rounds = config.store, config.schedule.rounds
        if config.data is None or config.data not in federations or not kept.checkpoint_every:
            continue
        key = (config.data, config.model)
        if key not in sizes:
            state = Run(config, federations[config.data]).initial_state()
            sizes[key] = num_bytes(state.params, state.buffers)
        made = -(-rounds // kept.checkpoint_every)
        size += sizes[key] * min(kept.keep or made, made)
    rounds = sum(config.schedule.rounds for config in configs)
    weights = f", {size / 1e6:.1f} MB of weights on disk" if size else ""
    return f"{counted(len(configs), 'run')}{where}: {counted(rounds, 'round')}{weights}"


def _rehearse(named: Mapping[str, RunConfig], federations: Mapping[DataSource, Federation]) -> None:
    """Trains two rounds of the first run in memory, and prints the estimated time of all."""
    configs = list(named.values())
    first = configs[0]
    assert first.data is not None  # noqa: S101 - it was loaded
    federation = federations[first.data]
    # The first round is slower: it warms up.
    run = Run(first.of_rounds(2), federation)
    run.train()
    steps = sum(
        demand_of([each], federations[each.data]).steps for each in configs if each.data is not None
    )
    each = demand_of([run.config], federation).steps / 2
    left = time_in_words(run.records[-1].seconds * steps / each)
    for name, config in named.items():
        echo(f"  {name}: {config.schedule.rounds} rounds")
    echo(_plan(configs, federations))
    echo(f"about {left} if all rounds took as long as the second one of {first.title}")


def load(configs: Iterable[RunConfig]) -> dict[DataSource, Federation]:
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
    """A new directory under runs/, named after a recipe; of two processes each gets its own."""
    stem, runs = Path(recipe).stem, Path("runs")
    with explained(runs, " cannot be made", ""):
        runs.mkdir(exist_ok=True)
        for name in itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2))):
            with contextlib.suppress(FileExistsError):
                (runs / name).mkdir()
                break
    return runs / name


def conclude(stores: Sequence[RunStore], *, quiet: bool) -> None:
    """Prints the comparison and rejected updates; exits with 1 if most were."""
    if not quiet:
        print_comparison([store.path for store in stores])
    failed = False
    for store in stores:
        records = store.records()
        complaint = refusals(records)
        if complaint is not None:
            echo(f"{store.config.title}: {complaint}", err=True)
        failed = failed or hardly_learned(records)
    if failed:
        echo("error: a model has hardly learned; see the messages above and rounds.jsonl", err=True)
        raise typer.Exit(1)
