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
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedproto.config import RunConfig, read_config
from fedproto.disk.files import limits
from fedproto.engines.base import LocalJob
from fedproto.errors import ConfigError, FedprotoError
from fedproto.options import Options, options_to_dict, read_options
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds.aggregate import sent_back
from fedproto.strategies.values import LARGEST, Declarations, Setting
from fedproto.types import ClientUpdate, ServerState, Tensors

PROTOCOL = 7
"""Changes whenever a reader of the version before could misread a message."""

SERVERS_OWN = frozenset(
    {
        *("seed", "label", "schedule", "evaluate", "measure", "stop", "store", "flower"),
        *("server", "aggregate"),
    }
)
"""Sections that clients do not need: cohorts, aggregation, recording."""

MOST_EXAMPLES = 10_000_000
"""More samples than this no client is believed to have."""

LONGEST_TEXT = 100_000
LONGEST_REASON = 300
LONGEST_NAME = 200
MOST_DIMENSIONS = 8

NUMPY_FORMAT = "numpy.ndarray"
NUMPY_MAGIC = b"\x93NUMPY\x01\x00"

H = TypeVar("H", bound="Header")


class UnreadableError(FedprotoError):
    """An invalid message, or a refusal: the reason in one printable line."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str) -> str:
    """Untrusted text for a record: one line, printable, not too long."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= LONGEST_REASON else words[: LONGEST_REASON - 1] + "…"


def write_tensors(tensors: Tensors) -> ArrayRecord:
    """Named tensors as a record, rows first whatever their order in memory."""
    return ArrayRecord({name: Array(one.detach().contiguous()) for name, one in tensors.items()})


