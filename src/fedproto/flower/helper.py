"""For a ClientApp of one's own: a strategy's client part around one's own training function."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from fedproto.errors import TrainingError
from fedproto.flower.arrays import read_tensors, write_tensors
from fedproto.models.base import features_of
from fedproto.strategies.base import Strategy
from fedproto.strategies.contract import (
    Declarations,
    FeatureShape,
    Local,
    Look,
    Objective,
    Observation,
    Setting,
    initial_tensors,
)
from fedproto.types import Tensors

ARRAYS, METRICS, NUM_EXAMPLES = "arrays", "metrics", "num-examples"
"""Names in messages that are Flower's own."""

PAYLOAD, BROADCAST, WORK, CONFIG = "payload", "broadcast", "work", "config"
ROUND, LAST_ROUND, NUM_CLIENTS = "server-round", "last-round", "clients"
MEMORY = "fedproto-memory-"

T = TypeVar("T")
Batches = Iterable[tuple[Tensor, Tensor]]


def train_locally(
    message: Message,
    context: Context,
    strategy: Strategy,
    model: nn.Module,
    batches: Batches,
    num_classes: int,
    train: Callable[[Objective], T],
    *,
    features: Callable[[Tensor], Tensor] | None = None,
    steps: int = 1,
    lr: float = 1.0,
) -> tuple[T, dict[str, ArrayRecord | MetricRecord]]:
    """Calls a training function and does a strategy's client part around it.

    Args:
        message: What the server sent.
        context: Of this client; keeps what the strategy has it remember.
        strategy: The same as the server's.
        model: The model that `train` changes, with the received weights.
        batches: The client's training data, such as a `DataLoader`.
        num_classes: Classes C.
        train: Trains the model in place. It is given what the strategy adds to the loss, which it
            may ignore for strategies that add nothing.
        features: The encoder; the model's own ``features(x)`` by default.
        steps: Local steps that `train` makes, for strategies that count them.
        lr: Its learning rate, for strategies that ask.

    Returns:
        What `train` returned, and the records to add to the reply.

    Raises:
        TrainingError: If there is no data, the model gives no features where they are needed, or
            the server is of another strategy.
    """
    received = floating(model.state_dict())
    about = message.content[CONFIG]
    assert isinstance(about, ConfigRecord)  # noqa: S101 - the strategy sends one
    width = _width(model, batches, features) if strategy.looks.before | strategy.looks.after else 0
    setting = Setting(
        received, num_classes, int(str(about[NUM_CLIENTS])), FeatureShape(width, per_sample=1)
    )
    broadcast = _broadcast(message.content, strategy.server_memory(setting))
    labels = torch.cat([labels.flatten().cpu() for _, labels in batches])
    local = Local(
        num_examples=len(labels),
        steps=steps,
        lr=lr,
        classes=Observation.of(frozenset(), None, labels, num_classes, torch.zeros(())).count,
        params=received,
        broadcast=broadcast,
        memory=_recalled(context, int(str(about[LAST_ROUND])), strategy.client_memory(setting)),
        secret=secrets.randbits(62),
    )
    before = observe(model, batches, num_classes, strategy.looks.before, features)
    result = train(strategy.objective(local))
    after = observe(model, batches, num_classes, strategy.looks.after, features)
    report = strategy.report(local, floating(model.state_dict()), before, after)
    if report.memory:
        context.state[f"{MEMORY}{about[ROUND]!s}"] = write_tensors(report.memory)
    work = MetricRecord({"steps": steps, "lr": lr})
    return result, {PAYLOAD: write_tensors(report.payload), WORK: work}


@torch.no_grad()
def observe(
    model: nn.Module,
    batches: Batches,
    num_classes: int,
    what: frozenset[Look],
    features: Callable[[Tensor], Tensor] | None = None,
) -> Observation | None:
    """What a model makes of some data; None for nothing asked."""
    if not what:
        return None
    training = model.training
    encode = features or features_of(model) if "features" in what else None
    model.eval()
    device = next(model.parameters()).device
    total: Observation | None = None
    number = 0
    for inputs, labels in batches:
        x, y = inputs.to(device), labels.to(device)
        encoded = None if encode is None else encode(x).flatten(1).float()
        loss = torch.zeros((), device=device)
        if "loss" in what:
            loss = functional.cross_entropy(model(x), y, reduction="sum")
        part = Observation.of(what, encoded, y, num_classes, loss)
        number += len(y)
        total = part if total is None else total + part
    model.train(training)
    if total is None:
        raise TrainingError("there is no data to look at")
    return replace(total, loss=total.loss / number)


def floating(tensors: Tensors) -> dict[str, Tensor]:
    """Copies of what is averaged; a state of Flower's does not say what is trained."""
    return {name: one.clone() for name, one in tensors.items() if one.is_floating_point()}


@torch.no_grad()
def _width(model: nn.Module, batches: Batches, features: Callable[[Tensor], Tensor] | None) -> int:
    encode = features or features_of(model)
    inputs, _ = next(iter(batches))
    training = model.training
    model.eval()
    width = encode(inputs[:1].to(next(model.parameters()).device)).flatten(1).shape[1]
    model.train(training)
    return width


def _like(declared: Declarations) -> dict[str, Tensor]:
    return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in declared.items()}


def _broadcast(content: RecordDict, declared: Declarations) -> Tensors:
    sent = {name: one for name, one in declared.items() if one.broadcast}
    record = content.get(BROADCAST)
    if isinstance(record, ArrayRecord):
        return read_tensors(record, _like(sent), BROADCAST)
    if any(one.initial is not None for one in sent.values()):
        raise TrainingError("the server sends no 'broadcast'; is it of another strategy?")
    return {}


def _recalled(context: Context, last_round: int, declared: Declarations) -> Tensors:
    """What this client kept after its last accepted round; all else is forgotten."""
    valid = f"{MEMORY}{last_round}"
    for name in [name for name in context.state if name.startswith(MEMORY) and name != valid]:
        del context.state[name]
    record = context.state.get(valid)
    if isinstance(record, ArrayRecord):
        return read_tensors(record, _like(declared), "memory")
    return initial_tensors(declared)
