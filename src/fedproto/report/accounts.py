"""What the page tells of a deployment's audit log: who took part, counted for what, was refused."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedproto.errors import StoreError
from fedproto.store.checking import read_audit


def accounts(runs: Iterable[Path]) -> dict[str, Any]:
    """A row per client and what happened beside rounds; empty where nothing was deployed.

    A sweep's log lies in the folder above its runs.
    """
    folders = {folder for run in runs for folder in (run, run.parent)}
    events: list[dict[str, Any]] = []
    problems = []
    for folder in sorted(folders):
        try:
            events += read_audit(folder)
        except StoreError as error:
            problems.append(str(error))
    clients: dict[int, dict[str, Any]] = {}
    incidents = []
    for event in events:
        kind = event.get("event")
        if kind == "enrolled":
            row = _row(clients, int(event["client"]))
            row |= {"name": event["name"], "key": event["key"], "samples": event["num_train"]}
        elif kind == "round":
            for client, share in event["shares"].items():
                row = _row(clients, int(client))
                row["rounds"] += 1
                row["total"] += share
            for client, reason in event["refused"].items():
                row = _row(clients, int(client))
                row["refused"] += 1
                row["reason"] = reason
        elif kind == "turned away":
            incidents.append(f"{event['time']}: {event['name'] or event['node']} turned away")
    rows = [row | {"client": client} for client, row in sorted(clients.items())]
    return {"clients": rows, "incidents": incidents[-20:], "problems": problems}


def _row(clients: dict[int, dict[str, Any]], client: int) -> dict[str, Any]:
    fresh = {"name": "", "key": None, "samples": None, "rounds": 0, "total": 0.0}
    return clients.setdefault(client, fresh | {"refused": 0, "reason": ""})
