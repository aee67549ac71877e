"""The wire format: messages between server and clients as Flower records, checked on arrival.

Every message carries the protocol's version. Numbers and strings travel in one `ConfigRecord`,
tensors in `ArrayRecord`s in Flower's own format (NumPy's ``.npy``), so other Flower code can read
ours. A reader knows from its own side which names, types and shapes must come, and compares them
before anything is allocated. Anything else raises `UnreadableError` with a reason in one line.
Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedproto.config import RunConfig, read_config
from fedproto.disk.files import limits
from fedproto.engines.base import LocalJob
from fedproto.errors import FedprotoError
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds.aggregate import Expected
from fedproto.strategies.values import LARGEST, Declarations, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors

PROTOCOL = 5
"""Changes whenever a reader of the version before could misread a message."""

SERVERS_OWN = frozenset(
    {
        *("seed", "label", "schedule", "evaluate", "measure", "stop", "store", "flower"),
        *("server", "aggregate"),
    }
)
"""Sections that clients do not need: who takes part, how updates are combined, recording."""

LONGEST_TEXT = 100_000
LONGEST_REASON = 300
LONGEST_NAME = 200
MOST_DIMENSIONS = 8

NUMPY_FORMAT = "numpy.ndarray"
NUMPY_MAGIC = b"\x93NUMPY\x01\x00"

NONE_YET = -1
"""The last accepted round of a client that has none."""


class UnreadableError(FedprotoError):
    """A message that is not as expected, or a refusal: why, in one printable line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str) -> str:
    """A stranger's text, made fit for a record: one line, printable, not too long."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 1] + "…"


def write_tensors(tensors: Tensors) -> ArrayRecord:
    """Named tensors as a record, rows first whatever their order in memory."""
    return ArrayRecord(
        {
            name: Array(np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tensor.shape))
            for name, tensor in tensors.items()
        }
    )


def read_tensors(record: ArrayRecord, like: Tensors, kind: str) -> dict[str, Tensor]:
    """A record's tensors, which must have the names, types and shapes of others."""
    odd = sorted(record.keys() ^ like.keys())
    if odd:
        fault = "is missing" if odd[0] in like else "is unknown"
        raise UnreadableError(f"{kind} '{odd[0][:100]}' {fault}")
    return {
        name: read_tensor(record[name], wanted.dtype, tuple(wanted.shape), name).to(wanted.device)
        for name, wanted in like.items()
    }


def read_tensor(
    array: Array, dtype: torch.dtype, shape: tuple[int, ...] | None, name: str
) -> Tensor:
    """One tensor of a type and shape; None for a vector of any length.

    The header of an ``.npy`` file is not parsed, but compared with the one that must be there.
    """
    wanted, found = torch.empty(0, dtype=dtype).numpy().dtype, tuple(array.shape)
    if array.stype != NUMPY_FORMAT or array.dtype != str(wanted):
        raise UnreadableError(f"tensor '{name}' has type {array.dtype[:30]!r}, not {wanted}")
    if found != shape and (shape is not None or len(found) != 1):
        raise UnreadableError(f"tensor '{name}' has shape {found}, not {shape or 'of a vector'}")
    if array.data[:8] != NUMPY_MAGIC:
        raise UnreadableError(f"tensor '{name}' is no array")
    end = 10 + int.from_bytes(array.data[8:10], "little")
    header = f"{{'descr': {wanted.str!r}, 'fortran_order': False, 'shape': {found}, }}"
    if array.data[10:end].rstrip() != header.encode():
        raise UnreadableError(f"tensor '{name}' is not what its description says")
    body = array.data[end:]
    if len(body) != wanted.itemsize * math.prod(found):
        raise UnreadableError(f"tensor '{name}' has {len(body)} bytes, not what its shape needs")
    # A copy, because PyTorch wants memory that it may write to.
    return torch.from_numpy(np.frombuffer(body, dtype=wanted).reshape(found).copy())


def expect_arrays(content: RecordDict, name: str) -> ArrayRecord:
    """A message's record of tensors."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise UnreadableError(f"the message has no tensors '{name}'")
    return record


def expect_declared(content: RecordDict, name: str, declared: Declarations) -> Tensors:
    """A message's tensors that a strategy declared; none where it declared none."""
    if not declared and name not in content:
        return {}
    return read_tensors(expect_arrays(content, name), like(declared), name)


def like(declared: Declarations) -> Tensors:
    """Tensors of the types and shapes that a strategy declared."""
    return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in declared.items()}


