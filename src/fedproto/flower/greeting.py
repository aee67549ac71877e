"""The first messages: the server asks a node who it is, and says which data set is meant."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import RecordDict

from fedproto.config import RunConfig, read_config
from fedproto.disk.limits import limits
from fedproto.errors import FedprotoError
from fedproto.flower.arrays import UnreadableError
from fedproto.flower.parts import about, expect_fields
from fedproto.strategies.contract import LARGEST

SERVERS_OWN = frozenset(
    {
        *("seed", "label", "schedule", "evaluate", "measure", "stop", "store", "flower"),
        *("server", "aggregate"),
    }
)
"""What a client has no use for: who takes part, how updates are combined, what is recorded."""

LONGEST_NAME = 200


@dataclass(frozen=True)
class Hello:
    """What a client tells of itself when it is asked who it is.

    Attributes:
        num_train: Samples it trains on.
        num_test: Samples it tests on.
        num_validation: Samples of its own that were taken out for validation.
        class_names: What the classes are called; may be empty.
    """

    client: int
    num_train: int
    num_test: int
    num_classes: int
    input_shape: tuple[int, ...]
    task: str
    num_validation: int = 0
    class_names: tuple[str, ...] = ()


def encode_question(config: RunConfig) -> RecordDict:
    """The server asks a node who it is and what it holds of a data set."""
    return RecordDict({"question": about({"config": config_text(config)})})


def decode_question(content: RecordDict) -> RunConfig:
    """Which data set the server asks about."""
    return expect_config(expect_fields(content, "question", {"config": str}))


def encode_hello(hello: Hello) -> RecordDict:
    """A client's answer to the server's question."""
    lists = {name: json.dumps(getattr(hello, name)) for name in ("input_shape", "class_names")}
    return RecordDict({"hello": about(asdict(hello) | lists)})


def config_text(config: RunConfig) -> str:
    """All sections but those that are the server's own business, however many there will be."""
    tables = config.to_dict()
    return json.dumps({name: part for name, part in tables.items() if name not in SERVERS_OWN})


def expect_config(fields: Mapping[str, Any]) -> RunConfig:
    """The configuration among a message's fields, with data and model."""
    try:
        config = read_config(json.loads(fields["config"]))
    except (FedprotoError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"the configuration cannot be read: {error}") from None
    if config.data is None or config.model is None:
        raise UnreadableError("the configuration names no data or no model")
    return config


def decode_hello(content: RecordDict, max_examples: int) -> Hello:
    """Who a client says it is; a number of samples beyond the bound is not believed."""
    wanted: dict[str, type] = {
        **dict.fromkeys(("client", "num_train", "num_test", "num_classes", "num_validation"), int),
        **dict.fromkeys(("input_shape", "task", "class_names"), str),
    }
    fields = expect_fields(content, "hello", wanted)
    shape, names = _list(fields["input_shape"]), _list(fields["class_names"])
    if shape is None or not all(type(side) is int and side > 0 for side in shape):
        raise UnreadableError("its input shape is no list of positive numbers")
    if names is None or not all(isinstance(one, str) and len(one) <= LONGEST_NAME for one in names):
        raise UnreadableError("its class names are no list of short texts")
    if len(names) not in (0, fields["num_classes"]):
        raise UnreadableError(f"it has {len(names)} names for {fields['num_classes']} classes")
    if math.prod(shape) > LARGEST:
        raise UnreadableError("its input shape is too large")
    held = fields["num_test"], fields["num_validation"]
    if fields["client"] < 0 or fields["num_classes"] < 1 or min(held) < 0:
        raise UnreadableError("it claims a negative id or number")
    if fields["num_classes"] > limits().classes:
        raise UnreadableError(f"it claims {fields['num_classes']} classes")
    if not 1 <= fields["num_train"] <= max_examples or max(held) > max_examples:
        raise UnreadableError(
            f"it claims {fields['num_train']} training and {fields['num_test']} test samples;"
            f" flower.max_examples is {max_examples}"
        )
    return Hello(**(fields | {"input_shape": tuple(shape), "class_names": tuple(names)}))


def _list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None
