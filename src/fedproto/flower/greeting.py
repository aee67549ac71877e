"""The first messages: the server asks a node who it is, and says which data set is meant."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict

from fedproto.config import RunConfig, read_config
from fedproto.errors import FedprotoError
from fedproto.flower.arrays import UnreadableError
from fedproto.flower.parts import Refusal, about, caught, expect_fields
from fedproto.strategies.contract import LARGEST


@dataclass(frozen=True)
class Hello:
    """What a client tells of itself when it is asked who it is.

    Attributes:
        client: Its stable id.
        num_train: Samples it trains on.
        num_test: Samples it tests on.
        num_classes: Classes of its data set.
        input_shape: Shape of one input.
        task: Name of the task.
    """

    client: int
    num_train: int
    num_test: int
    num_classes: int
    input_shape: tuple[int, ...]
    task: str


def encode_question(config: RunConfig) -> RecordDict:
    """The server asks a node who it is and what it holds of a data set."""
    return RecordDict({"question": about({"config": config_text(config)})})


def decode_question(content: RecordDict) -> RunConfig | Refusal:
    """Which data set the server asks about."""
    return caught(lambda: expect_config(expect_fields(content, "question", {"config": str})))


def encode_hello(hello: Hello) -> RecordDict:
    """A client's answer to the server's question."""
    fields = {
        "client": hello.client,
        "num_train": hello.num_train,
        "num_test": hello.num_test,
        "num_classes": hello.num_classes,
        "input_shape": json.dumps(hello.input_shape),
        "task": hello.task,
    }
    return RecordDict({"hello": about(fields)})


def decode_hello(content: RecordDict, max_examples: int) -> Hello | Refusal:
    """Who a client says it is; a number of samples beyond the bound is not believed."""
    return caught(lambda: _read_hello(content, max_examples))


def config_text(config: RunConfig) -> str:
    """The sections a client needs; schedule, records and stopping are the server's business."""
    tables = config.to_dict()
    wanted = ("strategy", "data", "model", "train", "engine")
    return json.dumps({name: tables[name] for name in wanted if name in tables})


def expect_config(fields: Mapping[str, Any]) -> RunConfig:
    """The configuration among a message's fields, with data and model.

    Raises:
        UnreadableError: If it cannot be read.
    """
    try:
        config = read_config(json.loads(fields["config"]))
    except (FedprotoError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"the configuration cannot be read: {error}") from None
    if config.data is None or config.model is None:
        raise UnreadableError("the configuration names no data or no model")
    return config


def _read_hello(content: RecordDict, max_examples: int) -> Hello:
    wanted = {
        "client": int,
        "num_train": int,
        "num_test": int,
        "num_classes": int,
        "input_shape": str,
        "task": str,
    }
    fields = expect_fields(content, "hello", wanted)
    try:
        shape = json.loads(fields["input_shape"])
    except (ValueError, RecursionError):
        shape = None
    if not isinstance(shape, list) or not all(type(side) is int and side > 0 for side in shape):
        raise UnreadableError("its input shape is no list of positive numbers")
    if math.prod(shape) > LARGEST:
        raise UnreadableError("its input shape is too large")
    if fields["client"] < 0 or fields["num_classes"] < 1 or fields["num_test"] < 0:
        raise UnreadableError("it claims a negative id or number")
    if not 1 <= fields["num_train"] <= max_examples or fields["num_test"] > max_examples:
        raise UnreadableError(
            f"it claims {fields['num_train']} training and {fields['num_test']} test samples;"
            f" flower.max_examples is {max_examples}"
        )
    return Hello(**(fields | {"input_shape": tuple(shape)}))