def write_fields(fields: Mapping[str, Any]) -> ConfigRecord:
    """Fields as a record that names the protocol's version."""
    return ConfigRecord({"protocol": PROTOCOL, **fields})


def expect_fields(
    content: RecordDict,
    name: str,
    wanted: Mapping[str, type],
    *,
    optional: Mapping[str, type] | None = None,
    beside: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The fields of a message's `ConfigRecord`, all of the right type and none too many.

    Fields of `optional` may be missing; the message may have other records beside.
    """
    for other in content:
        if other != name and other not in beside:
            raise UnreadableError(f"the message has an unexpected part '{other}'")
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise UnreadableError(f"the message has no part '{name}'")
    fields = dict(record)
    version = fields.pop("protocol", None)
    if type(version) is not int or version != PROTOCOL:
        raise UnreadableError(f"the message is of protocol {version!r}; this side uses {PROTOCOL}")
    known = {**wanted, **(optional or {})}
    for field, value in fields.items():
        _check_field(f"{name} field '{field}'", value, known.get(field))
    missing = sorted(wanted.keys() - fields.keys())
    if missing:
        raise UnreadableError(f"{name} has no field '{missing[0]}'")
    return fields


def _check_field(what: str, value: object, wanted: type | None) -> None:
    if wanted is None:
        raise UnreadableError(f"{what} is unknown")
    if type(value) is not wanted:
        raise UnreadableError(f"{what} is not of type {wanted.__name__}")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise UnreadableError(f"{what} is too long")


@dataclass(frozen=True)
class Hello:
    """A client's description of itself.

    Attributes:
        num_train: Samples it trains on.
        num_test: Samples it tests on.
        num_validation: Samples of its own that were taken out for validation.
        class_names: Names of the classes; may be empty.
    """

    client: int
    num_train: int
    num_test: int
    num_classes: int
    input_shape: tuple[int, ...]
    task: str
    num_validation: int = 0
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class TestJob:
    """Test this model on a client's test part, or on its validation part.

    Attributes:
        run: Digest of the run whose memory the client lays over the model; empty for none.
        last_round: The round whose memory is valid; None for none.
    """

    client: int
    state: ServerState
    num_examples: int
    validation: bool = False
    run: str = ""
    last_round: int | None = None


def config_text(config: RunConfig) -> str:
    """All sections but those that are the server's own business."""
    tables = config.to_dict()
    return json.dumps({name: part for name, part in tables.items() if name not in SERVERS_OWN})


def read_config_text(text: str) -> RunConfig:
    """A configuration with data and model."""
    try:
        config = read_config(json.loads(text))
    except (FedprotoError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"the configuration cannot be read: {error}") from None
    if config.data is None or config.model is None:
        raise UnreadableError("the configuration names no data or no model")
    return config


def encode_question(config: RunConfig) -> RecordDict:
    """Asks a node who it is and which samples of a data set it holds."""
    return RecordDict({"question": write_fields({"config": config_text(config)})})


def decode_question(content: RecordDict) -> RunConfig:
    """The configuration whose data the server asks about."""
    return read_config_text(expect_fields(content, "question", {"config": str})["config"])


def encode_hello(hello: Hello) -> RecordDict:
    """A client's answer to the server's question."""
    lists = {name: list(getattr(hello, name)) for name in ("input_shape", "class_names")}
    return RecordDict({"hello": write_fields(asdict(hello) | lists)})


def decode_hello(content: RecordDict, max_examples: int) -> Hello:
    """A client's description of itself, with at most `max_examples` samples."""
    wanted: dict[str, type] = {
        **dict.fromkeys(("client", "num_train", "num_test", "num_classes", "num_validation"), int),
        **{"input_shape": list, "class_names": list, "task": str},
    }
    fields = expect_fields(content, "hello", wanted)
    shape, names, num_classes = (
        fields[name] for name in ("input_shape", "class_names", "num_classes")
    )
    if not all(type(side) is int and side > 0 for side in shape):
        raise UnreadableError("its input shape is no list of positive numbers")
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) > LARGEST:
        raise UnreadableError("its input shape is too large")
    if not all(isinstance(one, str) and len(one) <= LONGEST_NAME for one in names):
        raise UnreadableError("its class names are no list of short strings")
    if len(names) not in (0, num_classes):
        raise UnreadableError(f"it has {len(names)} names for {num_classes} classes")
    held = fields["num_test"], fields["num_validation"]
    if fields["client"] < 0 or num_classes < 1 or min(held) < 0:
        raise UnreadableError("it claims a negative id or number")
    if num_classes > limits().classes:
        raise UnreadableError(f"it claims {num_classes} classes")
    if not 1 <= fields["num_train"] <= max_examples or max(held) > max_examples:
        raise UnreadableError(
            f"it claims {fields['num_train']} training and {fields['num_test']} test samples;"
            f" flower.max_examples is {max_examples}"
        )
    return Hello(**(fields | {"input_shape": tuple(shape), "class_names": tuple(names)}))


