"""The wire format: greetings, jobs, updates and tests as Flower records, checked on arrival.

Every message carries the protocol's version. Numbers and texts travel in one `ConfigRecord`,
tensors in `ArrayRecord`s. A reader knows from its own side which names, types and shapes must
come; whatever else arrives is an `UnreadableError` with a reason in one line, and nothing is ever
unpickled.
"""

from __future__ import annotations

import io
import json
import math
import tokenize
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedproto.config import RunConfig, read_config
from fedproto.disk.files import limits
from fedproto.engines.base import LocalJob
from fedproto.errors import FedprotoError
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds.aggregate import Expected
from fedproto.strategies.base import LARGEST, Declarations, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors

SERVERS_OWN = frozenset(
    {
        *("seed", "label", "schedule", "evaluate", "measure", "stop", "store", "flower"),
        *("server", "aggregate"),
    }
)
"""What a client has no use for: who takes part, how updates are combined, what is recorded."""

LONGEST_NAME = 200

NONE_YET = -1
"""The last accepted round of a client that has none."""


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


def encode_job(job: LocalJob, config: RunConfig) -> RecordDict:
    """A job as a message; of the server's memory goes along what the strategy broadcasts."""
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
    content = _with_model("job", fields, job.state)
    if job.broadcast:
        content["broadcast"] = write_tensors(job.broadcast)
    return content


def decode_job_config(content: RecordDict) -> RunConfig:
    """Strategy, data, model, training and device of a job or test: what a client builds first."""
    kind = "test" if "test" in content else "job"
    record = content.get(kind)
    text = record.get("config") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise UnreadableError(f"the message has no {kind} with a configuration")
    return expect_config({"config": text})


