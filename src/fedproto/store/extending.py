"""More rounds for runs that are over, or will be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedproto.errors import ConfigError, StoreError
from fedproto.store import RunStore, is_run
from fedproto.store.sweeps import is_sweep, rewrite_sweep, run_directories


def extend(directory: Path | str, rounds: int) -> None:
    """Lets a run, or all runs of a sweep, go on to a larger number of rounds.

    They go on as if they had been meant to take so many from the start; nothing is trained here.

    Raises:
        ConfigError: If a run has more rounds already, or its learning rate depends on their number.
        StoreError: If there is no run, or a description cannot be written.
    """
    path = Path(directory)
    if not (is_run(path) or is_sweep(path)):
        raise StoreError(f"{path} holds neither a run nor a sweep")
    stores = [RunStore.open(each) for each in run_directories(path)]
    for store in stores:
        _check(store, rounds)
    for store in stores:
        if store.config.schedule.rounds != rounds:
            schedule = replace(store.config.schedule, rounds=rounds)
            with store.locked():
                store.reconfigure(replace(store.config, schedule=schedule))
    if is_sweep(path):
        # Last, so that the same call finishes what a kill interrupted.
        rewrite_sweep(path, {"schedule.rounds": rounds})


def _check(store: RunStore, rounds: int) -> None:
    config = store.config
    if rounds < config.schedule.rounds:
        raise ConfigError(
            f"{store.path} is a run of {config.schedule.rounds} rounds, which {rounds} are not more"
            " than"
        )
    if rounds != config.schedule.rounds and config.train.rate_needs_rounds:
        raise ConfigError(
            f"{store.path} has a learning rate that depends on the number of rounds; start a new"
            f" run of {rounds} rounds"
        )
