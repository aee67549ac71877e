"""Flower's simulation engine: the same apps, with clients spread over Ray's processes or hosts."""

from __future__ import annotations

import os
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedproto.callback import Callback
from fedproto.errors import FedprotoError
from fedproto.flower.client_app import app as client_app
from fedproto.flower.deploy import ENVIRONMENT
from fedproto.flower.server_app import serve


def simulate_on_ray(out: Path, clients: int, callback: Callback, cores: float = 1.0) -> None:
    """Trains the runs of a directory on Ray."""
    os.environ.update(ENVIRONMENT)
    # A client may be in another process, or on another host, every round.
    os.environ.setdefault("FEDPROTO_STATE", str(out.resolve() / "nodes"))
    server = ServerApp()
    failed: list[BaseException] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        try:
            serve(grid, out, callback)
        except FedprotoError as error:
            failed.append(error)

    run_simulation(
        server_app=server,
        client_app=client_app,
        num_supernodes=clients,
        backend_config={"client_resources": {"num_cpus": cores, "num_gpus": 0.0}},
    )
    if failed:
        raise failed[0]