# Long: every field of a message is checked in turn.
def decode_job(
    content: RecordDict, config: RunConfig, like: ServerState, setting: Setting
) -> LocalJob:
    """A job, without what the client itself remembers.

    What the weights must look like is said by a state of the client's own model, what else there is
    by the strategy's declarations.
    """
    wanted = {
        **dict.fromkeys(("client", "round", "seed", "order_seed", "num_examples"), int),
        **dict.fromkeys(("epochs", "max_steps", "last_round", "keep_from"), int),
        **{"config": str, "run": str, "lr": float},
    }
    fields = expect_fields(content, "job", wanted, beside=("params", "buffers", "broadcast"))
    last_round = fields.pop("last_round")
    if not NONE_YET <= last_round < fields["round"]:
        raise UnreadableError("the job's last round of this client is not before its round")
    numbers = [name for name in fields if wanted[name] is int]
    if any(fields[name] < 0 for name in numbers) or fields["num_examples"] == 0:
        raise UnreadableError("the job has a negative number")
    if not (math.isfinite(fields["lr"]) and fields["lr"] >= 0):
        raise UnreadableError("the job's learning rate is not a positive number")
    if fields["seed"] >= 2**63 or fields["order_seed"] >= 2**63:
        raise UnreadableError("the job's seed is too large")
    _check_run(fields["run"])
    params, buffers = _model_tensors(content, like.params, like.buffers)
    sent = {
        name: one
        for name, one in config.strategy.server_memory(setting).items()
        if one.broadcast and (one.initial is not None or "broadcast" in content)
    }
    broadcast = expect_declared(content, "broadcast", sent)
    for name, tensor in {**params, **buffers, **broadcast}.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UnreadableError(f"the job's tensor '{name}' is not finite")
    round_ = fields["round"]
    return LocalJob(
        client=fields["client"],
        state=ServerState(round_, params, buffers),
        method=config.method,
        batches=BatchOrder(
            fields["order_seed"],
            round_,
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
    """An update as a reply; what the client remembers stays there."""
    fields: dict[str, Any] = {
        "client": update.client,
        "round": round_,
        "num_examples": update.num_examples,
        "epochs_done": update.epochs_done,
        "began_anew": began_anew,
    }
    if update.train_loss is not None:
        fields["train_loss"] = update.train_loss
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        "update": about(fields),
        "params": write_tensors(update.params),
        "buffers": write_tensors(update.buffers),
    }
    if update.payload:
        records["payload"] = write_tensors(update.payload)
    return RecordDict(records)


def decode_update(
    content: RecordDict, job: LocalJob, setting: Setting
) -> tuple[ClientUpdate, bool]:
    """An update in the layout that the job asks for, and whether its client began anew.

    The guard checks its values.
    """
    fields = expect_fields(
        content,
        "update",
        dict.fromkeys(("client", "round", "num_examples", "epochs_done"), int)
        | {"began_anew": bool},
        optional={"train_loss": float},
        beside=("params", "buffers", "payload"),
    )
    if fields["round"] != job.state.round:
        raise UnreadableError(f"the update is not of round {job.state.round}")
    expected = Expected.of(job, setting)
    params, buffers = _model_tensors(content, expected.params, job.state.buffers)
    declared = expected.payload
    payload = expect_declared(content, "payload", declared)
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


def encode_test(
    client: int,
    state: ServerState,
    config: RunConfig,
    num_examples: int,
    *,
    validation: bool = False,
    run: str = "",
    last_round: int | None = None,
) -> RecordDict:
    """A model to be tested on some samples of a client's own test part, or validation part."""
    fields = {
        "config": config_text(config),
        "client": client,
        "round": state.round,
        "num_examples": num_examples,
        "validation": validation,
        "run": run,
        "last_round": NONE_YET if last_round is None else last_round,
    }
    return _with_model("test", fields, state)


def decode_test(content: RecordDict, like: ServerState) -> TestJob:
    """A model to test, for a client whose own model tells what it must look like."""
    numbers = dict.fromkeys(("client", "round", "num_examples", "last_round"), int)
    wanted = {"config": str, "validation": bool, "run": str, **numbers}
    fields = expect_fields(content, "test", wanted, beside=("params", "buffers"))
    _check_run(fields["run"] or "none")
    state = ServerState(fields["round"], *_model_tensors(content, like.params, like.buffers))
    last = None if fields["last_round"] == NONE_YET else fields["last_round"]
    return TestJob(
        fields["client"], state, fields["num_examples"], fields["validation"], fields["run"], last
    )


def encode_tally(client: int, round_: int, tally: torch.Tensor) -> RecordDict:
    """The sums from which the scores of all clients together are computed."""
    fields = {"client": client, "round": round_}
    return RecordDict({"tally": about(fields), "sums": write_tensors({"tally": tally.double()})})


def decode_tally(content: RecordDict, client: int, round_: int) -> torch.Tensor:
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
    return RecordDict({"refusal": about({"reason": one_line(reason)})})


def decode_refusal(content: RecordDict) -> str | None:
    """The reason why the other side gave no answer; None when it gave one."""
    if "refusal" not in content:
        return None
    return one_line(expect_fields(content, "refusal", {"reason": str})["reason"])


def _with_model(kind: str, fields: Mapping[str, Any], state: ServerState) -> RecordDict:
    return RecordDict(
        {
            kind: about(fields),
            "params": write_tensors(state.params),
            "buffers": write_tensors(state.buffers),
        }
    )


def _model_tensors(
    content: RecordDict, params: Tensors, buffers: Tensors
) -> tuple[Tensors, Tensors]:
    """A model's tensors, in the layout of others."""
    return (
        read_tensors(expect_arrays(content, "params"), params, "params"),
        read_tensors(expect_arrays(content, "buffers"), buffers, "buffers"),
    )


PROTOCOL = 5
"""Changes whenever a reader of the version before could misread a message."""

LONGEST_TEXT = 100_000

NUMPY_FORMAT = "numpy.ndarray"
LONGEST_HEADER = 1024
LONGEST_REASON = 300


class UnreadableError(FedprotoError):
    """A message that is not what it should be, or a refusal: why, in one printable line."""

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
    """A record's tensors: the names, types, shapes and device of others, and no others."""
    _check_names(record, like, kind)
    return {
        name: read_tensor(record[name], wanted.dtype, tuple(wanted.shape), name).to(wanted.device)
        for name, wanted in like.items()
    }


def read_tensor(
    array: Array, dtype: torch.dtype, shape: tuple[int, ...] | None, name: str
) -> Tensor:
    """One tensor of a type and shape; None for a vector of any length."""
    wanted = torch.empty(0, dtype=dtype).numpy().dtype
    if array.stype != NUMPY_FORMAT or array.dtype != str(wanted):
        raise UnreadableError(f"tensor '{name}' has type {array.dtype[:30]!r}, not {wanted}")
    if shape is not None and tuple(array.shape) != shape:
        raise UnreadableError(f"tensor '{name}' has shape {tuple(array.shape)}, not {shape}")
    file = io.BytesIO(array.data)
    found, rows_first, found_dtype = _read_header(file, name)
    if found_dtype != wanted or found != tuple(array.shape) or not rows_first:
        raise UnreadableError(f"tensor '{name}' is not what its description says")
    if shape is None and len(found) != 1:
        raise UnreadableError(f"tensor '{name}' is no vector")
    body = array.data[file.tell() :]
    if len(body) != wanted.itemsize * int(np.prod(found, dtype=object)):
        raise UnreadableError(f"tensor '{name}' has {len(body)} bytes, not what its shape needs")
    # A copy, because PyTorch wants memory that it may write to.
    return torch.from_numpy(np.frombuffer(body, dtype=wanted).reshape(found).copy())


def _check_names(record: Mapping[str, Array], like: Tensors, kind: str) -> None:
    odd = sorted(record.keys() ^ like.keys())
    if odd:
        fault = "is missing" if odd[0] in like else "is unknown"
        raise UnreadableError(f"{kind} '{odd[0][:100]}' {fault}")


def _read_header(file: io.BytesIO, name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise UnreadableError(f"tensor '{name}' is in a format that this side does not read")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shape, columns_first, dtype = np.lib.format.read_array_header_1_0(
                file, max_header_size=LONGEST_HEADER
            )
    except (
        ValueError,
        TypeError,
        SyntaxError,
        EOFError,
        RecursionError,
        MemoryError,
        tokenize.TokenError,
        UserWarning,
    ):
        raise UnreadableError(f"tensor '{name}' is no array") from None
    rows_first = not columns_first
    return tuple(int(side) for side in shape), rows_first, dtype


def about(fields: Mapping[str, Any]) -> ConfigRecord:
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
        raise UnreadableError(
            f"the message is of protocol {version!r}; this side speaks {PROTOCOL}"
        )
    known = {**wanted, **(optional or {})}
    for field, value in fields.items():
        _check_field(f"{name} field '{field}'", value, known.get(field))
    for field in wanted:
        if field not in fields:
            raise UnreadableError(f"{name} has no field '{field}'")
    return fields


def _check_field(what: str, value: object, wanted: type | None) -> None:
    if wanted is None:
        raise UnreadableError(f"{what} is unknown")
    if type(value) is not wanted:
        raise UnreadableError(f"{what} is not of type {wanted.__name__}")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise UnreadableError(f"{what} is too long")


def expect_arrays(content: RecordDict, name: str) -> ArrayRecord:
    """A message's tensors of a name."""
    record = content.get(name)
    if not isinstance(record, ArrayRecord):
        raise UnreadableError(f"the message has no tensors '{name}'")
    return record


def expect_declared(content: RecordDict, name: str, declared: Declarations) -> Tensors:
    """A message's tensors that a strategy declared; none where it declared none."""
    if not declared and name not in content:
        return {}
    like = {key: torch.empty(one.shape, dtype=one.dtype) for key, one in declared.items()}
    return read_tensors(expect_arrays(content, name), like, name)
