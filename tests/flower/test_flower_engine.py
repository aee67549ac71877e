"""Runs over a grid in this process: parity with the simulator, and what clients can do wrong."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedproto
from flower_runs import CLIENTS, everyone, over_flower, pooled, simulated, tables

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

import httpx
from flwr.app import Error, Message

from fedproto import STRATEGIES
from fedproto.config import read_config
from fedproto.data.digits import Digits
from fedproto.disk.integrity import sealed, unsealed
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.flower import nodes, wire
from fedproto.flower.server_app import serve
from fedproto.rng.schedule import BatchOrder
from fedproto.store import RunStore
from fedproto.store.sweeps import create_sweep, extend
from flower_grid import LocalGrid
from helpers import same_tensors


def facts(store: RunStore):
    return [(r.cohort, r.stragglers, r.attention, r.epochs, r.failures) for r in store.records()]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(nodes, "ASK_FOR", 0.2)


@pytest.mark.parametrize(
    "strategy", [name for name in STRATEGIES.names() if not STRATEGIES.get(name).pooled]
)
def test_the_same_bits_as_in_the_simulator(tmp_path, strategy):
    ours = over_flower(tmp_path / "flower", strategy={"name": strategy})
    theirs = simulated(tmp_path / "here", strategy={"name": strategy})
    assert facts(ours) == facts(theirs)
    assert [r.metrics for r in ours.records()] == [r.metrics for r in theirs.records()]
    one, other = ours.load_checkpoint(), theirs.load_checkpoint()
    assert same_tensors(one.params, other.params)
    assert same_tensors(one.memory, other.memory)


def test_server_memory_and_robust_rules_give_the_same_bits(tmp_path):
    more = {
        "strategy": {"name": "scaffold"},
        "server": {"optimizer": "adam", "lr": 0.1},
        "aggregate": {"rule": "median", "clip_norm": "median"},
    }
    ours, theirs = over_flower(tmp_path / "flower", **more), simulated(tmp_path / "here", **more)
    assert facts(ours) == facts(theirs)
    one, other = ours.load_checkpoint(), theirs.load_checkpoint()
    assert same_tensors(one.params, other.params)
    assert same_tensors(one.memory, other.memory)


SCAFFOLD = {"strategy": {"name": "scaffold"}, "schedule": {"cohort": CLIENTS, "delta": 0.0}}


def test_a_client_whose_update_is_refused_remembers_nothing_of_it(tmp_path):
    """It trains on from what it kept before, as the simulator's does."""

    def no_answer_in_the_second_round(client, reply):
        content = reply.content
        second = "update" in content and reply.metadata.group_id == "1"
        return None if client == 2 and second else reply

    grid = LocalGrid(range(CLIENTS), no_answer_in_the_second_round)
    ours = over_flower(tmp_path / "flower", grid, **SCAFFOLD)
    assert [list(record.failures) for record in ours.records()] == [[], [2], []]
    last = [message for message in grid.sent if "job" in message.content][-CLIENTS:]
    jobs = [m.content["job"] for m in last]
    rounds = {BatchOrder(*job["batches"]).client: job["last_round"] for job in jobs}
    assert rounds == {0: 1, 1: 1, 2: 0, 3: 1, 4: 1}


def test_a_client_that_lost_its_memory_begins_anew_and_that_is_on_record(tmp_path, monkeypatch):
    def forget_after_the_first_round(client, reply):
        if "update" in reply.content and (client, reply.metadata.group_id) == (1, "0"):
            monkeypatch.setenv("FEDPROTO_STATE", str(tmp_path / "elsewhere"))
        return reply

    grid = LocalGrid(range(CLIENTS), forget_after_the_first_round)
    ours = over_flower(tmp_path / "flower", grid, **SCAFFOLD)
    first, second, third = (record.note for record in ours.records())
    assert first is None
    assert "client 0 had lost its memory and started from empty memory" in second
    assert third is None


def test_a_server_that_goes_back_finds_its_clients_as_they_were(tmp_path):
    more = {**SCAFFOLD, "store": {"keep": 0}}
    grid = LocalGrid(range(CLIENTS))
    store = over_flower(tmp_path / "flower", grid, **more)
    before = store.load_checkpoint()
    for path in sorted((store.path / "checkpoints").iterdir())[1:]:
        path.unlink()
    serve(grid, store.path)
    assert facts(store) == facts(simulated(tmp_path / "here", **more))
    assert same_tensors(store.load_checkpoint().params, before.params)


