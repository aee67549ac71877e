"""Looking through a run directory: what is whole, what is damaged, and what can be saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedproto.disk.atomic import explained, is_there
from fedproto.disk.integrity import DamagedError, read_linked, unsealed
from fedproto.errors import StoreError
from fedproto.store import RunStore
from fedproto.store.client_memory import read_kept
from fedproto.store.records import RecordReader
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
    return list(read_linked(folder / AUDIT_FILE))


def check_run(path: Path) -> Verdict:
    """Reads everything in a run directory and compares it with its fingerprints.

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
    links, fault = _read_records(path / "rounds.jsonl")
    verdict.faults += [fault] if fault else []
    usable, damaged = _read_checkpoints(store, links, verdict)
    beside = _read_beside(path)
    records, whole = len(links) - 1, len(store.checkpoints()) - len(damaged)
    verdict.found = f"{_number(records, 'round')}, {_number(whole, 'checkpoint')}"
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
                unsealed((path / name).read_bytes())
        except DamagedError as error:
            faults.append(f"{path / name} is damaged: {error}")
    for kept in KEPT:
        for file in sorted(path.glob(kept)):
            try:
                read_kept(file)
            except StoreError as error:
                faults.append(str(error))
    return faults


def _read_records(path: Path) -> tuple[list[str], str | None]:
    """The link after each whole record, that before the first included, and the first fault."""
    reader = RecordReader(path)
    links = [reader.chain.head]
    with explained(path, " cannot be read", ""):
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for line in lines:
        try:
            reader.read(line + b"\n")
        except StoreError as error:
            return links, str(error).partition(";")[0]
        links.append(reader.chain.head)
    return links, None


def _read_checkpoints(
    store: RunStore, links: list[str], verdict: Verdict
) -> tuple[list[int], list[Path]]:
    """The rounds from which the run can go on, and the checkpoints from which it cannot."""
    usable, damaged = [], []
    for path in store.checkpoints():
        try:
            state, follows = store.read_checkpoint(path)
            if state.round < len(links) and follows not in (None, links[state.round]):
                raise DamagedError("does not follow the records in rounds.jsonl")
        except DamagedError as error:
            damaged.append(path)
            verdict.faults.append(f"{path} {error}")
        else:
            if state.round < len(links):
                usable.append(state.round)
            else:
                verdict.faults.append(f"{path} is whole, but records before it are missing")
                damaged.append(path)
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