def read_tensors(content: RecordDict, name: str, like: Tensors) -> dict[str, Tensor]:
    """A message's tensors, which must have the names, types and shapes of others.

    Where there are none to be read, the record may be missing.
    """
    record = content.get(name)
    if record is None and not like:
        return {}
    if not isinstance(record, ArrayRecord):
        raise UnreadableError(f"the message has no tensors '{name}'")
    odd = sorted(record.keys() ^ like.keys())
    if odd:
        fault = "is missing" if odd[0] in like else "is unknown"
        raise UnreadableError(f"{name} '{odd[0][:100]}' {fault}")
    return {
        key: read_tensor(record[key], wanted.dtype, tuple(wanted.shape), key).to(wanted.device)
        for key, wanted in like.items()
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
        raise UnreadableError(f"tensor '{name}' is not an array")
    end = 10 + int.from_bytes(array.data[8:10], "little")
    header = f"{{'descr': {wanted.str!r}, 'fortran_order': False, 'shape': {found}, }}"
    if array.data[10:end].rstrip() != header.encode():
        raise UnreadableError(f"tensor '{name}' does not match its description")
    body = array.data[end:]
    if len(body) != wanted.itemsize * math.prod(found):
        raise UnreadableError(
            f"tensor '{name}' has {len(body)} bytes, which do not match its shape"
        )
    # A copy, because PyTorch wants memory that it may write to.
    return torch.from_numpy(np.frombuffer(body, dtype=wanted).reshape(found).copy())


def like(declared: Declarations) -> Tensors:
    """Tensors of the types and shapes that a strategy declared."""
    return {name: torch.empty(one.shape, dtype=one.dtype) for name, one in declared.items()}


@dataclass(frozen=True)
class Header(Options):
    """The fields of a message.

    Attributes:
        kind: The name of their record.
        parts: Names of the records with tensors that may come along.
    """

    kind: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()


def encode(header: Header, **tensors: Tensors) -> RecordDict:
    """A message; groups of no tensors are left out."""
    fields = ConfigRecord({"protocol": PROTOCOL, **options_to_dict(header)})
    groups = {name: write_tensors(one) for name, one in tensors.items() if one}
    return RecordDict({header.kind: fields, **groups})


def read_header(content: RecordDict, header: type[H]) -> H:
    """The fields of a message: all of the right type, none too many, and no negative integer."""
    kind = header.kind
    odd = sorted(set(content) - {kind, *header.parts})
    if odd:
        raise UnreadableError(f"the message has an unexpected part '{odd[0]}'")
    record = content.get(kind)
    if not isinstance(record, ConfigRecord):
        raise UnreadableError(f"the message has no part '{kind}'")
    values: dict[str, Any] = dict(record)
    version = values.pop("protocol", None)
    if type(version) is not int or version != PROTOCOL:
        raise UnreadableError(f"the message is of protocol {version!r}; this side uses {PROTOCOL}")
    for name, value in values.items():
        several = value if isinstance(value, list) else [value]
        if any(isinstance(one, int) and one < 0 for one in several):
            raise UnreadableError(f"{kind} field '{name}' is negative")
        if any(isinstance(one, str) and len(one) > LONGEST_TEXT for one in several):
            raise UnreadableError(f"{kind} field '{name}' is too long")
    try:
        return read_options(header, values, kind)
    except (ConfigError, TypeError) as error:  # a TypeError where a field is missing
        raise UnreadableError(str(error)) from None


@dataclass(frozen=True)
class Question(Header):
    """Asks a node for its identity and its samples of a data set."""

    kind = "question"
    config: str


@dataclass(frozen=True)
class Hello(Header):
    """A client's description of itself; the names of classes may be empty."""

    kind = "hello"
    client: int
    num_train: int
    num_test: int
    num_classes: int
    input_shape: tuple[int, ...]
    task: str
    num_validation: int = 0
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class TestJob(Header):
    """Test a model on a client's test part, or on its validation part.

    Attributes:
        config: Text of the configuration.
        run: Digest of the run whose memory the client lays over the model; None for none.
        last_round: The round whose memory is valid; None for none.
    """

    kind = "test"
    parts = ("params", "buffers")
    config: str
    client: int
    round: int
    num_examples: int
    validation: bool = False
    run: str | None = None
    last_round: int | None = None


@dataclass(frozen=True)
class _Job(Header):
    """A job without its tensors; `batches` are the fields of its `BatchOrder`."""

    kind = "job"
    parts = ("params", "buffers", "broadcast")
    config: str
    batches: tuple[int, ...]
    lr: float
    seed: int
    keep_from: int
    run: str
    last_round: int | None = None


@dataclass(frozen=True)
class _Update(Header):
    """An update without its tensors; the loss may be NaN, which the guard tells of."""

    kind = "update"
    parts = ("params", "buffers", "payload")
    num_examples: int
    epochs_done: int
    began_anew: bool
    train_loss: Any = None


@dataclass(frozen=True)
class _Refusal(Header):
    kind = "refusal"
    reason: str


def config_text(config: RunConfig) -> str:
    """All sections but those that concern the server alone."""
    tables = config.to_dict()
    return json.dumps({name: part for name, part in tables.items() if name not in SERVERS_OWN})


def decode_config(content: RecordDict) -> RunConfig:
    """The configuration in a question, job or test, with data and model: a client's first step."""
    asked: type[Question | TestJob | _Job] = _Job
    asked = next((one for one in (Question, TestJob) if one.kind in content), asked)
    text = read_header(content, asked).config
    try:
        config = read_config(json.loads(text))
    except (FedprotoError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"the configuration cannot be read: {error}") from None
    if config.data is None or config.model is None:
        raise UnreadableError("the configuration has no data or no model")
    return config


def decode_hello(content: RecordDict) -> Hello:
    """A client's description of itself."""
    return plausible(read_header(content, Hello))


def plausible(hello: Hello) -> Hello:
    """A description, if all that it claims can be."""
    shape, names, num_classes = hello.input_shape, hello.class_names, hello.num_classes
    if min(shape, default=1) < 1 or len(shape) > MOST_DIMENSIONS or math.prod(shape) > LARGEST:
        raise UnreadableError(f"its input shape has a side of 0 or is too large: {shape}")
    if any(len(name) > LONGEST_NAME for name in names) or len(names) not in (0, num_classes):
        raise UnreadableError(f"its {len(names)} class names are too long or not {num_classes}")
    if not 1 <= num_classes <= limits()["classes"]:
        raise UnreadableError(f"it claims {num_classes} classes")
    least, *_, most = sorted([hello.num_train, hello.num_test, hello.num_validation])
    if hello.num_train < 1 or least < 0 or most > MOST_EXAMPLES:
        raise UnreadableError(
            f"it claims {hello.num_train} training and {hello.num_test} test samples, not 1 to"
            f" {MOST_EXAMPLES:,}"
        )
    return hello


def encode_job(job: LocalJob, config: RunConfig) -> RecordDict:
    """A job as a message; of the server's memory it has the part that the strategy broadcasts."""
    header = _Job(
        config_text(config),
        astuple(job.batches),
        job.lr,
        job.seed,
        job.keep_from,
        job.run,
        job.last_round,
    )
    state = job.state
    return encode(header, params=state.params, buffers=state.buffers, broadcast=job.broadcast)


def decode_job(
    content: RecordDict, config: RunConfig, layout: ServerState, setting: Setting
) -> LocalJob:
    """A job, without the client's own memory.

    The client's own model gives the layout of the weights, the strategy's declarations that of
    the broadcast.
    """
    header = read_header(content, _Job)
    if len(header.batches) != len(fields(BatchOrder)):
        raise UnreadableError("the job does not say how its batches are drawn")
    batches = BatchOrder(*header.batches)
    if batches.num_examples == 0 or batches.batch_size != config.train.batch_size:
        raise UnreadableError("the job has no samples, or batches of another size")
    _check_run(header.run)
    params = read_tensors(content, "params", layout.params)
    buffers = read_tensors(content, "buffers", layout.buffers)
    sent = {
        name: one
        for name, one in config.method.sent_memory(setting).items()
        if one.initial is not None or "broadcast" in content
    }
    broadcast = read_tensors(content, "broadcast", like(sent))
    return LocalJob(
        client=batches.client,
        state=ServerState(batches.round, params, buffers),
        method=config.method,
        batches=batches,
        train=config.train,
        augment=config.augmentation,
        lr=header.lr,
        seed=header.seed,
        broadcast=broadcast,
        run=header.run,
        last_round=header.last_round,
        keep_from=header.keep_from,
    )


def _check_run(run: str) -> None:
    """A run's digest names a folder on the client."""
    if not (run.isascii() and run.isalnum() and len(run) <= 64):
        raise UnreadableError("the run is not named by a digest")


def encode_update(update: ClientUpdate, *, began_anew: bool = False) -> RecordDict:
    """An update as a reply; the client's memory stays there."""
    header = _Update(update.num_examples, update.epochs_done, began_anew, update.train_loss)
    return encode(header, params=update.params, buffers=update.buffers, payload=update.payload)


def decode_update(
    content: RecordDict, job: LocalJob, setting: Setting
) -> tuple[ClientUpdate, bool]:
    """An update in the layout that the job asks for, and whether its client had lost its memory.

    The guard checks its values.
    """
    header = read_header(content, _Update)
    if not isinstance(header.train_loss, float | None):
        raise UnreadableError("its training loss is not a number")
    declared = job.method.payload(setting, job.batches.num_examples)
    params = read_tensors(content, "params", sent_back(job, setting))
    buffers = read_tensors(content, "buffers", job.state.buffers)
    payload = read_tensors(content, "payload", like(declared))
    device = next(iter(params.values())).device
    update = ClientUpdate(
        client=job.client,
        num_examples=header.num_examples,
        params=params,
        buffers=buffers,
        train_loss=header.train_loss,
        epochs_done=header.epochs_done,
        steps=job.batches.steps,
        lr=job.lr,
        payload={name: tensor.to(device) for name, tensor in payload.items()},
    )
    return update, header.began_anew


def decode_test(content: RecordDict, layout: ServerState) -> tuple[TestJob, ServerState]:
    """A test, and the model to test in the layout of the client's own."""
    test = read_header(content, TestJob)
    _check_run(test.run or "none")
    params = read_tensors(content, "params", layout.params)
    buffers = read_tensors(content, "buffers", layout.buffers)
    return test, ServerState(test.round, params, buffers)


def encode_tally(tally: Tensor) -> RecordDict:
    """The sums from which the scores of all clients together are computed."""
    return RecordDict({"sums": write_tensors({"tally": tally.double()})})


def decode_tally(content: RecordDict) -> Tensor:
    """A client's sums, in float64; their values are for the task to check."""
    record = content.get("sums")
    if len(content) != 1 or not isinstance(record, ArrayRecord) or set(record) != {"tally"}:
        raise UnreadableError("the answer is not test sums 'tally' alone")
    return read_tensor(record["tally"], torch.float64, None, "tally")


def encode_refusal(reason: str) -> RecordDict:
    """Tells the other side why there is no answer."""
    return encode(_Refusal(one_line(reason)))


def decode_refusal(content: RecordDict) -> str | None:
    """The reason of a refusal; None if the message is an answer."""
    if "refusal" not in content:
        return None
    return one_line(read_header(content, _Refusal).reason)
