"""Flower's simulation, written as its PyTorch tutorial writes an app: the strategy FedAvg, whole
models in messages, and a client that makes model, data loader and optimizer anew for every message.

    flower_tutorial.py WORK OUT

Two things differ from the tutorial, so that the work is the same for all: the strategy says which
clients it wants and in which order a client sees its samples, both of which are random otherwise.
And there are two actors of one core each; by default Flower gives each actor two cores, which here
would leave it with one actor.
"""  # noqa: D205 - one sentence says it best

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TypeAlias

import flower_setup
import torch
from common import STARTED, Work, load, quiet, save, say, wait_for_round
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PATH, OUT = sys.argv[1:3]

Batches: TypeAlias = DataLoader[tuple[torch.Tensor, ...]]

client_app = ClientApp()
server_app = ServerApp()


def loaders(work: Work, round_: int, client: int) -> list[Batches]:
    """One data loader per epoch, each in the work's order."""
    orders = [work.order(round_, client, epoch) for epoch in range(work.epochs)]
    return [
        DataLoader(
            TensorDataset(work.inputs[order], work.targets[order]), batch_size=work.batch_size
        )
        for order in orders
    ]


def fit(model: nn.Module, epochs: Iterable[Batches], lr: float) -> float:
    """Local training; returns the mean loss."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    running, batches = 0.0, 0
    for loader in epochs:
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
            batches += 1
    return running / batches


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Local training of the client named in the message."""
    del context
    work = load(PATH)
    config = message.content["config"]
    round_, client = int(config["server-round"]) - 1, int(config["client"])
    model = work.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = fit(model, loaders(work, round_, client), work.lr)
    metrics = {"train_loss": loss, "num-examples": int(work.sizes[client])}
    content = RecordDict(
        {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content=content, reply_to=message)


class FedAvgOfTheWork(FedAvg):  # type: ignore[misc]
    """Federated averaging over the work's cohorts."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Names a client in each of the messages."""
        cohort = load(PATH).cohorts[server_round - 1].tolist()
        messages = super().configure_train(server_round, arrays, config, grid)
        for client, message in zip(cohort, messages, strict=True):
            own = ConfigRecord({**config, "client": client})
            message.content = RecordDict({"arrays": arrays, "config": own})
        return messages


class Talk:
    """Waits for the benchmark between rounds, in place of a test on the server."""

    def __init__(self) -> None:
        self._since = 0.0

    def __call__(self, server_round: int, arrays: ArrayRecord) -> None:
        """Reports a round and waits for the next; before the first one it only waits."""
        if server_round == 0:
            say(ready=time.perf_counter() - STARTED)
        else:
            say(seconds=time.perf_counter() - self._since)
        if server_round == 1:
            save(arrays.to_torch_state_dict(), f"{OUT}.first.npz")
        if wait_for_round() is None:
            save(arrays.to_torch_state_dict(), f"{OUT}.last.npz")
            say(end=True)
        self._since = time.perf_counter()


@server_app.main()
def serve_rounds(grid: Grid, context: Context) -> None:
    """Starts the strategy."""
    del context
    work = load(PATH)
    rounds, number = work.cohorts.shape
    strategy = FedAvgOfTheWork(fraction_train=number / len(work.sizes), fraction_evaluate=0.0)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(work.model().state_dict()),
        num_rounds=rounds,
        evaluate_fn=Talk(),
    )


if __name__ == "__main__":
    quiet()
    flower_setup.simulate(server_app, client_app, clients=len(load(PATH).sizes))