def test_clients_test_where_the_server_has_no_data(tmp_path):
    ours = over_flower(tmp_path / "flower", flower={"evaluate_on": "clients"})
    theirs = simulated(tmp_path / "here")
    assert same_tensors(ours.load_checkpoint().params, theirs.load_checkpoint().params)
    for one, other in zip(ours.records(), theirs.records(), strict=True):
        # Both score single clients, each at rounds of its own.
        shared = one.metrics.keys() & other.metrics.keys()
        assert shared >= pooled(other.metrics).keys()
        assert {name: one.metrics[name] for name in shared} == pytest.approx(
            {name: other.metrics[name] for name in shared}, rel=1e-6
        )
    enrolled, _ = json.loads((ours.path / "clients.json").read_text()).values()
    assert [one["client"] for one in enrolled] == list(range(CLIENTS))


def test_a_server_without_data_exports_its_model_and_predicts(tmp_path, monkeypatch):
    data = {"name": "digits", "clients": CLIENTS}
    store = over_flower(
        tmp_path / "run", data=data, flower={"evaluate_on": "clients"}, schedule={"rounds": 1}
    )

    def absent(*_):
        raise AssertionError("the data is with the clients")

    pictures = Digits(clients=CLIENTS).load(tmp_path).samples.batch(np.arange(2))[0]
    monkeypatch.setattr(Digits, "load", absent)
    result = fedproto.load(store.path)
    weights = load_file(result.export(tmp_path / "model") / "model.safetensors")
    assert same_tensors(weights, dict(result.model.named_parameters()))
    assert len(fedproto.predict(result, pictures)) == 2
    assert "subtracted" not in (tmp_path / "model" / "README.md").read_text()


def test_measures_are_taken_only_where_the_server_has_the_data(tmp_path):
    measured = {"measure": {"every": 2}}
    with pytest.raises(ConfigError, match="stays with the clients over Flower"):
        over_flower(tmp_path / "clients", flower={"evaluate_on": "clients"}, **measured)
    ours = over_flower(tmp_path / "flower", **measured)
    theirs = simulated(tmp_path / "here", **measured)
    assert [r.metrics for r in ours.records()] == [r.metrics for r in theirs.records()]
    assert "dissimilarity" in ours.records()[-1].metrics


def test_fine_tuning_without_the_data_is_refused_before_the_first_round(tmp_path):
    """It comes after the last round, which would be lost, and all rounds before it in vain."""
    grid = LocalGrid(range(CLIENTS))
    with pytest.raises(ConfigError, match="fine-tuning needs the clients' data"):
        over_flower(
            tmp_path / "flower",
            grid,
            evaluate={"finetune_epochs": 1},
            flower={"evaluate_on": "clients"},
        )
    assert not any("job" in message.content for message in grid.sent)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    class Stops(LocalGrid):
        def push_messages(self, messages):
            if sum(m.metadata.message_type == "train" for m in self.sent) >= 4:
                raise KeyboardInterrupt
            return super().push_messages(messages)

    store = RunStore.create(tmp_path / "flower", read_config(tables()))
    with pytest.raises(KeyboardInterrupt):
        serve(Stops(range(CLIENTS)), store.path)
    assert 0 < len(store.records()) < 3
    serve(LocalGrid(range(CLIENTS)), store.path)
    whole = simulated(tmp_path / "here")
    assert facts(store) == facts(whole)
    assert same_tensors(store.load_checkpoint().params, whole.load_checkpoint().params)


def train_replies(change):
    """Tampers with client 2's updates only."""

    def tamper(client, reply):
        if client == 2 and reply.metadata.message_type == "train":
            return change(reply)
        return reply

    return tamper


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda reply: Message(Error(2, "boom\nat line 7"), reply_to=_asked(reply)),
            "boom at line",
        ),
        (lambda _: None, "no answer within 0.2 s"),
        (lambda reply: _with(reply, wire.encode_refusal("no\x00 data")), "no data"),
    ],
    ids=["raises", "silent", "refuses"],
)
def test_a_failing_client_is_on_record_and_the_round_goes_on(tmp_path, change, reason):
    grid = LocalGrid(range(CLIENTS), train_replies(change))
    store = over_flower(tmp_path / "flower", grid, **everyone())
    for record in store.records():
        assert list(record.failures) == [2]
        assert reason in record.failures[2]
        assert list(record.attention) == [0, 1, 3, 4]


def _asked(reply):
    """A message to reply to, with the metadata of the one that was replied to."""
    asked = Message(reply.content, reply.metadata.src_node_id, reply.metadata.message_type)
    asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return asked


