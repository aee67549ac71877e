"""The audit log of a deployment: who enrolled with which key, who was refused, who counted.

One append-only file, ``audit.jsonl`` in the directory that was submitted; every line carries a
fingerprint, as the records do. It is for people who have to account for a model, not for going on
with a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedproto.config import RunConfig
from fedproto.disk.files import Folder, content, explained
from fedproto.disk.integrity import read_lines, sealed_line
from fedproto.rounds import Watcher
from fedproto.store.checking import AUDIT_FILE
from fedproto.types import RoundRecord


class AuditLog:
    """Appends events, each with its time."""

    def __init__(self, folder: Path) -> None:
        self._folder = Folder(folder)
        path = folder / AUDIT_FILE
        before = content(path)
        # A line cut short by a kill is dropped: the next begins where it began.
        whole = before[: before.rfind(b"\n") + 1]
        if whole != before:
            with explained(path):
                self._folder.write(AUDIT_FILE, whole)
        read_lines(path)

    def write(self, event: str, **facts: Any) -> None:
        """Adds an event and waits until it is on disk."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with explained(self._folder.path / AUDIT_FILE):
            self._folder.append(AUDIT_FILE, sealed_line({"time": now, "event": event, **facts}))


class AuditedWatcher(Watcher):
    """Passes everything on to another watcher, and rounds to the audit log as well."""

    def __init__(self, watcher: Watcher, log: AuditLog) -> None:
        super().__init__(watcher)
        self._log = log

    def notice(self, text: str) -> None:
        """Passed on and logged."""
        self._log.write("notice", text=text)
        super().notice(text)

    def round_done(self, config: RunConfig, records: Sequence[RoundRecord]) -> None:
        """Logs every client's share of the aggregate, and what was refused and why."""
        record = records[-1]
        self._log.write(
            "round",
            run=config.title,
            seed=config.seed,
            round=record.round,
            shares=record.attention,
            refused=record.failures,
            note=record.note,
        )
        super().round_done(config, records)
