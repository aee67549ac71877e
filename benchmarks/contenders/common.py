"""What all contenders share: the work, the models, and the talk with the benchmark.

Needs NumPy and PyTorch alone, since it runs in the peers' own environments. A contender is a
program that trains a round of federated averaging whenever it is told to, on standard input.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

STARTED = time.perf_counter()
CHANNEL = sys.stdout


class CNN(nn.Module):
    """The paper's model for MNIST, with the layer names of the initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.dense = nn.Linear(64 * 7 * 7, 256)
        self.classifier = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        scores: Tensor = self.classifier(self.dense(x.flatten(1)).relu())
        return scores


class MLP(nn.Module):
    """The paper's model for synthetic data."""

    def __init__(self) -> None:
        super().__init__()
        self.dense1 = nn.Linear(60, 128)
        self.dense2 = nn.Linear(128, 256)
        self.classifier = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        scores: Tensor = self.classifier(self.dense2(self.dense1(x).relu()).relu())
        return scores


class Work:
    """Data, cohorts, batch orders and initial weights, read from the benchmark's file."""

    def __init__(self, path: str | Path) -> None:
        with np.load(path) as stored:
            content = {name: stored[name] for name in stored.files}
        self.inputs = torch.from_numpy(content["inputs"])
        self.targets = torch.from_numpy(content["targets"])
        self.starts, self.sizes = content["starts"], content["sizes"]
        self.cohorts = content["cohorts"]
        self.seed, self.epochs = int(content["seed"]), int(content["epochs"])
        self.batch_size, self.lr = int(content["batch_size"]), float(content["lr"])
        self._content = content

    def model(self) -> nn.Module:
        """A model with the initial weights."""
        weights = {
            name.removeprefix("param."): torch.from_numpy(array)
            for name, array in self._content.items()
            if name.startswith("param.")
        }
        model: nn.Module = CNN() if "conv1.weight" in weights else MLP()
        model.load_state_dict(weights)
        return model

    def order(self, round_: int, client: int, epoch: int) -> Tensor:
        """The samples of a client in the order of one epoch."""
        order = self._content[f"order.{round_}.{client}"][epoch]
        return torch.from_numpy(order + self.starts[client])


@functools.cache
def load(path: str) -> Work:
    """The work, read once per process."""
    return Work(path)


def average(weights: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    """The mean by number of samples."""
    total = sum(sizes)
    return {
        name: sum(
            (one[name] * (size / total) for one, size in zip(weights, sizes, strict=True)),
            start=torch.zeros_like(weights[0][name]),
        )
        for name in weights[0]
    }


def wait_for_round() -> int | None:
    """The next round to do; None when all is over."""
    line = sys.stdin.readline().strip()
    return int(line) if line and line != "end" else None


def say(**facts: object) -> None:
    """Answers the benchmark."""
    CHANNEL.write(json.dumps(facts) + "\n")
    CHANNEL.flush()


def quiet() -> None:
    """Keeps what libraries print out of the talk."""
    global CHANNEL
    CHANNEL = sys.stdout
    sys.stdout = sys.stderr


def save(weights: dict[str, Tensor], path: str) -> None:
    """Writes weights for the comparison."""
    np.savez(path, **{name: tensor.detach().numpy() for name, tensor in weights.items()})


def serve(train_round: Callable[[int], dict[str, Tensor]], out: str) -> None:
    """Does rounds as they are asked for; keeps the weights after the first and the last."""
    say(ready=time.perf_counter() - STARTED)
    weights: dict[str, Tensor] = {}
    while (round_ := wait_for_round()) is not None:
        started = time.perf_counter()
        weights = train_round(round_)
        say(seconds=time.perf_counter() - started)
        if round_ == 0:
            save(weights, f"{out}.first.npz")
    save(weights, f"{out}.last.npz")
    say(end=True)
