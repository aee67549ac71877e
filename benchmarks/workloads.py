"""The work that the benchmarks do: generated data of MNIST's shape, and jobs on it."""

from __future__ import annotations

import numpy as np
import torch

from fedproto import FedAvg
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import TensorSamples
from fedproto.engines.base import LocalJob
from fedproto.engines.reference import read_state
from fedproto.engines.training import TrainOptions
from fedproto.models.base import ModelOptions, build_model
from fedproto.models.resnet import ResNet18Options
from fedproto.models.small import CNN4Options, CNNOptions, LeNetOptions, MLPOptions
from fedproto.rng.schedule import BatchOrder
from fedproto.strategies import Strategy
from fedproto.strategies.sections import Method
from fedproto.types import ServerState

CLASSES = 10
MODELS: dict[str, ModelOptions] = {
    "cnn": CNNOptions(),
    "mlp": MLPOptions(),
    "celeba": CNN4Options(batch_norm=True),
    "lenet": LeNetOptions(),
    "resnet18": ResNet18Options(),
}
CIFAR = (3, 32, 32)
SHAPES = {
    "cnn": (1, 28, 28),
    "mlp": (60,),
    "celeba": (3, 84, 84),
    "lenet": CIFAR,
    "resnet18": CIFAR,
}
SAMPLES = {"cnn": 100, "mlp": 100, "celeba": 20, "lenet": 500, "resnet18": 500}
"""Samples of a client: large images would take longer to make than to train."""


def federation(sizes: list[int], shape: tuple[int, ...], seed: int = 0) -> Federation:
    """Clients of given sizes; classes are Gaussian clouds, so that there is something to learn.

    Every sample is used for training and a tenth of them again for the test.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(sizes)
    labels = torch.randint(CLASSES, (total,), generator=generator)
    centres = torch.rand((CLASSES, *shape), generator=generator)
    inputs = centres[labels] + 0.3 * torch.randn((total, *shape), generator=generator)
    ends = np.cumsum(sizes)
    return Federation(
        name="generated",
        samples=TensorSamples(inputs.clamp(0, 1) if len(shape) == 3 else inputs, labels),
        clients=tuple(
            Client(np.arange(end - size, end), np.arange(end - size, end)[: size // 10])
            for size, end in zip(sizes, ends, strict=True)
        ),
        num_classes=CLASSES,
        input_shape=shape,
    )


def work_w_sizes(clients: int = 100) -> list[int]:
    """The client sizes of work W: ``min(300, ⌊lognormal(3.5, 1)⌋ + 10)``."""
    drawn = np.random.RandomState(0).lognormal(3.5, 1.0, clients)
    return [min(300, int(size) + 10) for size in drawn]


def initial_state(model: str, dtype: torch.dtype = torch.float32) -> ServerState:
    """Weights that depend on the model alone."""
    built = build_model(MODELS[model], SHAPES[model], CLASSES, seed=0).to(dtype)
    return ServerState(0, *read_state(built))


def jobs_on(
    data: Federation,
    state: ServerState,
    clients: list[int],
    *,
    epochs: int,
    strategy: Strategy | None = None,
    train: TrainOptions | None = None,
    round_: int = 0,
) -> list[LocalJob]:
    """One job per client, all from one state."""
    train = train or TrainOptions(lr=0.01, batch_size=10)
    return [
        LocalJob(
            client=client,
            state=state,
            method=Method(strategy or FedAvg()),
            batches=BatchOrder(
                0, round_, client, len(data.clients[client].train), train.batch_size, epochs
            ),
            train=train,
            lr=train.lr,
            seed=0,
        )
        for client in clients
    ]
