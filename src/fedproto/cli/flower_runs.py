"""The runs that a command of Flower is about: a recipe's, made now, or those to go on with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedproto.cli.running import fresh_directory
from fedproto.config import RunConfig
from fedproto.config.recipe import read_recipe
from fedproto.errors import ConfigError, StoreError
from fedproto.flower.defence import defended
from fedproto.rounds import load_federations
from fedproto.store import RunStore, is_run
from fedproto.store.sweeps import create_sweep, extend, is_sweep, open_runs


def runs_of(
    source: str, overrides: Sequence[str] | None, out: Path | None, rounds: int | None
) -> tuple[Path, list[RunStore]]:
    """The directory of a recipe's runs, made now, or of runs to go on with."""
    found = _going_on(source, overrides, out, rounds)
    if found is not None:
        return found
    return _new_runs(source, read_recipe(source, overrides or []), out)


def runs_here(
    source: str, overrides: Sequence[str] | None, out: Path | None, rounds: int | None
) -> tuple[Path, list[RunStore], int]:
    """The same where all data is on this machine, with the number of clients.

    The data is loaded before anything is written, so that a mistake leaves nothing behind.
    """
    found = _going_on(source, overrides, out, rounds)
    if found is not None:
        path, stores = found
        return path, stores, _number_of_clients([store.config for store in stores])
    configs = read_recipe(source, overrides or [])
    clients = _number_of_clients(configs.values())
    known = {
        name: replace(config, flower=replace(config.flower, clients=clients))
        for name, config in configs.items()
    }
    return *_new_runs(source, known, out), clients


def _going_on(
    source: str, overrides: Sequence[str] | None, out: Path | None, rounds: int | None
) -> tuple[Path, list[RunStore]] | None:
    path = Path(source)
    if not (is_run(path) or is_sweep(path)):
        if rounds is not None:
            raise ConfigError(
                f"--rounds is for a run that goes on; for a new one: --set schedule.rounds={rounds}"
            )
        return None
    if overrides or out:
        raise ConfigError(f"{source} is a run: it goes on as it is, without --set and --out")
    if rounds is not None:
        extend(path, rounds)
    stores = open_runs(path)
    if all(store.finished for store in stores):
        raise StoreError(f"{source} is finished; give it more rounds with --rounds")
    return path, stores


def _new_runs(
    source: str, configs: Mapping[str, RunConfig], out: Path | None
) -> tuple[Path, list[RunStore]]:
    configs = {name: defended(config) for name, config in configs.items()}
    for config in configs.values():
        config.aggregate.check_fits(
            config.schedule.cohort,
            pooled=config.strategy.pooled,
            weighs_tensors=config.method.weighs_rows,
        )
    path = out or fresh_directory(source)
    if len(configs) > 1:
        return path, create_sweep(path, configs)
    (config,) = configs.values()
    return path, [RunStore.create(path, config)]


def _number_of_clients(configs: Iterable[RunConfig]) -> int:
    numbers = {len(federation.clients) for federation in load_federations(configs).values()}
    if len(numbers) > 1:
        raise ConfigError(f"the runs have different numbers of clients: {sorted(numbers)}")
    return numbers.pop()