JOB_FIELDS: dict[str, type] = {
    **dict.fromkeys(("client", "round", "seed", "order_seed", "num_examples"), int),
    **dict.fromkeys(("epochs", "max_steps", "last_round", "keep_from"), int),
    **{"config": str, "run": str, "lr": float},
}


def encode_job(job: LocalJob, config: RunConfig) -> RecordDict:
    """A job as a message; of the server's memory it has the part that the strategy broadcasts."""
    batches = job.batches
    fields = {
        "config": config_text(config),
        "client": job.client,
        "round": job.state.round,
        "lr": job.lr,
        "seed": job.seed,
        "order_seed": batches.seed,
        "num_examples": batches.num_examples,
        "epochs": batches.epochs,
        "max_steps": batches.max_steps,
        "last_round": NONE_YET if job.last_round is None else job.last_round,
        "keep_from": job.keep_from,
        "run": job.run,
    }
    return _with_model("job", fields, job.state, broadcast=job.broadcast)


def decode_job_config(content: RecordDict) -> RunConfig:
    """Strategy, data, model, training and device of a job or test, which a client builds first."""
    kind = "test" if "test" in content else "job"
    record = content.get(kind)
    text = record.get("config") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise UnreadableError(f"the message has no {kind} with a configuration")
    return read_config_text(text)


def decode_job(
    content: RecordDict, config: RunConfig, layout: ServerState, setting: Setting
) -> LocalJob:
    """A job, without the client's own memory.

    The client's own model gives the layout of the weights, the strategy's declarations that of
    the broadcast.
    """
    fields = expect_fields(content, "job", JOB_FIELDS, beside=("params", "buffers", "broadcast"))
    last_round = fields.pop("last_round")
    if not NONE_YET <= last_round < fields["round"]:
        raise UnreadableError("the job's last round of this client is not before its round")
    numbers = [value for name, value in fields.items() if JOB_FIELDS[name] is int]
    if min(numbers) < 0 or fields["num_examples"] == 0:
        raise UnreadableError("the job has a negative number")
    if not (math.isfinite(fields["lr"]) and fields["lr"] >= 0):
        raise UnreadableError("the job's learning rate is not a positive number")
    if fields["seed"] >= 2**63 or fields["order_seed"] >= 2**63:
        raise UnreadableError("the job's seed is too large")
    _check_run(fields["run"])
    params, buffers = _model_tensors(content, layout.params, layout.buffers)
    sent = {
        name: one
        for name, one in config.strategy.server_memory(setting).items()
        if one.broadcast and (one.initial is not None or "broadcast" in content)
    }
    broadcast = expect_declared(content, "broadcast", sent)
    for name, tensor in {**params, **buffers, **broadcast}.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UnreadableError(f"the job's tensor '{name}' is not finite")
    return LocalJob(
        client=fields["client"],
        state=ServerState(fields["round"], params, buffers),
        method=config.method,
        batches=BatchOrder(
            fields["order_seed"],
            fields["round"],
            fields["client"],
            fields["num_examples"],
            config.train.batch_size,
            fields["epochs"],
            fields["max_steps"],
        ),
        train=config.train,
        augment=config.augmentation,
        lr=fields["lr"],
        seed=fields["seed"],
        broadcast=broadcast,
        run=fields["run"],
        last_round=None if last_round == NONE_YET else last_round,
        keep_from=fields["keep_from"],
    )


def _check_run(run: str) -> None:
    """A run's digest names a folder on the client."""
    if not (run.isascii() and run.isalnum() and len(run) <= 64):
        raise UnreadableError("the run is not named by a digest")


def encode_update(update: ClientUpdate, round_: int, *, began_anew: bool = False) -> RecordDict:
    """An update as a reply; the client's memory stays there."""
    fields: dict[str, Any] = {
        "client": update.client,
        "round": round_,
        "num_examples": update.num_examples,
        "epochs_done": update.epochs_done,
        "began_anew": began_anew,
    }
    if update.train_loss is not None:
        fields["train_loss"] = update.train_loss
    return _with_model("update", fields, update, payload=update.payload)


