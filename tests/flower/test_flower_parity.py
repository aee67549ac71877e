"""A deployment is the same recipe: every section and every recipe, to the same records."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from fedproto import STRATEGIES
from fedproto.config import RunConfig, read_config
from fedproto.config.options import CLIP
from fedproto.config.recipe import bundled_recipes, read_recipe
from fedproto.flower import nodes
from fedproto.flower.server_app import serve
from fedproto.flower.wire import SERVERS_OWN, config_text
from fedproto.options import options_to_dict
from fedproto.store import RunStore
from flower_grid import LocalGrid
from flower_runs import pooled, tables
from helpers import same_tensors, simulate

CLIENTS = 4
SMALL = ("shapes", "digits", "synthetic")
"""Data that comes along; other data sets are stood in for by those of their task."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(nodes, "ASK_FOR", 20.0)


def scaled_down(config: RunConfig) -> RunConfig:
    """The same kind of run, in a second: little data, two rounds, everything else as it is."""
    given = config.to_dict() | {"seed": 0, "label": ""}
    segmentation = given["model"]["name"].startswith("deeplab")
    name = given["data"]["name"]
    name = name if name in SMALL else "shapes" if segmentation else "digits"
    given["data"] = {"name": name, "clients": CLIENTS, "seed": 1}
    if segmentation:
        given["data"] |= {"images": 16, "size": 32}
        given["model"] = {"name": "deeplab-small"}
    elif given["model"]["name"] not in ("cnn", "mlp"):
        given["model"] = {"name": "cnn"}  # others need larger images, or files of weights
    given["train"] |= {"epochs": 1, "batch_size": 20}
    given["schedule"] |= {"rounds": 2, "cohort": 2}
    given["engine"] = {"name": "reference", "device": "cpu"}
    given["measure"] = {"every": 0}
    given["flower"] = {"evaluate_on": "server", "wait": 0, "deadline": 60}
    return read_config(given)


def federated() -> dict[str, RunConfig]:
    """Of every recipe a run, of a kind that no recipe before it has if it has one.

    Many differ only in what is scaled down. With ``FEDPROTO_FUZZ`` it is all kinds of all, and of
    the recipes of studies.
    """
    found: dict[str, tuple[str, RunConfig]] = {}
    recipes = bundled_recipes()
    if "FEDPROTO_FUZZ" in os.environ:
        import paper  # registers their methods

        studies = Path(paper.__file__).with_name("recipes").glob("*.toml")
        recipes |= {path.stem: path for path in studies}
    for name, path in sorted(recipes.items()):
        kinds = {}
        for key, config in read_recipe(str(path)).items():
            if not config.strategy.pooled:
                small = scaled_down(config)
                kind = replace(small, schedule=replace(small.schedule, delta=0.5))
                kinds.setdefault(kind.digest(), (f"{name}/{key}", kind))
        new = {digest: kind for digest, kind in kinds.items() if digest not in found}
        chosen = new if "FEDPROTO_FUZZ" in os.environ else dict(list(new.items())[:1])
        found |= chosen
    return dict(found.values())


RECIPES = federated()


def untimed(store: RunStore) -> list[dict]:
    return [asdict(replace(record, seconds=0.0)) for record in store.records()]


def check_parity(tmp_path, config: RunConfig) -> None:
    deployed = RunStore.create(tmp_path / "flower", config)
    serve(LocalGrid(range(CLIENTS)), deployed.path)
    here = RunStore.create(tmp_path / "here", config)
    simulate([here])
    assert untimed(deployed) == untimed(here)
    assert all(record.failures == {} for record in deployed.records())
    one, other = deployed.load_checkpoint(), here.load_checkpoint()
    assert same_tensors(one.params, other.params)
    assert same_tensors(one.buffers, other.buffers)
    assert same_tensors(one.memory, other.memory)
    assert same_tensors(one.served.params, other.served.params)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_bundled_recipe_gives_the_records_of_a_simulation(tmp_path, name):
    check_parity(tmp_path, RECIPES[name])


