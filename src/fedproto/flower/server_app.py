"""The server's side: the round loop of the simulator, over the nodes that are connected.

The run directory is prepared before the app is submitted (`fedproto flower up` and `submit` do
so), and a run that was cut short goes on from its newest checkpoint when it is submitted again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedproto.config import RunConfig, StopOptions
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.disk.files import write_atomically
from fedproto.engines.base import Engine, Notify
from fedproto.errors import ConfigError, FedprotoError
from fedproto.flower.audit import AuditedWatcher, AuditLog
from fedproto.flower.control import ERROR_FILE
from fedproto.flower.engine import FlowerEngine
from fedproto.flower.enrolment import enrol
from fedproto.flower.nodes import Nodes
from fedproto.flower.progress import LogLines
from fedproto.flower.suspension import Suspensions
from fedproto.options.registry import load_plugin
from fedproto.rounds import Watcher
from fedproto.simulate import load_federations, simulate
from fedproto.store.sweeps import open_runs

app = ServerApp()

INSECURE = (
    "INSECURE: no TLS and no node keys. Anyone on the network can read and change models and"
    " updates, and take part as any client. Only for trying out; see 'fedproto flower keys'."
)

PREDECESSOR_ENDS_WITHIN = 120.0
"""Seconds in which the app of a server that was killed notices it, and lets go of its runs."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Carries out the runs of a directory."""
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


def serve(
    grid: Grid,
    out: Path,
    watcher: Watcher | None = None,
    keys: Mapping[int, str] | None = None,
) -> None:
    """Carries out the runs of a directory over a grid, with clients known by their keys."""
    for plugin in os.environ.get("FEDPROTO_PLUGINS", "").split():
        load_plugin(plugin)
    stores = open_runs(out)
    log = AuditLog(out)
    log.write("began", runs=[store.path.name for store in stores])
    watcher = AuditedWatcher(watcher or LogLines(), log)
    if getattr(grid, "_insecure", False):
        watcher.notice(INSECURE)
    suspended = Suspensions(out)
    nodes: dict[DataSource, Nodes] = {}
    federations: dict[DataSource, Federation] = {}
    for config in (store.config for store in stores if not store.finished):
        if config.data is None:
            raise ConfigError("a run over Flower needs a [data] section; clients read it")
        if config.data in federations:
            continue
        nodes[config.data] = Nodes(grid, config, watcher.notice, log.write, keys)
        if config.flower.evaluate_on == "server":
            federations |= load_federations([config])
        else:
            federations[config.data] = enrol(config, nodes[config.data], out)
        if config.stop != StopOptions() and not len(federations[config.data].validation):
            watcher.notice("stopping early by test scores: no client holds a validation part")

    def engine_for(
        config: RunConfig, federation: Federation, model: nn.Module, notify: Notify
    ) -> Engine:
        assert config.data is not None  # noqa: S101 - checked above
        workload = config.workload(federation, model, notify)
        return FlowerEngine(workload, grid, config, nodes[config.data], suspended)

    simulate(stores, watcher, federations, engine_for, patience=PREDECESSOR_ENDS_WITHIN)
