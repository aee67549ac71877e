"""Hostile and broken updates, each sent through the wire format: refused, and said why."""

from __future__ import annotations

import dataclasses
import io
import re

import numpy as np
import pytest
import torch

from flower_messages import SETTING, honest, job_for, received

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given, settings
from hypothesis import strategies as st

from fedproto import FedAvg, FedProto
from fedproto.config import read_config
from fedproto.engines.base import LocalJob
from fedproto.flower import wire
from fedproto.flower.wire import LONGEST_REASON, PROTOCOL, UnreadableError, write_tensors
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from fedproto.types import ClientUpdate
from flower_grid import through_the_wire
from helpers import make_state, same_tensors


def paying(**changes) -> ClientUpdate:
    """An update whose payload is changed; None takes a tensor out."""
    update = honest()
    names = {"sums": SUM, "count": COUNT, "margin": MARGIN}
    payload = {**update.payload, **{names.get(key, key): one for key, one in changes.items()}}
    kept = {name: tensor for name, tensor in payload.items() if tensor is not None}
    return dataclasses.replace(update, payload=kept)


def sent(content: RecordDict) -> RecordDict:
    """What the server reads from the bytes of a message."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    return through_the_wire(Message(content, 1, "train")).content


def verdict(update: ClientUpdate, job: LocalJob | None = None) -> ClientUpdate | str:
    return received(sent(wire.encode_update(update)), job)


def filled(tensor, value, place=0):
    changed = tensor.clone()
    changed.view(-1)[place] = value
    return changed


def test_an_honest_update_arrives_bit_by_bit():
    update = honest()
    arrived = verdict(update)
    assert isinstance(arrived, ClientUpdate)
    for name in update.params:
        assert torch.equal(arrived.params[name], update.params[name])
    for name in update.buffers:
        assert torch.equal(arrived.buffers[name], update.buffers[name])
    assert same_tensors(arrived.payload, update.payload)
    assert (arrived.num_examples, arrived.train_loss, arrived.epochs_done) == (10, 0.5, 1)


UPDATE = honest()
HOSTILE = {
    "nan weight": (honest(params=UPDATE.params | {"bias": filled(UPDATE.params["bias"], np.nan)}),
                   "'bias' is NaN, infinite"),
    "infinite weight": (
        honest(params=UPDATE.params | {"weight": filled(UPDATE.params["weight"], np.inf, 3)}),
        "'weight' is NaN, infinite",
    ),
    "weight that overflows sums": (
        honest(params=UPDATE.params | {"weight": filled(UPDATE.params["weight"], 3e38)}),
        "'weight' is NaN, infinite",
    ),
    "nan buffer": (
        honest(buffers=UPDATE.buffers | {"running_var": torch.full((3,), torch.nan)}),
        "'running_var' is not within",
    ),
    "nan loss": (honest(train_loss=float("nan")), "training loss is NaN"),
    "missing name": (honest(params={"weight": UPDATE.params["weight"]}), "'bias' is missing"),
    "unknown name": (honest(params=UPDATE.params | {"extra": torch.ones(1)}), "'extra' is unknown"),
    "wrong shape": (honest(params=UPDATE.params | {"weight": torch.ones(3, 2)}), "shape (3, 2)"),
    "wrong type": (
        honest(params=UPDATE.params | {"bias": UPDATE.params["bias"].float()}),
        "type 'float32'",
    ),
    "weights as whole numbers": (
        honest(params=UPDATE.params | {"weight": torch.ones(2, 3, dtype=torch.int64)}),
        "type 'int64'",
    ),
    "prototypes of another dimension": (paying(sums=torch.ones(2, 7)), "shape (2, 7)"),
    "prototypes of another number of classes": (paying(sums=torch.ones(3, 3)), "shape (3, 3)"),
    "nan prototype": (
        paying(sums=filled(UPDATE.payload[SUM], np.nan)),
        "'prototypes/sum' is not within",
    ),
    "prototype of an empty class": (
        paying(sums=filled(UPDATE.payload[SUM], 1.0, -1)),
        "'prototypes/sum' is not zero where 'prototypes/count' is",
    ),
    "no payload": (honest(payload={}), "no tensors 'payload'"),
    "no prototypes": (paying(sums=None), "payload 'prototypes/sum' is missing"),
    "no margins": (paying(margin=None), "payload 'margins/local' is missing"),
    "more than was asked for": (paying(extra=torch.ones(1)), "payload 'extra' is unknown"),
    "negative count": (paying(count=torch.tensor([10, -2])), "'prototypes/count' is not within"),
    "impossible counts": (paying(count=torch.tensor([11, 0])), "not within [0, 10]"),
    "counts too many together": (paying(count=torch.tensor([6, 6])), "sums up to more than 10"),
    "counts that overflow": (paying(count=torch.tensor([2**62, 2**62])), "not within [0, 10]"),
    "fractional counts": (paying(count=torch.tensor([5.0, 0.0])), "type 'float32'"),
    "margin above one": (paying(margin=torch.tensor([1.5, 0.0])), "within [-1, 1]"),
    "margin below minus one": (paying(margin=torch.tensor([-1.01, 0.0])), "within [-1, 1]"),
    "nan margin": (paying(margin=torch.tensor([torch.nan, 0.0])), "within [-1, 1]"),
    "margin of an empty class": (
        paying(margin=torch.tensor([0.5, 0.5])),
        "'margins/local' is not zero where 'prototypes/count' is",
    ),
    "too many margins": (paying(margin=torch.zeros(3)), "shape (3,)"),
    "more samples than it has": (honest(num_examples=10_000), "claims 10000 samples"),
    "negative samples": (honest(num_examples=-1), "'num_examples' is negative"),
    "more epochs than asked": (honest(epochs_done=50), "claims 50 epochs"),
}  # fmt: skip


@pytest.mark.parametrize(("update", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_update_is_refused_with_its_reason(update, reason):
    found = verdict(update)
    assert isinstance(found, str)
    assert reason in found


def test_distances_have_other_bounds_than_margins():
    job = job_for(FedProto(measure="same-class-distance"))
    assert isinstance(verdict(paying(margin=torch.tensor([1.5, 0.0])), job), ClientUpdate)
    assert "within [0, 1.73207]" in verdict(paying(margin=torch.tensor([1.8, 0.0])), job)
    assert "within" in verdict(paying(margin=torch.tensor([-0.1, 0.0])), job)


def test_a_payload_that_nobody_asked_for_is_refused():
    assert "'margins/local' is unknown" in verdict(honest(), job_for(FedAvg()))


def changed(content: RecordDict, **fields) -> RecordDict:
    record = ConfigRecord(dict(content["update"]) | fields)
    return RecordDict({**dict(content), "update": record})


def an_array(data: bytes, dtype="float64", shape=(2,)) -> RecordDict:
    content = wire.encode_update(honest())
    content["params"]["bias"] = Array(dtype, shape, "numpy.ndarray", data)
    return content


def npy(array, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("it was unpickled",)


GOOD = wire.encode_update(honest())
BROKEN = {
    "another protocol version": (changed(GOOD, protocol=PROTOCOL + 1), f"protocol {PROTOCOL + 1}"),
    "a version that is no number": (changed(GOOD, protocol="1"), "protocol '1'"),
    "a wrong type of field": (changed(GOOD, num_examples=10.0), "num_examples must be an integer"),
    "a field too many": (changed(GOOD, weight=1e9), "unknown option 'weight'"),
    "a part too many": (
        RecordDict({**dict(GOOD), "more": ConfigRecord({})}), "unexpected part 'more'"
    ),
    "no update at all": (RecordDict({"x": ConfigRecord({})}), "unexpected part 'x'"),
    "nothing": (RecordDict({}), "no part 'update'"),
    "no weights": (
        RecordDict({k: v for k, v in GOOD.items() if k != "params"}), "no tensors 'params'"
    ),
    "numbers in the place of tensors": (
        RecordDict({**dict(GOOD), "params": ConfigRecord({})}), "no tensors 'params'"
    ),
    "a pickled array": (
        an_array(npy(np.array([Bomb()], dtype=object), allow_pickle=True)), "does not match its"
    ),
    "a lie about the shape": (an_array(npy(np.zeros(4))), "does not match its description"),
    "a lie about the type": (an_array(npy(np.zeros(2, np.float32))), "does not match its"),
    "columns first": (
        an_array(npy(np.asfortranarray(np.zeros((3, 2)))), shape=(3, 2)), "shape (3, 2)"
    ),
    "a header that promises terabytes": (
        an_array(npy(np.zeros(2)).replace(b"(2,), }" + b" " * 14, b"(2000000000000,), }  ")),
        "does not match its description",
    ),
    "too few bytes": (an_array(npy(np.zeros(2))[:-1]), "15 bytes"),
    "too many bytes": (an_array(npy(np.zeros(2)) + b"x"), "17 bytes"),
    "no bytes": (an_array(b""), "is not an array"),
    "another format": (
        RecordDict({**dict(GOOD), "buffers": ArrayRecord({"running_var": Array(
            "float32", (3,), "pickle", b"..."), "num_batches_tracked": Array(
            np.array(0))})}), "'running_var' has type"
    ),
    "an archive": (an_array(b"PK\x03\x04" + bytes(100)), "is not an array"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_message_is_refused_with_its_reason(content, reason):
    found = received(sent(content))
    assert isinstance(found, str)
    assert reason in found


def test_a_strange_reason_becomes_one_printable_line():
    refusal = wire.decode_refusal(sent(wire.encode_refusal("a\nb\x1b[31m\0" + "c" * 999)))
    assert "\n" not in refusal
    assert refusal.isprintable()
    assert len(refusal) <= LONGEST_REASON


MOST = wire.MOST_EXAMPLES


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (wire.Hello(1, MOST + 1, 5, 3, (4,), "classification"), f"claims {MOST + 1} training"),
        (wire.Hello(1, 5, MOST + 1, 3, (4,), "classification"), f"5 training and {MOST + 1}"),
        (wire.Hello(1, 0, 5, 3, (4,), "classification"), "claims 0 training"),
        (wire.Hello(-1, 5, 5, 3, (4,), "classification"), "negative"),
        (wire.Hello(1, 5, 5, 3, (-4,), "classification"), "'input_shape' is negative"),
        (wire.Hello(1, 5, 5, 3, (4, 0), "classification"), "input shape"),
    ],
)
def test_claims_about_samples_are_bounded(hello, reason):
    with pytest.raises(UnreadableError, match=re.escape(reason)):
        wire.decode_hello(sent(wire.encode(hello)))


CONFIG = read_config(
    {
        "strategy": {"name": "fedproto"},
        "data": {"name": "synthetic"},
        "model": {"name": "mlp"},
        "train": {"batch_size": 5},
    }
)


def a_job(**fields) -> RecordDict:
    content = wire.encode_job(job_for(), CONFIG)
    content["job"] = ConfigRecord(dict(content["job"]) | fields)
    return content


def test_a_job_arrives_as_it_was_sent():
    content = sent(a_job())
    config = wire.decode_config(content)
    assert (config.strategy, config.data, config.model) == (
        CONFIG.strategy, CONFIG.data, CONFIG.model
    )  # fmt: skip
    asked, arrived = job_for(), wire.decode_job(content, config, make_state(seed=1), SETTING)
    assert arrived.batches == asked.batches
    assert (arrived.client, arrived.lr, arrived.seed) == (asked.client, asked.lr, asked.seed)
    assert same_tensors(arrived.state.params, asked.state.params)
    assert same_tensors(arrived.state.buffers, asked.state.buffers)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}"),
        ({"batches": [0, 1, 4, 10, 5, -1, 0]}, "'batches' is negative"),
        ({"batches": [0, 1, 4, 0, 5, 1, 0]}, "no samples"),
        ({"batches": [0, 1, 4, 10, 6, 1, 0]}, "batches of another size"),
        ({"batches": [0, 1, 4, 10]}, "how its batches are drawn"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"lr": "0.1"}, "lr must be a number"),
        ({"extra": 1}, "'extra'"),
        ({"run": "../../elsewhere"}, "not named by a digest"),
        ({"last_round": -2}, "'last_round' is negative"),
    ],
)
def test_a_client_refuses_a_broken_job(fields, reason):
    with pytest.raises(UnreadableError, match=re.escape(reason)):
        wire.decode_job(sent(a_job(**fields)), CONFIG, make_state(), SETTING)


def test_a_client_refuses_a_model_that_is_not_its_own():
    content = a_job()
    state = make_state()
    content["params"] = write_tensors({"weight": state.params["weight"]})
    with pytest.raises(UnreadableError, match="'bias' is missing"):
        wire.decode_job(sent(content), CONFIG, state, SETTING)


def scalars():
    return st.one_of(
        st.integers(-(2**63), 2**63 - 1),
        st.floats(),
        st.text(max_size=5),
        st.booleans(),
        st.binary(max_size=5),
    )


@st.composite
def mutated_updates(draw):
    """An honest message with one to three random changes."""
    content = wire.encode_update(honest())
    for _ in range(draw(st.integers(1, 3))):
        arrays = [(name, key) for name in content.array_records for key in content[name]]
        kind = draw(st.sampled_from(["field", "bytes", "describe", "drop", "rename", "cut"]))
        if kind == "field" and "update" in content:
            key = draw(st.sampled_from([*content["update"], "other"]))
            content["update"][key] = draw(scalars())
        elif kind == "drop":
            if names := list(content):
                del content[draw(st.sampled_from(names))]
        elif arrays:
            name, key = draw(st.sampled_from(arrays))
            array = content[name][key]
            data = bytearray(array.data)
            dtype, shape = array.dtype, array.shape
            if kind == "bytes" and data:
                for _ in range(draw(st.integers(1, 4))):
                    data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
            elif kind == "describe":
                dtype = draw(st.sampled_from(["float32", "float64", "int64", "object", "", "<f4"]))
                shape = tuple(draw(st.lists(st.integers(-3, 2**40), max_size=3)))
            elif kind == "cut":
                data = data[: draw(st.integers(0, len(data)))]
            target = draw(st.text(max_size=4)) if kind == "rename" else key
            del content[name][key]
            content[name][target] = Array(dtype, shape, array.stype, bytes(data))
    return content


@settings(max_examples=300)
@given(mutated_updates())
def test_no_mutation_crashes_the_server_or_slips_through(content):
    job = job_for()
    found = received(content, job)
    if isinstance(found, str):
        assert found
        assert found.isprintable()
        return
    # Whatever is accepted is as good as an honest update, however it came about.
    assert found.client == job.client
    assert found.num_examples == job.batches.num_examples
    assert 0 <= found.epochs_done <= job.batches.epochs
    for given_, wanted in ((found.params, job.state.params), (found.buffers, job.state.buffers)):
        assert given_.keys() == wanted.keys()
        for name, tensor in given_.items():
            assert tensor.shape == wanted[name].shape
            assert tensor.dtype == wanted[name].dtype
            assert not tensor.is_floating_point() or bool((tensor.abs() < 1e31).all())
    sums, count, margin = (found.payload[name] for name in (SUM, COUNT, MARGIN))
    assert sums.shape == (2, 3)
    assert bool(torch.isfinite(sums).all())
    assert bool((count >= 0).all())
    assert int(count.sum()) <= 10
    assert bool((margin.abs() <= 1).all())
    assert bool((margin[count == 0] == 0).all())
    weights = FedProto().weigh(job.state, [found, honest(client=5)]).client
    assert bool((weights >= 0).all())
    assert float(weights.sum()) == pytest.approx(1)


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader_of_arrays(data):
    assert isinstance(received(an_array(data)), str)


@given(st.binary(max_size=60))
def test_no_header_crashes_the_reader_of_arrays(text):
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    assert isinstance(received(an_array(header + bytes(24))), str)


@given(st.dictionaries(st.text(max_size=12), scalars(), max_size=8), st.sampled_from("jtq"))
def test_no_job_crashes_the_client(fields, kind):
    name = {"j": "job", "t": "test", "q": "question"}[kind]
    content = RecordDict({name: ConfigRecord({"protocol": PROTOCOL, "config": "{}", **fields})})
    for read in (
        wire.decode_config,
        lambda content: wire.decode_test(content, make_state()),
        wire.decode_tally,
        wire.decode_hello,
    ):
        with pytest.raises(UnreadableError):
            read(content)