def _with(reply, content):
    reply.content = content
    return reply


def test_an_absent_client_is_on_record_and_may_come_back(tmp_path):
    class Returns(LocalGrid):
        def get_nodes(self):
            trained = sum(m.metadata.message_type == "train" for m in self.sent)
            if trained >= 4:
                self.clients[1002] = 2
            return super().get_nodes()

    grid = Returns([0, 1, 3, 4])
    store = over_flower(tmp_path / "flower", grid, **everyone())
    first, second = store.records()
    assert first.failures == {2: "not connected"}
    assert second.failures == {}
    assert list(second.attention) == [0, 1, 2, 3, 4]


def test_too_few_clients_skip_the_round(tmp_path):
    flower = {"min_clients": 3}
    store = over_flower(tmp_path / "flower", LocalGrid([0, 1]), **everyone(flower=flower))
    for record in store.records():
        assert "round skipped: 2 of 5 clients connected" in record.failures[0]
        assert record.attention == {}
        assert "did not move" in record.note


def test_too_few_answers_count_as_too_few_clients(tmp_path):
    grid = LocalGrid(range(CLIENTS), train_replies(lambda _: None))
    store = over_flower(tmp_path / "flower", grid, **everyone(flower={"min_clients": 5}))
    for record in store.records():
        assert "4 clients gave a usable update" in record.failures[0]
        assert record.failures[2].startswith("no answer")


def test_all_clients_must_enrol_before_the_first_round(tmp_path):
    with pytest.raises(DataError, match="clients 3, 4 did not connect"):
        over_flower(tmp_path / "f", LocalGrid([0, 1, 2]), flower={"evaluate_on": "clients"})


def test_a_missing_test_is_on_record(tmp_path):
    def tamper(client, reply):
        return None if client == 1 and reply.metadata.message_type == "evaluate" else reply

    grid = LocalGrid(range(CLIENTS), tamper)
    flower = {"evaluate_on": "clients", "suspend_after": 0}
    store = over_flower(tmp_path / "flower", grid, flower=flower)
    assert all("not tested on client 1: no answer" in r.note for r in store.records())
    assert all("accuracy" in r.metrics for r in store.records())


def test_a_claimed_tally_is_checked(tmp_path):
    def tamper(client, reply):
        if client == 1 and reply.metadata.message_type == "evaluate":
            return _with(reply, wire.encode_tally(torch.tensor([9e9, 9e9, 0.0])))
        return reply

    grid = LocalGrid(range(CLIENTS), tamper)
    flower = {"evaluate_on": "clients", "suspend_after": 0}
    store = over_flower(tmp_path / "flower", grid, flower=flower)
    assert all("not tested on client 1: it claims" in r.note for r in store.records())


def test_a_second_node_of_the_same_client_is_turned_away(tmp_path):
    grid = LocalGrid(range(CLIENTS))
    grid.clients[5000] = 2
    store = over_flower(tmp_path / "flower", grid, **everyone())
    assert "client 2 is connected already" in store.records()[0].note
    assert list(store.records()[0].attention) == [0, 1, 2, 3, 4]


def test_pooled_data_cannot_be_trained_on_over_flower(tmp_path):
    with pytest.raises(ConfigError, match="stays with the clients"):
        over_flower(tmp_path / "flower", strategy={"name": "centralized"})


def test_a_duplicate_of_an_update_is_refused(tmp_path):
    class Twice(LocalGrid):
        def _answer(self, message):
            replies = super()._answer(message)
            again = message.metadata.dst_node_id == 1002
            return replies * 2 if again and message.metadata.message_type == "train" else replies

    store = over_flower(tmp_path / "flower", Twice(range(CLIENTS)), **everyone())
    for record in store.records():
        assert record.failures == {2: "it sent a duplicate of its answer"}


def test_an_answer_that_flower_itself_cannot_read_spoils_no_other(tmp_path):
    class Torn(LocalGrid):
        def pull_messages(self, message_ids):
            replies = super().pull_messages(message_ids)
            for reply in replies:
                if (reply.metadata.src_node_id, reply.metadata.message_type) == (1002, "train"):
                    raise ValueError("Unexpected set of `children`.")
            return replies

    store = over_flower(tmp_path / "flower", Torn(range(CLIENTS)), **everyone())
    for record in store.records():
        assert list(record.failures) == [2]
        assert "cannot be read" in record.failures[2]


