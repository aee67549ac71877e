"""The server's side: the round loop of the simulator, over the nodes that are connected.

The run directory is prepared before the app is submitted (`fedproto flower up` and `submit` do
so), and a run that was cut short goes on from its newest checkpoint when it is submitted again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.config.options import StopOptions
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.disk.files import Folder, content, explained, write_atomically
from fedproto.disk.integrity import sealed
from fedproto.engines.base import Engine, Workload
from fedproto.errors import ConfigError, FedprotoError, printable
from fedproto.flower.deploy import ERROR_FILE
from fedproto.flower.engine import FlowerEngine, Suspensions
from fedproto.flower.nodes import Nodes, enrol
from fedproto.options import load_plugin
from fedproto.rounds import load_federations, runs_from, train
from fedproto.store.checking import AUDIT_FILE, read_audit
from fedproto.store.sweeps import open_runs
from fedproto.types import RoundRecord

app = ServerApp()

LOG = logging.getLogger("flwr")

PREDECESSOR_ENDS_WITHIN = 120.0
"""Seconds in which the app of a server that was killed notices it, and lets go of its runs."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains the runs of the directory that was submitted."""
    out = Path(str(context.run_config["out"]))
    outcome = out / ERROR_FILE
    outcome.unlink(missing_ok=True)
    try:
        keys = json.loads(str(context.run_config.get("keys", "{}")))
        serve(grid, out, keys={int(client): key for client, key in keys.items()})
    except FedprotoError as error:
        # The process that submitted the run shows this; Flower keeps only a traceback.
        write_atomically(outcome, f"{error}\n".encode())
        raise


def serve(grid: Grid, out: Path, keys: Mapping[int, str] | None = None) -> None:
    """Trains the runs of a directory over a grid, with clients known by their keys."""
    for plugin in os.environ.get("FEDPROTO_PLUGINS", "").split():
        load_plugin(plugin)
    stores = open_runs(out)
    log = AuditLog(out)
    log.write("began", runs=[store.path.name for store in stores])
    callback = ServerLog(log)
    suspended = Suspensions(out)
    nodes: dict[DataSource, Nodes] = {}
    federations: dict[DataSource, Federation] = {}
    for config in (store.config for store in stores if not store.finished):
        if config.data is None:
            raise ConfigError("a run over Flower needs a [data] section; clients read it")
        if config.data in federations:
            continue
        nodes[config.data] = Nodes(grid, config, callback, log.write, keys or {})
        if config.flower.evaluate_on == "server":
            federations |= load_federations([config])
        else:
            federations[config.data] = enrol(config, nodes[config.data], out)
        if config.stop != StopOptions() and not len(federations[config.data].validation):
            callback.on_notice("stopping early by test scores: no client holds a validation part")

    def engine_for(config: RunConfig, workload: Workload) -> Engine:
        assert config.data is not None  # noqa: S101 - checked above
        return FlowerEngine(workload, grid, config, nodes[config.data], suspended)

    runs = runs_from(stores, federations)
    train(runs, [callback], engine_for=engine_for, patience=PREDECESSOR_ENDS_WITHIN)


class AuditLog:
    """Who enrolled with which key, who was refused, whose updates were used, in ``audit.jsonl``.

    An append-only file in the directory that was submitted; every line carries a fingerprint, as
    the records do. It is for people who have to account for a model, not for resuming a run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = Folder(folder)
        path = folder / AUDIT_FILE
        before = content(path)
        # A line cut short by a kill is dropped: the next begins where it began.
        whole = before[: before.rfind(b"\n") + 1]
        if whole != before:
            with explained(path):
                self._folder.write(AUDIT_FILE, whole)
        read_audit(folder)

    def write(self, event: str, **facts: Any) -> None:
        """Adds an event and waits until it is on disk."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with explained(self._folder.path / AUDIT_FILE):
            self._folder.append(AUDIT_FILE, sealed({"time": now, "event": event, **facts}, None))


class ServerLog(Callback):
    """Writes rounds and notices to Flower's log and to the audit log."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def on_notice(self, text: str) -> None:
        """Writes a warning."""
        self._audit.write("notice", text=text)
        LOG.warning("%s", printable(text))

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Writes scores, every client's share of the aggregate, and what was refused and why."""
        self._audit.write(
            "round",
            run=config.title,
            seed=config.seed,
            round=record.round,
            shares=record.attention,
            refused=record.failures,
            note=record.note,
        )
        number, title = record.round + 1, printable(config.title)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        LOG.info("%s round %d: %s", title, number, printable(scores))
        for client, reason in record.failures.items():
            LOG.warning("round %d, client %d: %s", number, client, printable(reason))
        if record.note:
            LOG.warning("round %d: %s", number, printable(record.note))
