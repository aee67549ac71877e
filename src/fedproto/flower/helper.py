"""For a ClientApp of one's own: prototypes and margins around one's own training function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from fedproto.equations import class_prototypes
from fedproto.errors import TrainingError
from fedproto.flower.arrays import write_tensors
from fedproto.models.base import features_of
from fedproto.strategies import FedProto
from fedproto.types import Prototypes

ARRAYS, METRICS, PROTOTYPES, NUM_EXAMPLES = "arrays", "metrics", "prototypes", "num-examples"
"""Names in messages; all but the third are Flower's own."""

T = TypeVar("T")
Batches = Iterable[tuple[Tensor, Tensor]]


def train_with_prototypes(
    model: nn.Module,
    batches: Batches,
    num_classes: int,
    train: Callable[[], T],
    *,
    features: Callable[[Tensor], Tensor] | None = None,
    options: FedProto | None = None,
) -> tuple[T, ArrayRecord]:
    """Calls a training function and measures how the class prototypes moved in it.

    Args:
        model: The model that `train` changes, with the received weights.
        batches: The client's training data, such as a `DataLoader`; gone through twice.
        num_classes: Classes C.
        train: Trains the model in place.
        features: The encoder; the model's own ``features(x)`` by default.
        options: The same as the server's.

    Returns:
        What `train` returned, and the record to send as ``prototypes``.
    """
    options = options or FedProto()
    before = measure(model, batches, num_classes, features)
    result = train()
    after = measure(model, batches, num_classes, features)
    margin = options.summarize(before, after)
    assert margin is not None  # noqa: S101 - FedProto always gives margins
    tensors = {"sum": after.sum, "count": after.count, "margin": margin}
    return result, write_tensors(tensors)


@torch.no_grad()
def measure(
    model: nn.Module,
    batches: Batches,
    num_classes: int,
    features: Callable[[Tensor], Tensor] | None = None,
) -> Prototypes:
    """The prototypes of some data under a model, eq. (4).

    Raises:
        TrainingError: If there is no data, or the model gives no features.
    """
    training = model.training
    encode = features or features_of(model)
    model.eval()
    device = next(model.parameters()).device
    total: Prototypes | None = None
    for inputs, labels in batches:
        encoded = encode(inputs.to(device)).flatten(1).float()
        part = class_prototypes(encoded, labels.to(device), num_classes)
        total = part if total is None else total + part
    model.train(training)
    if total is None:
        raise TrainingError("there is no data to compute prototypes of")
    return total