def test_an_answer_in_anothers_place_is_refused(tmp_path):
    def tamper(client, reply):
        if client == 2 and reply.metadata.message_type == "train":
            reply.metadata.__dict__["_src_node_id"] = 1003
        return reply

    store = over_flower(tmp_path / "flower", LocalGrid(range(CLIENTS), tamper), **everyone())
    assert store.records()[0].failures == {2: "another node answered in its place"}


def test_clients_keep_their_memory_when_a_run_is_given_more_rounds(tmp_path):
    short = {**SCAFFOLD, "schedule": {**SCAFFOLD["schedule"], "rounds": 2}}
    ours = over_flower(tmp_path / "flower", **short)
    extend(ours.path, 4)
    serve(LocalGrid(range(CLIENTS)), ours.path)
    long = {**SCAFFOLD, "schedule": {**SCAFFOLD["schedule"], "rounds": 4}}
    theirs = simulated(tmp_path / "here", **long)
    found = RunStore.open(ours.path)
    assert facts(found) == facts(theirs)
    assert [record.note for record in found.records()] == [None] * 4
    assert same_tensors(found.load_checkpoint().memory, theirs.load_checkpoint().memory)


def test_clients_of_two_data_sets_enrol_for_each(tmp_path):
    """Their sizes differ from one data set to the other, and neither is taken for the other."""
    flower = {"evaluate_on": "clients"}
    configs = {
        str(seed): read_config(tables(data={"seed": seed}, flower=flower)) for seed in (5, 6)
    }
    stores = create_sweep(tmp_path / "sweep", configs)
    serve(LocalGrid(range(CLIENTS)), tmp_path / "sweep")
    for seed, store in zip((5, 6), stores, strict=True):
        assert facts(store) == facts(simulated(tmp_path / str(seed), data={"seed": seed}))


def test_who_enrolled_is_never_read_from_an_edited_file(tmp_path):
    store = over_flower(tmp_path / "flower", flower={"evaluate_on": "clients"})
    path = store.path / "clients.json"
    text = path.read_text()
    extend(store.path, 4)
    path.write_text(text.replace('"num_test": ', '"num_test": 1'))
    with pytest.raises(StoreError, match=r"clients.json is damaged.*changed after"):
        serve(LocalGrid(range(CLIENTS)), store.path)
    path.write_text(text)
    serve(LocalGrid(range(CLIENTS)), store.path)
    assert len(store.records()) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"num_train": -3},
        {"num_test": 10**12},
        {"input_shape": [1, -8]},
        {"num_classes": 0},
        {"client": 2},
        {"client": "x"},
        {"more": 1},
    ],
)
def test_who_enrolled_in_a_strangers_run_is_checked_like_a_message(tmp_path, change):
    """The fingerprint is right: whoever writes a file can compute it."""
    store = over_flower(tmp_path / "flower", flower={"evaluate_on": "clients"})
    path = store.path / "clients.json"
    enrolled = unsealed(path.read_bytes())
    (clients,) = (each for each in enrolled.values() if isinstance(each, list))
    clients[1] |= change
    path.write_bytes(sealed(enrolled))
    extend(store.path, 4)
    with pytest.raises(StoreError, match=r"clients.json cannot be used"):
        serve(LocalGrid(range(CLIENTS)), store.path)


def test_a_busy_server_of_flowers_ends_no_run(tmp_path, monkeypatch):
    """HTTP 500 ("database is locked") now and then, at every kind of call."""
    monkeypatch.setattr(nodes, "PAUSES", (0.0, 0.0))
    calls = itertools.count()

    def locked():
        if next(calls) % 3 == 0:
            request = httpx.Request("POST", "http://127.0.0.1")
            answer = httpx.Response(500, request=request)
            raise httpx.HTTPStatusError("database is locked", request=request, response=answer)

    class Busy(LocalGrid):
        def get_nodes(self):
            locked()
            return super().get_nodes()

        def push_messages(self, messages):
            locked()
            return super().push_messages(messages)

        def pull_messages(self, message_ids):
            locked()
            return super().pull_messages(message_ids)

    ours = over_flower(tmp_path / "flower", Busy(range(CLIENTS)))
    assert facts(ours) == facts(simulated(tmp_path / "here"))


def test_a_server_that_stays_away_ends_the_run_with_a_word(tmp_path, monkeypatch):
    monkeypatch.setattr(nodes, "PAUSES", (0.0, 0.0))

    class Gone(LocalGrid):
        def get_nodes(self):
            raise httpx.ConnectError("connection refused")

    with pytest.raises(nodes.ServerGoneError, match=r"does not answer .*refused"):
        over_flower(tmp_path / "flower", Gone(range(CLIENTS)))
