"""Clients that give nothing usable again and again are left out for a while, and let back in."""

from __future__ import annotations

import pytest

from flower_runs import CLIENTS, over_flower, tables

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from fedproto.config import read_config
from fedproto.flower import nodes
from fedproto.flower.server_app import serve
from fedproto.flower.wire import write_tensors
from fedproto.store.sweeps import create_sweep
from flower_grid import LocalGrid


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "ASK_FOR", 0.2)


def test_a_mute_client_costs_few_deadlines_is_suspended_and_let_back_in(tmp_path):
    """Client 2 never answers in the first four rounds; asked twice, then left alone for three."""
    asked = []

    def tamper(client, reply):
        if client != 2 or reply.metadata.message_type == "query.hello":
            return reply
        round_ = int(reply.metadata.group_id)
        asked.append((reply.metadata.message_type, round_))
        return None if round_ < 4 else reply

    schedule = {"cohort": CLIENTS, "delta": 0.0, "rounds": 8}
    flower = {"evaluate_on": "clients", "suspend_after": 2, "suspend_rounds": 3}
    grid = LocalGrid(range(CLIENTS), tamper)
    store = over_flower(tmp_path / "flower", grid, schedule=schedule, flower=flower)
    records = store.records()
    assert [kind for kind, round_ in asked if round_ < 4] == ["train", "train"]
    assert [2 in record.attention for record in records] == [False] * 5 + [True] * 3
    assert records[3].failures[2] == (
        "suspended until round 6: 2 of its last 2 answers (train) were not usable, the last: no"
        " answer within 0.2 s"
    )
    assert "client 2 is suspended until round 6" in records[1].note
    assert "accuracy" in records[-1].metrics


def times(factor):
    """Client 2 sends its weights so many times as large, and answers in every other respect."""
    asked = []

    def tamper(client, reply):
        if client == 2 and reply.metadata.message_type == "train":
            asked.append(int(reply.metadata.group_id))
            trained = reply.content["params"].to_torch_state_dict()
            larger = {name: factor * one for name, one in trained.items()}
            reply.content["params"] = write_tensors(larger)
        return reply

    return asked, tamper


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(float("nan"), "is NaN, infinite"), (100.0, "times as long as the cohort's median")],
)
def test_a_client_that_is_always_refused_is_suspended(tmp_path, factor, reason):
    """By itself or beside the others: its answer arrives in time and is of no use."""
    asked, tamper = times(factor)
    store = over_flower(
        tmp_path / "flower",
        LocalGrid(range(CLIENTS), tamper),
        schedule={"cohort": CLIENTS, "delta": 0.0, "rounds": 7},
        aggregate={"drop_beyond": 3.0},
        flower={"suspend_after": 2, "suspend_rounds": 3},
    )
    records = store.records()
    assert asked == [0, 1, 5]
    assert all(reason in records[round_].failures[2] for round_ in (0, 1, 5))
    assert all(
        records[round_].failures[2].startswith("suspended until round 6: 2 of its last 2 answers")
        for round_ in (2, 3, 4)
    )
    assert "client 2 is suspended until round 10: 3 of its last 3" in records[5].note


def test_a_run_whose_every_update_is_refused_suspends_nobody_from_another(tmp_path):
    """A rate too high is no client's fault, and one usable update a round is an answer."""
    schedule = {"cohort": CLIENTS, "delta": 0.0, "rounds": 4}
    configs = {
        str(lr): read_config(tables(schedule=schedule, train={"lr": lr})) for lr in (1e30, 0.05)
    }
    diverging, sound = create_sweep(tmp_path / "sweep", configs)
    serve(LocalGrid(range(CLIENTS)), tmp_path / "sweep")
    assert all(len(record.failures) == CLIENTS for record in diverging.records())
    assert all(record.failures == {} for record in sound.records())
    assert not any("suspended" in (record.note or "") for record in sound.records())


def test_rounds_with_too_few_clients_are_nobodys_failure_who_answered(tmp_path):
    def mute(client, reply):
        return reply if client == 2 or reply.metadata.message_type != "train" else None

    store = over_flower(
        tmp_path / "flower",
        LocalGrid(range(CLIENTS), mute),
        schedule={"cohort": CLIENTS, "delta": 0.0, "rounds": 4},
        flower={"min_clients": 2, "suspend_after": 2},
    )
    told = [record.failures[2] for record in store.records()]
    assert all(text.startswith("round skipped") for text in told)
    assert "suspended until" in store.records()[-1].failures[0]


def asked_and_mute(silent):
    """Client 2 leaves some questions without an answer; the rounds in which it left any."""
    rounds = []

    def tamper(client, reply):
        kind = reply.metadata.message_type
        if client != 2 or kind == "query.hello":
            return reply
        round_ = int(reply.metadata.group_id)
        if not silent(kind, round_):
            return reply
        rounds.append(round_)
        return None

    return rounds, tamper


@pytest.mark.parametrize(
    ("silent", "paid"),
    [
        # It trains in every round and never tests: two deadlines, then five rounds of peace.
        (lambda kind, _: kind == "evaluate", [1, 2, 8]),
        # Never two in a row; after the suspension the first is enough.
        (lambda kind, round_: kind == "train" and round_ % 2 == 0, [0, 2, 8]),
        (lambda kind, round_: kind == "train" and round_ % 3 == 0, [0, 3, 9]),
    ],
    ids=["mute in tests", "in every other round", "in every third"],
)
def test_a_client_that_answers_in_between_costs_no_more_deadlines_than_a_mute_one(
    tmp_path, silent, paid
):
    rounds, tamper = asked_and_mute(silent)
    schedule = {"cohort": CLIENTS, "delta": 0.0, "rounds": 10}
    store = over_flower(
        tmp_path / "flower",
        LocalGrid(range(CLIENTS), tamper),
        schedule=schedule,
        flower={"evaluate_on": "clients"},
    )
    assert rounds == paid
    assert sum("client 2 is suspended" in (record.note or "") for record in store.records()) == 2


def test_one_failure_now_and_then_is_forgiven(tmp_path):
    rounds, tamper = asked_and_mute(lambda kind, round_: kind == "train" and round_ % 5 == 0)
    schedule = {"cohort": CLIENTS, "delta": 0.0, "rounds": 7}
    store = over_flower(tmp_path / "flower", LocalGrid(range(CLIENTS), tamper), schedule=schedule)
    assert rounds == [0, 5]
    assert not any("suspended" in (record.note or "") for record in store.records())
