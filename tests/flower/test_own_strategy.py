"""Strategies of one's own: those documented, and one that uses all kinds of memory and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from documents import ROOT, blocks
from engine_cases import check_same, small_federation, sweep
from fedproto import STRATEGIES
from fedproto.config import read_config
from fedproto.engines.base import ENGINES
from fedproto.models.small import MLPOptions
from fedproto.options import load_plugin
from fedproto.store import RunStore
from helpers import same_tensors, simulate

LEANING = '''
from fedproto.strategies import Objective, part, under


@STRATEGIES.register("leaning")
@dataclass(frozen=True)
class Leaning(Strategy):
    """Clients lean towards where the model has been going."""

    lean: float = option(0.01, "how much", at_least=0)

    def server_memory(self, setting):
        return setting.like_params("direction", broadcast=True)

    def client_memory(self, setting):
        return {"own/rounds": Declared((), setting.float_type)}

    def payload(self, setting, num_examples):
        return {"own/along": Declared((), setting.float_type, low=0.0)}

    def objective(self, local):
        much = self.lean * (1 + local.memory["own/rounds"])
        direction = part("direction", local.broadcast)
        return Objective(linear={name: -much * one for name, one in direction.items()})

    def report(self, local, trained, before, after):
        direction = part("direction", local.broadcast)
        ways = [(trained[name] - local.params[name]) * one for name, one in direction.items()]
        along = torch.stack([way.sum() for way in ways]).sum().clamp(min=0)
        return Report({"own/along": along}, {"own/rounds": local.memory["own/rounds"] + 1})

    def remember(self, state, updates, setting):
        ways = {
            name: torch.stack([update.params[name] - old for update in updates]).mean(dim=0)
            for name, old in state.params.items()
        }
        return under("direction", ways)

    def metrics(self, updates):
        return {"along": max(float(update.payload["own/along"]) for update in updates)}
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """What the page on extending defines, and the class above."""
    file = tmp_path_factory.mktemp("plugin") / "own.py"
    guide = ROOT / "docs/how-to/write-a-strategy.md"
    file.write_text("\n\n".join([*blocks(guide, "python"), LEANING]))
    load_plugin(str(file))
    return STRATEGIES


ENGINES_TO_TRY = [name for name in ENGINES.names() if name != "reference"]


@pytest.mark.parametrize("engine", ENGINES_TO_TRY)
def test_documented_strategies_give_the_same_on_every_engine(plugin, engine):
    model, federation = MLPOptions(hidden=8, features=6), small_federation()
    names = ("loss-weighted", "near-received", "own-head")
    strategies = [plugin.get(name)() for name in names]
    truth = sweep("reference", model, federation=federation, strategies=strategies)
    check_same(sweep(engine, model, federation=federation, strategies=strategies), truth, 1e-9)


@pytest.mark.parametrize("engine", ENGINES_TO_TRY)
def test_it_gives_the_same_on_every_engine(plugin, engine):
    model, strategies = MLPOptions(hidden=8, features=6), [plugin.get("leaning")(lean=0.3)]
    federation = small_federation()
    truth = sweep("reference", model, federation=federation, strategies=strategies)
    assert any(record.metrics["along"] > 0 for record in truth.records)
    check_same(sweep(engine, model, federation=federation, strategies=strategies), truth, 1e-9)


def test_it_gives_the_same_over_flower_and_after_a_stop(plugin, tmp_path, monkeypatch):
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
    assert type(config.strategy) is plugin.get("leaning")
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
