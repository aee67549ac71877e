"""The server's side: the round loop of the simulator, over the nodes that are connected.

The run directory is prepared before the app is submitted (`fedproto flower up` and `submit` do
so), and an interrupted run continues from its newest checkpoint when it is submitted again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.config.options import StopOptions
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.disk.files import write_atomically
from fedproto.engines.base import Engine, Workload
from fedproto.errors import ConfigError, FedprotoError, printable
from fedproto.flower.deploy import ERROR_FILE
from fedproto.flower.engine import FlowerEngine, Suspensions
from fedproto.flower.nodes import Nodes, enrol
from fedproto.options import load_plugins
from fedproto.rounds import load_federations, runs_from, train
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
    load_plugins()
    stores = open_runs(out)
    callback = ServerLog()
    suspended = Suspensions()
    nodes: dict[DataSource, Nodes] = {}
    federations: dict[DataSource, Federation] = {}
    for config in (store.config for store in stores if not store.finished):
        if config.data is None:
            raise ConfigError("a run over Flower needs a [data] section; clients read it")
        if config.data in federations:
            continue
        nodes[config.data] = Nodes(grid, config, callback, keys or {})
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


class ServerLog(Callback):
    """Writes rounds and notices to Flower's log."""

    def on_notice(self, text: str) -> None:
        """Writes a warning."""
        LOG.warning("%s", printable(text))

    def on_round(self, config: RunConfig, record: RoundRecord) -> None:
        """Writes scores, and what was refused and why."""
        number, title = record.round + 1, printable(config.title)
        scores = ", ".join(f"{name} {value:.4f}" for name, value in record.metrics.items())
        LOG.info("%s round %d: %s", title, number, printable(scores))
        for client, reason in record.failures.items():
            LOG.warning("round %d, client %d: %s", number, client, printable(reason))
        if record.note:
            LOG.warning("round %d: %s", number, printable(record.note))