SHAPES = {"name": "shapes", "clients": CLIENTS, "images": 16, "size": 32}
DEEPLAB = {"name": "deeplab-small"}
DIGITS = {"name": "digits", "clients": CLIENTS}
SECTIONS = {
    "augment": {"data": DIGITS, "model": {"name": "cnn"}, "augment": {"flip": True}},
    "batch-norm-local": {"data": SHAPES, "model": DEEPLAB, "train": {"batch_norm": "local"}},
    "batch-norm-frozen": {"data": SHAPES, "model": DEEPLAB, "train": {"batch_norm": "frozen"}},
    "adam": {"train": {"optimizer": "adam", "lr": 0.001}},
    "sam": {"train": {"optimizer": "sam", "rho": 0.1, "clip_norm": 1.0, "centralize": True}},
    "schedule": {"train": {"lr_schedule": "polynomial"}, "schedule": {"delta": 0.5}},
    "aggregate": {"aggregate": {"rule": "median", "clip_norm": "median", "max_share": 2.0}},
    "defence": {
        "aggregate": options_to_dict(CLIP),
        "schedule": {"cohort": 3},
        "serve": {"head": "lda"},
    },
    "privacy": {"privacy": {"min_samples": 5}, "strategy": {"name": "fedproto"}},
    "server": {"server": {"optimizer": "adam", "lr": 0.01}},
    "rows-of-holders": {"head": {"rows": "holders"}},
    "rows-by-counts": {"head": {"rows": "counts"}, "strategy": {"name": "scaffold"}},
    "served-head": {"serve": {"head": "lda", "add": True, "fade": 50.0}},
    **{f"head-{name}": {"serve": {"head": name}} for name in ("ridge", "cof", "ncm")},
    "served-average": {"serve": {"average": "ema"}},
    "served-statistics": {
        "strategy": {"name": "scaffold"},
        "serve": {"average": "all", "head": "ridge"},
    },
    "served-diagonal": {"serve": {"head": "lda", "covariance": "diagonal"}},
    "tested-beside": {"serve": {"also": ["average=ema", "head=lda"]}},
    "look-ahead": {"server": {"lookahead": 0.85}},
    "rows-segmentation": {"data": SHAPES, "model": DEEPLAB, "head": {"rows": "holders"}},
    **{
        name: {"strategy": {"name": name}, "train": {"epochs": 2 if name == "fedrep" else 1}}
        for name in STRATEGIES.names()
        if name != "centralized"
    },
    "float64": {"engine": {"dtype": "float64"}},
    "segmentation": {"data": SHAPES, "model": DEEPLAB, "strategy": {"name": "fedproto"}},
    "momentum": {"train": {"momentum": 0.9, "lr_decay": 0.9, "batch_size": 7}},
    "least-epochs": {
        "schedule": {"delta": 0.9, "least_epochs": 1, "partial_work": True},
        "train": {"epochs": 3},
    },
    "measures": {"measure": {"every": 1, "what": ["loss", "margin", "clients"]}},
    "served-window": {"serve": {"average": "window", "window": 2}},
    "personal-and-fine-tuned": {
        "strategy": {"name": "fedper"},
        "evaluate": {"finetune_epochs": 1, "every": 2},
    },
    "stop": {"data": DIGITS | {"validation": 0.2}, "stop": {"patience": 1}},
}


def with_sections(sections: dict) -> RunConfig:
    base = tables(data={"clients": CLIENTS}, flower={"deadline": 60})
    base["schedule"] |= {"rounds": 2, "delta": 0.0}
    base["train"] |= {"epochs": 1}
    for name, section in sections.items():
        renewed = "name" in section and section["name"] != base.get(name, {}).get("name")
        base[name] = section if renewed else {**base.get(name, {}), **section}
    return read_config(base)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_reaches_the_clients(tmp_path, name):
    check_parity(tmp_path, with_sections(SECTIONS[name]))


def test_no_section_is_left_out():
    """A new section of configurations needs a case here, or in a recipe."""
    cases = [with_sections(one).to_dict() for one in SECTIONS.values()]
    cases += [config.to_dict() for config in RECIPES.values()]
    plain = with_sections({}).to_dict()
    varied = {name for case in cases for name in case if case[name] != plain.get(name)}
    assert varied >= plain.keys() - {"flower", "measure", "store", "evaluate", "seed", "label"}


def test_a_section_that_is_not_the_servers_own_is_sent():
    """Whatever section is added to configurations reaches clients, unless it is named here."""
    config = with_sections({"augment": {"flip": True}})
    assert json.loads(config_text(config)).keys() == config.to_dict().keys() - SERVERS_OWN


def test_clients_tell_class_names_and_score_their_validation_parts(tmp_path):
    sections = {"data": DIGITS | {"validation": 0.3}, "stop": {"patience": 1}}
    config = with_sections(sections | {"flower": {"evaluate_on": "clients"}})
    deployed = RunStore.create(tmp_path / "flower", config)
    serve(LocalGrid(range(CLIENTS)), deployed.path)
    here = RunStore.create(tmp_path / "here", config)
    simulate([here])
    for one, other in zip(deployed.records(), here.records(), strict=True):
        # Both score single clients, each at rounds of its own.
        shared = one.metrics.keys() & other.metrics.keys()
        assert shared >= pooled(other.metrics).keys()
        assert {name: one.metrics[name] for name in shared} == pytest.approx(
            {name: other.metrics[name] for name in shared}, rel=1e-6
        )
        assert "validation_accuracy" in one.metrics
    shapes = with_sections({"data": SHAPES, "model": DEEPLAB, "flower": {"evaluate_on": "clients"}})
    named = RunStore.create(tmp_path / "shapes", shapes)
    serve(LocalGrid(range(CLIENTS)), named.path)
    simulated = RunStore.create(tmp_path / "simulated", shapes)
    simulate([simulated])
    found, known = (pooled(one.records()[-1].metrics) for one in (named, simulated))
    assert found.keys() == known.keys()
