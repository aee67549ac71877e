"""What both of Flower's contenders set before they start: two Ray actors of one core each.

Imported before Flower and Ray, which read the environment when they are.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Ray lowers its workers' priority; on a machine that does other things too that would be unfair.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - spelled so by Ray
# The actors start elsewhere and have to find what the contender imports.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def simulate(server_app: Any, client_app: Any, clients: int) -> None:
    """Runs an app in Flower's simulation."""
    from flwr.simulation import run_simulation

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=clients,
        backend_config={
            "init_args": {"num_cpus": 2, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )
