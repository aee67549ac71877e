"""What clients claim of their size counts up to a multiple of the federation's median."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from flwr.app import ConfigRecord, Message

from fedproto.config import read_config
from fedproto.flower import nodes, wire
from fedproto.flower.client_app import spread
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds import load_federations
from flower_grid import LocalGrid
from flower_runs import CLIENTS, over_flower, tables

LIAR = 2
CLAIMED = 9_999_999
ALL = {"cohort": CLIENTS, "delta": 0.0, "rounds": 3}
ON_CLIENTS = {"evaluate_on": "clients", "deadline": 20}
BOUNDED = {"aggregate": {"max_claim": 2.0}}
"""Claims of 50 times the median count in the draw, of ten times in the test, as by default."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "LOOK_EVERY", 0.01)


def sizes(part: str) -> list[int]:
    config = read_config(tables())
    clients = load_federations([config])[config.data].clients
    return [len(getattr(client, part)) for client in clients]


def boasting(*names: str):
    """A client that claims ten million samples."""

    def tamper(client, reply):
        content = reply.content
        if client == LIAR and "hello" in content:
            claims = dict.fromkeys(names, CLAIMED)
            content["hello"] = ConfigRecord(dict(content["hello"]) | claims)
        return reply

    return tamper


class Boasting(LocalGrid):
    """The liar scores perfectly in each test, on as many samples as it is asked for."""

    def __init__(self) -> None:
        super().__init__(range(CLIENTS), boasting("num_test"))
        self.asked: list[int] = []

    def _answer(self, message: Message) -> list[Message]:
        content = message.content
        if "test" not in content or content["test"]["client"] != LIAR:
            return super()._answer(message)
        held = content["test"]["num_examples"]
        self.asked.append(held)
        perfect = torch.tensor([held, held, 0.0], dtype=torch.float64)
        reply = wire.encode_tally(perfect)
        return [Message(reply, reply_to=message)]


def test_a_client_that_claims_an_enormous_test_set_does_not_decide_the_score(tmp_path):
    """Believed, it ends the run in the first round; capped, it does not."""
    shared = {"schedule": ALL, "stop": {"target": 0.95}}
    grid, believed = Boasting(), Boasting()
    store = over_flower(tmp_path / "capped", grid, flower=ON_CLIENTS, **BOUNDED, **shared)
    (only,) = over_flower(tmp_path / "all", believed, flower=ON_CLIENTS, **shared).records()
    assert only.metrics["accuracy"] > 0.999
    claimed = sizes("test")
    claimed[LIAR] = CLAIMED
    assert set(grid.asked) == {10 * sorted(claimed)[CLIENTS // 2]}
    records = store.records()
    assert len(records) == ALL["rounds"]
    assert all(record.metrics["accuracy"] < 0.95 for record in records)
    assert "client 2 claims 9,999,999 test samples" in records[0].note
    # One client of five, whatever it claims, is a fifth of the mean over clients.
    assert only.metrics["mean_client_accuracy"] < 0.6


def test_nothing_is_believed_of_sizes_beyond_the_median(tmp_path):
    grid = LocalGrid(range(CLIENTS), boasting("num_train", "num_test"))
    store = over_flower(tmp_path / "flower", grid, schedule=ALL, flower=ON_CLIENTS, **BOUNDED)
    orders = [
        BatchOrder(*message.content["job"]["batches"])
        for message in grid.sent
        if "job" in message.content
    ]
    asked = {order.client: order.num_examples for order in orders}
    claimed = sizes("train")
    honest = dict(enumerate(claimed))
    claimed[LIAR] = CLAIMED
    assert asked == honest | {LIAR: 50 * sorted(claimed)[CLIENTS // 2]}
    # The claim is kept as it was made.
    (enrolled,) = (
        each
        for each in json.loads((store.path / "clients.json").read_text()).values()
        if isinstance(each, list)
    )
    assert enrolled[LIAR]["num_train"] == CLAIMED


def test_an_honest_client_beyond_the_cap_uses_that_many_samples_and_takes_part(
    tmp_path, monkeypatch
):
    """With a cap of one median nearly half of the clients are beyond it."""
    monkeypatch.setattr(nodes, "DRAWN", 0.5)
    monkeypatch.setattr(nodes, "TESTED", 0.5)
    store = over_flower(tmp_path / "flower", schedule=ALL, flower=ON_CLIENTS, **BOUNDED)
    records = store.records()
    assert all(record.failures == {} for record in records)
    assert all(len(record.attention) == CLIENTS for record in records)
    median = sorted(sizes("train"))[CLIENTS // 2]
    beyond = [client for client, size in enumerate(sizes("train")) if size > median]
    for client in beyond:
        assert f"client {client} claims" in records[0].note
    assert f"uses {median:,}" in records[0].note


@pytest.mark.parametrize(
    ("sampling", "cohort", "said"), [("size", 3, True), ("size", 5, False), ("uniform", 3, False)]
)
def test_small_cohorts_drawn_by_size_are_advised_against(tmp_path, sampling, cohort, said):
    schedule = {"sampling": sampling, "cohort": cohort, "rounds": 1}
    store = over_flower(tmp_path / "run", schedule=schedule, flower=ON_CLIENTS, **BOUNDED)
    note = store.records()[0].note or ""
    assert ("cohorts of 3 drawn by size" in note) is said


def test_samples_are_spread_over_a_sorted_share():
    share = np.arange(100, 200)
    assert spread(share, 4).tolist() == [100, 125, 150, 175]
    assert spread(share, 100).tolist() == share.tolist()
