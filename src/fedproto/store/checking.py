"""Looking through a run directory: what is damaged, and what can be saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.disk.files import content, is_there
from fedproto.disk.integrity import DamagedError, read_lines, unsealed
from fedproto.errors import StoreError
from fedproto.store.checkpoints import BEST, read_kept
from fedproto.store.run import RunStore
from fedproto.store.sweeps import run_directories

AUDIT_FILE = "audit.jsonl"
SEALED = ("clients.json", "suspensions.json")
"""Written by a deployment beside its runs."""

KEPT = ("clients/*/round-*.safetensors", "nodes/*/*/round-*.safetensors")
"""What clients remember: those of a simulation, and nodes that were started beside the server."""


@dataclass
class CheckResult:
    """The state of a run directory.

    Attributes:
        found: The undamaged parts, in a few words.
        faults: The damaged parts; empty for an undamaged directory.
        remedy: What can be saved and how; empty where nothing is damaged.
    """

    path: Path
    found: str = ""
    faults: list[str] = field(default_factory=list)
    remedy: str = ""


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """The events of a deployment's log, oldest first; none where there is none."""
    return read_lines(folder / AUDIT_FILE)


def check_run(path: Path) -> CheckResult:
    """Reads everything in a run directory and compares it with its fingerprints.

    A run may be writing there: checkpoints are listed before records are read, because a round's
    record is written first, and files that a run has removed in between are not missed.

    Raises:
        StoreError: If something cannot be read at all, which says nothing of its content.
    """
    result = CheckResult(path)
    try:
        store = RunStore.open(path)
    except StoreError as error:
        result.faults.append(str(error))
        result.remedy = (
            "the weights in its checkpoints may be whole, but cannot be told from those of another"
            " run without run.json"
        )
        return result
    checkpoints, records, steps = store.checkpoints(), 0, []
    try:
        for _ in store.iterate_records():
            records += 1
    except StoreError as error:
        result.faults.append(str(error).partition(";")[0])
        steps.append(f"keep the first {records} lines of rounds.jsonl alone")
    usable, damaged = _check_checkpoints(store, checkpoints, records, result.faults)
    if damaged:
        steps.insert(0, f"delete {', '.join(damaged)} from checkpoints")
    result.found = f"{_number(records, 'round')}, {_number(len(usable), 'checkpoint')}"
    if store.format == 1:
        result.found += "; begun without fingerprints, so older parts are only readable"
    beside = _check_beside(path)
    if result.faults:
        steps.append(f"'fedproto resume {path}' goes on from round {max(usable, default=0)}")
        result.remedy = "; then ".join(steps)
    elif beside:
        result.remedy = "records and checkpoints: export, compare and report work"
    result.faults += beside
    return result


def _check_checkpoints(
    store: RunStore, checkpoints: list[Path], records: int, faults: list[str]
) -> tuple[list[int], list[str]]:
    """The rounds from which the run can go on, and the names of damaged checkpoints."""
    usable, damaged = [], []
    for file in checkpoints:
        try:
            round_ = store.read_checkpoint(file).round
            if round_ > records:
                raise DamagedError("is whole, but records before it are missing")
            usable.append(round_)
        except DamagedError as error:
            if file.exists():
                damaged.append(file.name)
                faults.append(f"{file} {error}")
    if is_there(store.path / "checkpoints" / BEST):
        try:
            store.load_best()
        except StoreError as error:
            faults.append(str(error))
    return usable, damaged


def check_sweep(path: Path) -> CheckResult:
    """The same for the files of a sweep beside its runs."""
    remedy = "its runs, which are checked one by one"
    try:
        found = f"a list of runs, {len(run_directories(path))} of them begun"
    except StoreError as error:
        return CheckResult(path, "", [str(error)], remedy)
    return CheckResult(path, found, _check_beside(path), remedy)


def _check_beside(path: Path) -> list[str]:
    """The damage in the files of a deployment, and in what clients kept."""
    faults = []
    try:
        read_audit(path)
    except StoreError as error:
        faults.append(str(error))
    for name in SEALED:
        try:
            if is_there(path / name):
                unsealed(content(path / name))
        except DamagedError as error:
            faults.append(f"{path / name} is damaged: {error}")
    for file in sorted(one for kept in KEPT for one in path.glob(kept)):
        try:
            read_kept(file)
        except StoreError as error:
            if file.exists():
                faults.append(str(error))
    return faults


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
