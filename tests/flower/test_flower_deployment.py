"""A real server and real nodes on loopback with TLS: parity, kills, resumption, strangers."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from documents import ROOT

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from fedproto.callback import Callback
from fedproto.config import read_config
from fedproto.flower.deploy import Deployment, deployment
from fedproto.flower.keys import make_keys
from fedproto.options import load_plugin
from fedproto.store import RunStore
from fedproto.store.sweeps import create_sweep
from helpers import same_tensors, simulate, wait_until

PLUGIN = ROOT / "tests/support/flower_plugin.py"
RECIPE = """
seed = 3
data = { name = "synthetic", clients = 3, seed = 5 }
model = { name = "watched", hidden = 6, features = 5 }
strategy = { name = "fedproto" }
train = { epochs = 2, batch_size = 20, lr = 0.05 }
schedule = { rounds = 3, cohort = 3 }
engine = { name = "reference", device = "cpu" }
flower = { evaluate_on = "server", deadline = 120, wait = 90 }
"""


@pytest.fixture(autouse=True, scope="module")
def flags(tmp_path_factory):
    """Where flags for the misbehaving model go."""
    load_plugin(str(PLUGIN))
    folder = tmp_path_factory.mktemp("flags")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPROTO_PLUGINS", str(PLUGIN))
        patch.setenv("FEDPROTO_TEST_FOLDER", str(folder))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    """A server and two nodes for the runs of several tests, and a node that it does not know."""
    folder = tmp_path_factory.mktemp("deployed")
    with deployment(folder / "flower", make_keys(folder / "keys", ["localhost"], 5), 2) as started:
        started.start_node(3)
        yield started


def a_run(path: Path, *overrides: str) -> RunStore:
    from fedproto.config.recipe import apply_overrides, tomllib

    return RunStore.create(path, read_config(apply_overrides(tomllib.loads(RECIPE), overrides)))


def finish(deployed: Deployment, store: RunStore) -> None:
    run = deployed.control.submit(store.path)
    deployed.control.follow(run, store.path, [store], Callback())


KINDS = {
    "augmented": {
        "data": {"name": "digits", "clients": 2},
        "model": {"name": "cnn"},
        "strategy": {"name": "fedproto"},
        "augment": {"flip": True},
    },
    "local-statistics": {
        "data": {"name": "shapes", "clients": 2, "images": 16, "size": 32},
        "model": {"name": "deeplab-small"},
        "strategy": {"name": "fedavg"},
        "train": {"batch_norm": "local"},
    },
}


@pytest.mark.timeout(600)
def test_two_kinds_of_recipes_over_tls_give_the_records_of_a_simulation(tmp_path, deployed):
    shared = {
        "schedule": {"rounds": 1, "cohort": 2},
        "engine": {"name": "reference", "device": "cpu"},
        "flower": {"evaluate_on": "server", "deadline": 300, "wait": 90},
    }
    configs = {
        name: read_config(shared | kind | {"train": {"epochs": 1} | kind.get("train", {})})
        for name, kind in KINDS.items()
    }
    here = create_sweep(tmp_path / "here", configs)
    simulate(here)
    deployed_runs = create_sweep(tmp_path / "run", configs)
    run = deployed.control.submit(tmp_path / "run")
    deployed.control.follow(run, tmp_path / "run", deployed_runs, Callback())
    for ours, theirs in zip(deployed_runs, here, strict=True):
        one, other = (
            [asdict(replace(record, seconds=0.0)) for record in store.records()]
            for store in (ours, theirs)
        )
        assert one == other
        assert same_tensors(ours.load_checkpoint().params, theirs.load_checkpoint().params)


@pytest.mark.timeout(400)
def test_a_node_killed_in_a_round_is_on_record_and_comes_back(tmp_path, flags, deployed):
    store = a_run(tmp_path / "run", "schedule.rounds=2")
    deployed.register(2)
    deployed.start_node(2)
    (flags / "hang-client-1").touch()
    (flags / "fail-client-2").touch()
    run = deployed.control.submit(store.path)
    strange_ca = make_keys(tmp_path / "others", ["localhost"], 5)
    wrong_ca = deployed.start_node(4, keys=strange_ca)
    wait_until((flags / "hanging-client-1").exists, "the round")
    deployed.nodes[1].kill()
    # Started once: the node waits until the server misses the one that was killed.
    back = deployed.start_node(1)
    deployed.control.follow(run, store.path, [store], Callback())
    assert back.exit_code is None
    assert "an earlier process of this node" in back.log.read_text()
    # A node that is not registered retries as a restarted one does, for 90 s, and then ends with
    # Flower's exit code.
    assert deployed.nodes[3]._process.wait(120) not in (None, 0)
    assert wrong_ca.exit_code != 0
    wrong_ca.end()
    assert "certificate verify failed" in wrong_ca.log.read_text().lower()
    first, second = store.records()
    assert list(first.attention) == [0]
    assert first.failures.keys() == {1, 2}
    assert first.failures[1].startswith("no answer")
    assert "the disk is on fire" in first.failures[2]
    assert second.failures == {}
    assert list(second.attention) == [0, 1, 2]


WITH_MEMORY = (
    *("data.clients=2", "schedule.cohort=2"),
    *("strategy.name=scaffold", "server.optimizer=adam", "server.lr=0.1"),
)
"""Server, clients and the server's optimizer remember."""


@pytest.mark.timeout(400)
def test_a_killed_server_and_node_resume_to_the_bits_of_a_simulation(tmp_path, deployed):
    store, undisturbed = (a_run(tmp_path / name, *WITH_MEMORY) for name in ("run", "simulated"))
    deployed.control.submit(store.path)
    wait_until(store.records, "the first round")
    deployed.link.kill()
    deployed.nodes[1].kill()
    before = len(store.records())
    assert before < 3
    deployed.start_link()
    deployed.start_node(1)
    finish(deployed, store)
    simulate([undisturbed])
    for ours, theirs in zip(store.records(), undisturbed.records(), strict=True):
        assert ours.cohort == theirs.cohort
        assert ours.attention == theirs.attention
        assert ours.metrics == theirs.metrics
        assert ours.failures == {}
    one, other = store.load_checkpoint(), undisturbed.load_checkpoint()
    assert same_tensors(one.params, other.params)
    assert same_tensors(one.memory, other.memory)