def decode_update(
    content: RecordDict, job: LocalJob, setting: Setting
) -> tuple[ClientUpdate, bool]:
    """An update in the layout that the job asks for, and whether its client had lost its memory.

    The guard checks its values.
    """
    fields = expect_fields(
        content,
        "update",
        {
            **dict.fromkeys(("client", "round", "num_examples", "epochs_done"), int),
            "began_anew": bool,
        },
        optional={"train_loss": float},
        beside=("params", "buffers", "payload"),
    )
    if fields["round"] != job.state.round:
        raise UnreadableError(f"the update is not of round {job.state.round}")
    expected = Expected.of(job, setting)
    params, buffers = _model_tensors(content, expected.params, job.state.buffers)
    payload = expect_declared(content, "payload", expected.payload)
    device = next(iter(params.values())).device
    update = ClientUpdate(
        client=fields["client"],
        num_examples=fields["num_examples"],
        params=params,
        buffers=buffers,
        train_loss=fields.get("train_loss"),
        epochs_done=fields["epochs_done"],
        steps=job.batches.steps,
        lr=job.lr,
        payload={name: tensor.to(device) for name, tensor in payload.items()},
    )
    return update, fields["began_anew"]


def encode_test(test: TestJob, config: RunConfig) -> RecordDict:
    """A model to be tested on some of a client's own samples."""
    fields = {
        "config": config_text(config),
        "client": test.client,
        "round": test.state.round,
        "num_examples": test.num_examples,
        "validation": test.validation,
        "run": test.run,
        "last_round": NONE_YET if test.last_round is None else test.last_round,
    }
    return _with_model("test", fields, test.state)


def decode_test(content: RecordDict, layout: ServerState) -> TestJob:
    """A model to test, in the layout of the client's own."""
    numbers = dict.fromkeys(("client", "round", "num_examples", "last_round"), int)
    wanted = {"config": str, "validation": bool, "run": str, **numbers}
    fields = expect_fields(content, "test", wanted, beside=("params", "buffers"))
    _check_run(fields["run"] or "none")
    state = ServerState(fields["round"], *_model_tensors(content, layout.params, layout.buffers))
    last = None if fields["last_round"] == NONE_YET else fields["last_round"]
    return TestJob(
        fields["client"], state, fields["num_examples"], fields["validation"], fields["run"], last
    )


def encode_tally(client: int, round_: int, tally: Tensor) -> RecordDict:
    """The sums from which the scores of all clients together are computed."""
    fields = write_fields({"client": client, "round": round_})
    return RecordDict({"tally": fields, "sums": write_tensors({"tally": tally.double()})})


def decode_tally(content: RecordDict, client: int, round_: int) -> Tensor:
    """A client's sums, in float64; their values are for the task to check."""
    fields = expect_fields(content, "tally", {"client": int, "round": int}, beside=("sums",))
    if fields != {"client": client, "round": round_}:
        raise UnreadableError(f"the test is not of client {client} in round {round_}")
    record = expect_arrays(content, "sums")
    if set(record) != {"tally"}:
        raise UnreadableError("the test has no sums 'tally'")
    return read_tensor(record["tally"], torch.float64, None, "tally")


def encode_refusal(reason: str) -> RecordDict:
    """Tells the other side why there is no answer."""
    return RecordDict({"refusal": write_fields({"reason": one_line(reason)})})


def decode_refusal(content: RecordDict) -> str | None:
    """The reason why the other side gave no answer; None when it gave one."""
    if "refusal" not in content:
        return None
    return one_line(expect_fields(content, "refusal", {"reason": str})["reason"])


def _with_model(
    kind: str, fields: Mapping[str, Any], model: ServerState | ClientUpdate, **parts: Tensors
) -> RecordDict:
    content = RecordDict({kind: write_fields(fields)})
    for name, tensors in {"params": model.params, "buffers": model.buffers}.items():
        content[name] = write_tensors(tensors)
    for name, tensors in parts.items():
        if tensors:
            content[name] = write_tensors(tensors)
    return content


def _model_tensors(
    content: RecordDict, params: Tensors, buffers: Tensors
) -> tuple[Tensors, Tensors]:
    return (
        read_tensors(expect_arrays(content, "params"), params, "params"),
        read_tensors(expect_arrays(content, "buffers"), buffers, "buffers"),
    )
