"""Flower's simulation, the leanest app we could write: no strategy, no data loaders, one thread.

flower.py WORK OUT
"""

from __future__ import annotations

import sys

import flower_setup
import torch
from common import average, load, quiet, serve
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
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
    flower_setup.simulate(server_app, client_app, clients=len(load(PATH).sizes))
