"""Checking a run directory: damaged and recoverable parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedproto.disk.files import is_there
from fedproto.disk.integrity import DamagedError, read_sealed
from fedproto.errors import StoreError, counted
from fedproto.store.checkpoints import BEST, read_kept, round_of
from fedproto.store.run import RunStore
from fedproto.store.sweeps import run_directories

KEPT = ("clients/*/round-*.safetensors", "nodes/*/*/round-*.safetensors")
"""What clients remember: those of a simulation, and nodes that were started beside the server."""


@dataclass
class CheckResult:
    """The state of a run directory.

    Attributes:
        found: The undamaged parts, in a few words.
        faults: The damaged parts; empty for an undamaged directory.
        remedy: The recoverable parts and how to recover them; empty without damage.
    """

    path: Path
    found: str = ""
    faults: list[str] = field(default_factory=list)
    remedy: str = ""


def check_run(path: Path) -> CheckResult:
    """Reads everything in a run directory and compares it with its fingerprints.

    A run may be writing there: checkpoints are listed before records are read, because a round's
    record is written first, and files that a run has removed in between are not missed.

    Raises:
        StoreError: If a file cannot be read at all.
    """
    try:
        store = RunStore.open(path)
    except StoreError as error:
        return CheckResult(
            path,
            faults=[str(error)],
            remedy="the weights in its checkpoints may be whole, but cannot be told from those of"
            " another run without run.json",
        )
    checkpoints, records = store.checkpoints(), 0
    faults: list[str] = []
    steps: list[str] = []
    try:
        for _ in store.iterate_records():
            records += 1
    except StoreError as error:
        faults.append(str(error).partition(";")[0])
        steps.append(f"keep the first {records} lines of rounds.jsonl alone")
    usable = _usable(store, checkpoints, records, faults)
    if damaged := [file.name for file in checkpoints if file not in usable and file.exists()]:
        steps.insert(0, f"delete {', '.join(damaged)} from checkpoints")
    if is_there(path / "checkpoints" / BEST):
        faults += _faults(store.load_best)
    found = f"{counted(records, 'round')}, {counted(len(usable), 'checkpoint')}"
    if store.format == 1:
        found += "; begun without fingerprints, so older parts are only readable"
    beside, remedy = _check_beside(path), ""
    if faults:
        newest = max(map(round_of, usable), default=0)
        steps.append(f"'fedproto resume {path}' continues from round {newest}")
        remedy = "; then ".join(steps)
    elif beside:
        remedy = "records and checkpoints: export, compare and report work"
    return CheckResult(path, found, faults + beside, remedy)


def _usable(
    store: RunStore, checkpoints: list[Path], records: int, faults: list[str]
) -> list[Path]:
    """The checkpoints from which the run can continue; faults of others are added."""
    usable = []
    for file in checkpoints:
        try:
            if store.read_checkpoint(file).round > records:
                raise DamagedError("is intact, but records before it are missing")
            usable.append(file)
        except DamagedError as error:
            if file.exists():
                faults.append(f"{file} {error}")
    return usable


def check_sweep(path: Path) -> CheckResult:
    """The same for the files of a sweep beside its runs."""
    remedy = "its runs, which are checked one by one"
    try:
        found = f"a list of runs, {len(run_directories(path))} of them started"
    except StoreError as error:
        return CheckResult(path, "", [str(error)], remedy)
    return CheckResult(path, found, _check_beside(path), remedy)


def _check_beside(path: Path) -> list[str]:
    """The damage in the files of a deployment, and in what clients kept."""
    faults = _faults(read_sealed, path / "clients.json", "restore it from a copy")
    for file in sorted(one for kept in KEPT for one in path.glob(kept)):
        found = _faults(read_kept, file)
        faults += found if file.exists() else []
    return faults


def _faults(read: Callable[..., object], *given: object) -> list[str]:
    """Why something cannot be read; empty where it can."""
    try:
        read(*given)
    except StoreError as error:
        return [str(error)]
    return []
