"""Looking through a run directory: what is whole, what is damaged, and what can be saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.disk.files import content, is_there
from fedproto.disk.integrity import DamagedError, read_lines, unsealed
from fedproto.errors import StoreError
from fedproto.store import RunStore
from fedproto.store.checkpoints import BEST, read_kept
from fedproto.store.sweeps import run_directories

AUDIT_FILE = "audit.jsonl"
SEALED = ("clients.json", "suspensions.json")
"""What a deployment writes beside its runs."""

KEPT = ("clients/*/round-*.safetensors", "nodes/*/*/round-*.safetensors")
"""What clients remember: those of a simulation, and nodes that were started beside the server."""


@dataclass
class Verdict:
    """What is to be said of a run directory.

    Attributes:
        found: What is whole, in a few words.
        faults: What is damaged; empty for a whole directory.
        remedy: What can be saved and how; empty where nothing is damaged.
    """

    path: Path
    found: str = ""
    faults: list[str] = field(default_factory=list)
    remedy: str = ""


def read_audit(folder: Path) -> list[dict[str, Any]]:
    """The events of a deployment's log, oldest first; none where there is none."""
    return read_lines(folder / AUDIT_FILE)


def check_run(path: Path) -> Verdict:
    """Reads everything in a run directory and compares it with its fingerprints.

    A run may be writing there: checkpoints are listed before records are read, because a round's
    record is written first, and files that a run has removed in between are not missed.

    Raises:
        StoreError: If something cannot be read at all, which says nothing of its content.
    """
    verdict = Verdict(path)
    try:
        store = RunStore.open(path)
    except StoreError as error:
        verdict.faults.append(str(error))
        verdict.remedy = (
            "the weights in its checkpoints may be whole, but cannot be told from those of another"
            " run without run.json"
        )
        return verdict
    checkpoints = store.checkpoints()
    records, fault = _count_records(store)
    verdict.faults += [fault] if fault else []
    usable, damaged = _read_checkpoints(store, checkpoints, records, verdict)
    if is_there(path / "checkpoints" / BEST):
        try:
            store.load_best()
        except StoreError as error:
            verdict.faults.append(str(error))
    beside = _read_beside(path)
    verdict.found = f"{_number(records, 'round')}, {_number(len(usable), 'checkpoint')}"
    if store.format == 1:
        verdict.found += "; begun without fingerprints, so older parts are only readable"
    if verdict.faults:
        verdict.remedy = _remedy(path, usable, damaged, records, cut=bool(fault))
    elif beside:
        verdict.remedy = "records and checkpoints: export, compare and report work"
    verdict.faults += beside
    return verdict


def check_sweep(path: Path) -> Verdict:
    """The same for what a sweep has beside its runs."""
    try:
        found = f"a list of runs, {len(run_directories(path))} of them begun"
    except StoreError as error:
        return Verdict(path, "", [str(error)], "its runs, which are checked one by one")
    return Verdict(path, found, _read_beside(path), "its runs, which are checked one by one")


def _read_beside(path: Path) -> list[str]:
    """What is wrong with the audit log of a directory and with what its clients kept."""
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
    for kept in KEPT:
        for file in sorted(path.glob(kept)):
            try:
                read_kept(file)
            except StoreError as error:
                if file.exists():
                    faults.append(str(error))
    return faults


def _count_records(store: RunStore) -> tuple[int, str | None]:
    """The number of whole records before the first fault, and that fault."""
    reader = store.reader()
    try:
        reader.read(content(reader.path))
    except StoreError as error:
        return reader.count, str(error).partition(";")[0]
    return reader.count, None


def _read_checkpoints(
    store: RunStore, checkpoints: list[Path], records: int, verdict: Verdict
) -> tuple[list[int], list[Path]]:
    """The rounds from which the run can go on, and the checkpoints from which it cannot."""
    usable, damaged = [], []
    for path in checkpoints:
        try:
            round_ = store.read_checkpoint(path).round
            if round_ > records:
                raise DamagedError("is whole, but records before it are missing")
            usable.append(round_)
        except DamagedError as error:
            if path.exists():
                damaged.append(path)
                verdict.faults.append(f"{path} {error}")
    return usable, damaged


def _remedy(path: Path, usable: list[int], damaged: list[Path], records: int, *, cut: bool) -> str:
    start = max(usable, default=0)
    delete = [checkpoint.name for checkpoint in damaged]
    steps = [f"delete {', '.join(delete)} from checkpoints"] if delete else []
    if cut:
        steps.append(f"keep the first {records} lines of rounds.jsonl alone")
    steps.append(f"'fedproto resume {path}' goes on from round {start}")
    return "; then ".join(steps)


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
