"""The classes that clients hold, as randomised answers: many rounds reveal no more than one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from fedproto.flower import nodes
from fedproto.flower.server_app import serve
from fedproto.rounds import load_federations
from fedproto.store.sweeps import extend
from fedproto.strategies.sections import CLASSES
from flower_grid import LocalGrid
from flower_runs import CLIENTS, over_flower

ROUNDS = 4


@pytest.mark.timeout(200)
def test_the_answers_of_many_rounds_reveal_no_more_than_one(tmp_path, monkeypatch):
    """Also after server and nodes were started again; and every client draws its own."""
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setenv("FEDPROTO_STATE", str(tmp_path / "state"))
    answers: dict[int, list[list[int]]] = {client: [] for client in range(CLIENTS)}

    def hear(client, reply):
        if "payload" in reply.content:
            answers[client].append(reply.content["payload"][CLASSES].numpy().tolist())
        return reply

    sections = {
        "strategy": {"name": "fedavg"},
        "head": {"rows": "holders", "flip": 0.3},
        "schedule": {"cohort": CLIENTS, "delta": 0.0, "rounds": ROUNDS},
        "flower": {"deadline": 20},
    }
    store = over_flower(tmp_path / "run", LocalGrid(range(CLIENTS), hear), **sections)
    extend(store.path, ROUNDS + 2)
    serve(LocalGrid(range(CLIENTS), hear), store.path)
    config = store.config
    federation = load_federations([config])[config.data]
    flips = set()
    for client, heard in answers.items():
        assert len(heard) == ROUNDS + 2
        assert all(answer == heard[0] for answer in heard)
        _, targets = federation.samples.batch(federation.clients[client].train)
        holds = np.isin(np.arange(federation.num_classes), targets.numpy())
        flips.add(tuple(np.array(heard[0], dtype=bool) ^ holds))
    assert len(flips) > 1
    assert any(map(any, flips))
