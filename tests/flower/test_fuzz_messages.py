"""Damaged messages: refused with a reason or used as they are, never a traceback."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedproto import FedProto, Scaffold
from fedproto.config import read_config
from fedproto.engines.setting import read_state
from fedproto.flower import wire
from fedproto.flower.own_app import FedProtoStrategy
from fedproto.flower.wire import UnreadableError
from fedproto.strategies.values import initial_tensors
from fedproto.types import ClientUpdate
from flower_grid import LocalGrid, through_the_wire
from flower_messages import SETTING, honest, job_for, received
from fuzzing import ODD, damaged, damages, fuzzed

CONFIG = read_config(
    {
        "strategy": {"name": "fedproto"},
        "data": {"name": "synthetic"},
        "model": {"name": "mlp"},
    }
)
HELLO = wire.Hello(3, 10, 2, 4, (1, 8, 8), "classification", 1, ("a", "b", "c", "d"))


@st.composite
def changes(draw):
    """What to do to a message: an odd value for a field, or damaged bytes in an array."""
    part = st.integers(0, 9)
    field = st.tuples(st.just("field"), part, part, ODD)
    array = st.tuples(st.just("array"), part, part, damages())
    about = st.tuples(st.just("about"), part, part, st.sampled_from(["dtype", "shape", "stype"]))
    gone = st.tuples(st.just("gone"), part, part, st.none())
    return draw(st.lists(field | array | about | gone, min_size=1, max_size=3))


def changed(content: RecordDict, what) -> RecordDict:
    for kind, part, place, value in what:
        names = sorted(content)
        name = names[part % len(names)] if names else None
        record = content.get(name) if name else None
        if record is None or not len(record):
            continue
        key = sorted(record)[place % len(record)]
        if kind == "gone":
            del record[key]
        elif kind == "field" and isinstance(record, (ConfigRecord, MetricRecord)):
            try:
                record[key] = value
            except (
                TypeError,
                ValueError,
                OverflowError,
            ):  # Flower itself does not send such a value
                continue
        elif kind in ("array", "about") and isinstance(record, ArrayRecord):
            old = record[key]
            parts = {"dtype": old.dtype, "shape": old.shape, "stype": old.stype, "data": old.data}
            if kind == "array":
                parts["data"] = damaged(old.data, value)
            else:
                parts[value] = {"dtype": "float16", "shape": (7, 7), "stype": "pickle"}[value]
            record[key] = Array(**parts)
    return content


@fuzzed
@given(what=changes())
def test_damaged_updates(what):
    found = received(changed(wire.encode_update(honest()), what))
    if isinstance(found, ClientUpdate):
        for tensor in (*found.params.values(), *found.buffers.values(), *found.payload.values()):
            assert torch.isfinite(tensor.double()).all()
    else:
        assert found


@fuzzed
@given(what=changes())
def test_damaged_jobs(what):
    job = job_for()
    content = changed(wire.encode_job(job, CONFIG), what)
    with contextlib.suppress(UnreadableError):
        wire.decode_job(content, wire.decode_config(content), job.state, SETTING)


@fuzzed
@given(what=changes())
def test_damaged_greetings(what):
    with contextlib.suppress(UnreadableError):
        found = wire.decode_hello(changed(wire.encode(HELLO), what))
        assert 1 <= found.num_train <= wire.MOST_EXAMPLES
        assert len(found.class_names) in (0, found.num_classes)


@fuzzed
@given(what=changes())
def test_damaged_tallies(what):
    content = changed(wire.encode_tally(torch.tensor([5.0, 4.0, 1.0])), what)
    with contextlib.suppress(UnreadableError):
        wire.decode_tally(content)


@pytest.fixture(scope="module", params=[FedProto(), Scaffold()], ids=["fedproto", "scaffold"])
def asked(request):
    """A strategy in an app of one's own, what it asked of three nodes, and a node's answer."""
    body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    model = torch.nn.Sequential(body, torch.nn.Linear(8, 3))
    params, buffers = read_state(model)
    strategy = FedProtoStrategy(model, torch.zeros(1, 4), 3, request.param, min_train_nodes=1)
    arrays = wire.write_tensors({**params, **buffers})
    questions = strategy.configure_train(1, arrays, ConfigRecord(), LocalGrid(range(3)))
    payload = initial_tensors(strategy.method.payload(strategy._setting, 60))
    answer = {
        "arrays": arrays,
        "payload": wire.write_tensors(payload),
        "metrics": MetricRecord({"num-examples": 60, "train_loss": 0.5, "accuracy": 0.5}),
        "work": MetricRecord({"steps": 3, "lr": 0.1}),
    }
    return strategy, list(questions), answer


@fuzzed
@given(first=changes(), second=changes())
def test_damaged_replies_to_an_app_of_ones_own(asked, first, second):
    strategy, questions, answer = asked
    copies = [RecordDict({name: one.copy() for name, one in answer.items()}) for _ in questions]
    contents = [changed(copies[0], first), changed(copies[1], second), copies[2]]
    replies = []
    for content, question in zip(contents, questions, strict=True):
        with contextlib.suppress(ValueError):  # Flower itself does not send a number so large
            replies.append(through_the_wire(Message(content, reply_to=question)))
    before = strategy._state
    arrays, _ = strategy.aggregate_train(1, replies)
    strategy._state = before
    assert arrays is not None
    assert all(torch.isfinite(one.double()).all() for one in arrays.to_torch_state_dict().values())
    scores = strategy.aggregate_evaluate(1, replies)
    assert all(np.isfinite(value) for value in scores.values())
