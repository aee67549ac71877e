"""Flower's simulation: two Ray actors of one core each, federated averaging in its server app.

flower.py WORK OUT
"""

from __future__ import annotations

import os
import sys

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Ray lowers its workers' priority; on a machine that does other things too that would be unfair.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - spelled so by Ray
# The actors start elsewhere and have to find what this file imports.
os.environ["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120

import torch
from common import average, load, quiet, serve
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

PATH, OUT = sys.argv[1:3]


client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Local training of the client named in the message."""
    del context
    torch.set_num_threads(1)
    own = load(PATH)
    config = message.content["config"]
    round_, client = int(config["round"]), int(config["client"])
    model = own.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=own.lr)
    for epoch in range(own.epochs):
        for batch in own.order(round_, client, epoch).split(own.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(own.inputs[batch]), own.targets[batch]).backward()
            optimizer.step()
    content = RecordDict(
        {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"client": client, "size": int(own.sizes[client])}),
        }
    )
    return Message(content=content, reply_to=message)


@server_app.main()
def serve_rounds(grid: Grid, context: Context) -> None:
    """Averages as the benchmark asks for rounds."""
    del context
    own = load(PATH)
    weights = dict(own.model().state_dict())

    def train_round(round_: int) -> dict[str, Tensor]:
        nonlocal weights
        nodes = list(grid.get_node_ids())
        arrays = ArrayRecord(weights)
        messages = [
            Message(
                content=RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord({"round": round_, "client": client}),
                    }
                ),
                message_type="train",
                dst_node_id=node,
            )
            for client, node in zip(own.cohorts[round_].tolist(), nodes, strict=False)
        ]
        replies = list(grid.send_and_receive(messages))
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
        replies.sort(key=lambda reply: int(reply.content["metrics"]["client"]))
        weights = average(
            [reply.content["arrays"].to_torch_state_dict() for reply in replies],
            [int(reply.content["metrics"]["size"]) for reply in replies],
        )
        return weights

    serve(train_round, OUT)


if __name__ == "__main__":
    quiet()
    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=len(load(PATH).sizes),
        backend_config={
            "init_args": {"num_cpus": 2, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )
