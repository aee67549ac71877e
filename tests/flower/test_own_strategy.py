"""The documented strategy with memory, payload and broadcast: on every engine and over Flower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from documents import ROOT, blocks
from engine_cases import check_same, small_federation, sweep
from fedproto import STRATEGIES
from fedproto.config import read_config
from fedproto.engines.base import ENGINES
from fedproto.models.mlp import MLPOptions
from fedproto.options.registry import load_plugin
from fedproto.simulate import simulate
from fedproto.store import RunStore
from helpers import same_tensors


@pytest.fixture(scope="module")
def leaning(tmp_path_factory):
    """The class that the page on extending defines."""
    file = tmp_path_factory.mktemp("plugin") / "documented.py"
    file.write_text("\n\n".join(blocks(ROOT / "docs/extending.md", "python")))
    load_plugin(str(file))
    return STRATEGIES.get("leaning")


@pytest.mark.parametrize("engine", [name for name in ENGINES.names() if name != "reference"])
def test_it_gives_the_same_on_every_engine(leaning, engine):
    model, strategies = MLPOptions(hidden=8, features=6), [leaning(lean=0.3)]
    federation = small_federation()
    truth = sweep("reference", model, federation=federation, strategies=strategies)
    assert any(record.metrics["along"] > 0 for record in truth.records)
    check_same(sweep(engine, model, federation=federation, strategies=strategies), truth, 1e-9)


def test_it_gives_the_same_over_flower_and_after_a_stop(leaning, tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")
    from fedproto.flower import nodes
    from fedproto.flower.server_app import serve
    from flower_grid import LocalGrid

    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "LOOK_EVERY", 0.01)
    config = read_config(
        {
            "seed": 3,
            "data": {"name": "synthetic", "clients": 5, "seed": 5},
            "model": {"name": "mlp", "hidden": 6, "features": 5},
            "strategy": {"name": "leaning", "lean": 0.3},
            "train": {"epochs": 2, "batch_size": 20, "lr": 0.05},
            "schedule": {"rounds": 4, "cohort": 3},
            "engine": {"name": "reference", "device": "cpu"},
            "flower": {"evaluate_on": "server", "wait": 0, "deadline": 5},
            "store": {"keep": 0},
        }
    )
    assert type(config.strategy) is leaning
    ours, theirs, stopped = (
        RunStore.create(tmp_path / name, config) for name in ("flower", "here", "stopped")
    )
    serve(LocalGrid(range(5)), ours.path)
    simulate([theirs])
    simulate([stopped])
    for path in sorted((stopped.path / "checkpoints").iterdir())[2:]:
        path.unlink()
    simulate([stopped])
    for other in (ours, stopped):
        assert [replace(one, seconds=0.0) for one in other.records()] == [
            replace(one, seconds=0.0) for one in theirs.records()
        ]
        assert same_tensors(other.load_checkpoint().memory, theirs.load_checkpoint().memory)
        assert same_tensors(other.load_checkpoint().params, theirs.load_checkpoint().params)
