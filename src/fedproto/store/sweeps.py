"""The directory of a sweep: ``sweep.json``, and a run directory per run; and where runs are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedproto.config import RunConfig, differences, read_config
from fedproto.config.upgrade import upgraded
from fedproto.disk.files import Folder, content, is_there
from fedproto.disk.integrity import DamagedError, sealed, unsealed
from fedproto.errors import ConfigError, FedprotoError, StoreError
from fedproto.store.run import RunStore, is_run

FILE = "sweep.json"


def is_sweep(path: Path) -> bool:
    """Whether a directory holds a sweep."""
    return is_there(path / FILE)


def create_sweep(
    path: Path, configs: Mapping[str, RunConfig], *, reuse: bool = False
) -> list[RunStore]:
    """Run directories for all runs of a sweep.

    The list of runs is written before any of them begins, so that a sweep stopped at any moment
    can be continued as a whole.

    With `reuse` an existing sweep continues: runs of the same name and configuration are taken
    as they are, missing ones are added to the list, and those not asked for stay in it.

    Returns:
        The runs asked for, in their order.
    """
    for name in configs:
        _check_name(name)
    folder, tables = Folder(path), {name: config.to_dict() for name, config in configs.items()}
    with folder.made():
        if is_sweep(path):
            if not reuse:
                raise StoreError(
                    f"{path} holds a sweep already; continue it with 'fedproto resume {path}', add"
                    " missing runs to it with --reuse, or choose another directory"
                )
            known = _read(path)
            for name in known.keys() & configs.keys():
                about = f" '{name}'", "give the variant another label, or "
                _check_same(path, known[name].located(), configs[name].located(), *about)
            tables |= _tables(path)  # those that are there stay as they are
        elif not folder.is_empty():
            raise StoreError(f"{path} is not empty and holds no sweep; choose another directory")
        folder.write(FILE, sealed({"runs": tables}))
    return [open_or_create(inside(path, name), config) for name, config in configs.items()]


def inside(path: Path, name: str) -> Path:
    """A folder of a sweep or a tuning; a link is refused, for it may lead to any directory."""
    if (path / name).is_symlink():
        raise StoreError(f"{path / name} is a symbolic link, which is not followed; remove it")
    return path / name


def _check_same(
    path: Path, was: RunConfig, now: RunConfig, which: str = "", label: str = ""
) -> None:
    """Checks that a run that is asked for again has the configuration of before."""
    if was.digest() == now.digest():
        return
    different, rounds, more = differences(was, now), now.schedule.rounds, ""
    if different == ["schedule.rounds"] and rounds > was.schedule.rounds:
        own = now.data is None or now.model is None  # only the program that has them can continue
        extended = f"call fedproto.extend('{path}', {rounds}) before"
        more = f", or {extended if own else f'fedproto resume {path} --rounds {rounds}'}"
    raise StoreError(
        f"{path} holds a run{which} of another configuration (it differs in"
        f" {', '.join(different)}); {label}choose another directory{more}"
    )


def open_or_create(path: Path, config: RunConfig) -> RunStore:
    """The run directory of a configuration: the one that is there, or a new one."""
    if not is_run(path):
        try:
            return RunStore.create(path, config)
        except StoreError:
            if not is_run(path):  # otherwise another process made it this moment
                raise
    store = RunStore.open(path)
    _check_same(path, store.config.located(), config.located())
    return store


def open_runs(path: Path) -> list[RunStore]:
    """The run of a directory, or the runs of a sweep, begun or not."""
    if is_sweep(path):
        return [open_or_create(inside(path, name), one) for name, one in _read(path).items()]
    if not is_run(path):
        raise StoreError(f"{path} holds neither a run nor a sweep")
    return [RunStore.open(path)]


def found_in(path: Path) -> list[Path]:
    """As `run_directories`; a path without any run is refused."""
    if not path.exists():
        raise StoreError(f"{path} does not exist")
    if not (found := run_directories(path)):
        raise StoreError(f"{path} holds no run: no run.json in it or below")
    return found


def run_directories(path: Path) -> list[Path]:
    """Where the runs in and below a directory are; a sweep's in its recipe's order."""
    if is_run(path):
        return [path]
    if is_sweep(path):
        return [run for name in _tables(path) if is_run(run := inside(path, name))]
    # Unlike `Path.rglob`, it passes over folders that vanish or cannot be read meanwhile.
    return sorted(Path(folder) for folder, _, files in os.walk(path) if "run.json" in files)


def _read(path: Path) -> dict[str, RunConfig]:
    try:
        return {name: read_config(upgraded(table)) for name, table in _tables(path).items()}
    except (AttributeError, TypeError, FedprotoError) as error:
        raise StoreError(
            f"{path / FILE} cannot be read ({error}); name a plugin that it needs with"
            " --plugin, or start the sweep again"
        ) from None


def _tables(path: Path) -> dict[str, Any]:
    """The runs' configurations as they are written, by name."""
    file = path / FILE
    try:
        tables = dict(unsealed(content(file), required=False)["runs"])
        for name in tables:
            _check_name(name)
        if not tables or not all(isinstance(table, dict) for table in tables.values()):
            raise ValueError("it lists no runs with their options")
        return tables
    except (OSError, KeyError, TypeError, ValueError, DamagedError, FedprotoError) as error:
        raise StoreError(f"{file} cannot be read ({error}); start the sweep again") from None


def _check_name(name: str) -> None:
    """A run's name becomes a folder of the sweep: it must not lead anywhere else."""
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name or "\\" in name:
        raise StoreError(f"a run cannot be called {name!r}")


def extend(directory: Path | str, rounds: int) -> None:
    """Extends a run, or all runs of a sweep, to a larger number of rounds.

    They continue as if they had had this number from the start; nothing is trained here.

    Raises:
        ConfigError: If a run has more rounds already, or its learning rate depends on their number.
        StoreError: If there is no run, or a description cannot be written.
    """
    path = Path(directory)
    if not (is_run(path) or is_sweep(path)):
        raise StoreError(f"{path} holds neither a run nor a sweep")
    configs = _read(path) if is_sweep(path) else {}
    stores = [RunStore.open(each) for each in run_directories(path)]
    for store in stores:
        planned = store.config.schedule.rounds
        if rounds < planned:
            raise ConfigError(
                f"{store.path} already has {planned} rounds; --rounds must be larger (got {rounds})"
            )
        if rounds != planned and store.config.train.rate_needs_rounds:
            raise ConfigError(
                f"{store.path} has a learning rate that depends on the number of rounds; start a"
                f" new run of {rounds} rounds"
            )
    for store in stores:
        if store.config.schedule.rounds != rounds:
            with store.folder.locked():
                store.reconfigure(store.config.of_rounds(rounds))
    if configs:
        # Last, so that the same call finishes what a kill interrupted.
        tables = {name: config.of_rounds(rounds).to_dict() for name, config in configs.items()}
        folder = Folder(path)
        with folder.made():  # what another process added meanwhile stays as it is
            folder.write(FILE, sealed({"runs": _tables(path) | tables}))
