"""A run goes on with, and counts as, nothing but what it was trained on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedproto
from fedproto import Federation, with_features
from fedproto.cli import main
from fedproto.disk.integrity import sealed, unsealed
from fedproto.engines import auto
from fedproto.errors import StoreError
from fedproto.rounds import identity
from fedproto.rounds.identity import data_identity
from fedproto.rounds.run import demand_of
from helpers import AfterRound

pytest_plugins = ["data_fixtures"]

TINY = {"rounds": 2, "cohort": 3, "epochs": 1, "engine": "reference", "device": "cpu"}


def federation(shift: float = 0.0, seed: int = 0) -> Federation:
    rng = np.random.RandomState(7)
    clients = [(rng.normal(size=(12, 4)) + shift, rng.randint(0, 3, 12)) for _ in range(4)]
    return Federation.from_clients(clients, num_classes=3, seed=seed)


def module(seed: int = 0, hidden: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return with_features(nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3)))


@pytest.mark.parametrize(
    ("data", "model", "named"),
    [
        (lambda: federation(shift=1.0), module, "the samples"),
        (lambda: federation(seed=1), module, "which client has which samples"),
        (federation, lambda: module(hidden=6), "the model's layers"),
        (federation, lambda: module(seed=1), "the model's initial weights"),
    ],
)
@pytest.mark.parametrize("finished", [True, False])
def test_other_data_or_another_module_is_refused_and_named(tmp_path, data, model, named, finished):
    out = tmp_path / "run"
    if finished:
        fedproto.run(federation(), module(), "fedavg", out=out, **TINY)
    else:
        with pytest.raises(KeyboardInterrupt):
            fedproto.run(
                federation(), module(), "fedavg", out=out, callbacks=[AfterRound(interrupt)], **TINY
            )
    records = (out / "rounds.jsonl").read_bytes()
    assert records.count(b"\n") == (2 if finished else 1)
    with pytest.raises(StoreError, match=f"{named}.* changed since") as refusal:
        fedproto.run(data(), model(), "fedavg", out=out, **TINY)
    assert "--out" not in str(refusal.value)
    assert (out / "rounds.jsonl").read_bytes() == records
    again = fedproto.run(federation(), module(), "fedavg", out=out, **TINY)
    assert len(again.records) == 2


def interrupt(*_) -> None:
    raise KeyboardInterrupt


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path):
    whole = fedproto.run(federation(), module(), "fedproto", **TINY)
    with pytest.raises(KeyboardInterrupt):
        fedproto.run(
            federation(),
            module(),
            "fedproto",
            out=tmp_path / "a",
            callbacks=[AfterRound(interrupt)],
            **TINY,
        )
    rest = fedproto.run(federation(), module(), "fedproto", out=tmp_path / "a", **TINY)
    for name, tensor in whole.state.params.items():
        assert torch.equal(tensor, rest.state.params[name])


@pytest.fixture
def pictures(tmp_path, cache):  # noqa: ARG001
    for client in ("anna", "ben", "carl"):
        add_client(tmp_path / "pictures", client)
    return tmp_path / "pictures"


def add_client(folder, client: str) -> None:
    rng = np.random.RandomState(len(client))
    for label in ("cat", "dog"):
        for number in range(5):
            path = folder / client / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.randint(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)


RECIPE = """
[data]
name = "client-folders"
path = "pictures"
size = 8
[model]
name = "mlp"
hidden = 4
features = 4
[strategy]
name = "fedavg"
[schedule]
rounds = 2
cohort = 3
[train]
epochs = 1
[engine]
name = "reference"
"""


def test_changed_folders_are_noticed_by_reuse_resume_and_analyse(
    pictures, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(RECIPE)
    assert main(["run", "own.toml", "--out=run", "-q"]) == 0
    assert main(["run", "own.toml", "--out=run", "--reuse", "-q"]) == 0
    assert main(["analyse", "run", "--what=clients"]) == 0
    add_client(pictures, "dora")
    capsys.readouterr()
    for command in (["run", "own.toml", "--out=run", "--reuse"], ["analyse", "run"]):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "the samples" in error
        assert "changed since" in error


@pytest.mark.usefixtures("pictures")
def test_own_data_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(RECIPE)
    assert main(["run", "own.toml", "--out=run", "-q"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["analyse", "../run", "--what=clients"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["run", "own.toml", "--out=run", "--reuse", "-q"]) == 0


def test_a_run_of_before_goes_on_without_fingerprints(tmp_path):
    out = tmp_path / "run"
    fedproto.run(federation(), module(), "fedavg", out=out, **TINY)
    description = unsealed((out / "run.json").read_bytes())
    del description["identity"], description["engines"]
    (out / "run.json").write_bytes(sealed(description))
    assert len(fedproto.run(federation(), module(), "fedavg", out=out, **TINY).records) == 2


def test_the_description_says_which_engine_trained(tmp_path):
    out = tmp_path / "run"
    fedproto.run(federation(), module(), "fedavg", out=out, **TINY)
    (engine,) = json.loads((out / "run.json").read_text())["engines"]
    assert engine == {
        "from_round": 0,
        "name": "reference",
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }


def test_large_data_is_sampled(monkeypatch):
    monkeypatch.setattr(identity, "WHOLE_BYTES", 200)
    one, two = federation(), federation()
    two.samples.inputs[1] += 1
    assert data_identity(one)["samples"] == data_identity(two)["samples"]
    two.samples.inputs[:] += 1
    assert data_identity(one)["samples"] != data_identity(two)["samples"]


def test_normalisation_is_part_of_the_samples(pictures, tmp_path):
    source = fedproto.DATASETS.get("client-folders")(path=str(pictures), size=8)
    plain, scaled = source.load(tmp_path), replace(source, std=(0.5, 0.5, 0.5)).load(tmp_path)
    assert data_identity(plain)["samples"] != data_identity(scaled)["samples"]
    shutil.copytree(pictures, tmp_path / "copy")
    moved = replace(source, path=str(tmp_path / "copy")).load(tmp_path)
    assert data_identity(plain) == data_identity(moved)


def test_runs_go_on_with_the_engine_they_began_with(tmp_path, monkeypatch):
    """Others of the sweep may be over by then, and what is left too little for processes."""
    monkeypatch.setattr(auto, "available_cores", lambda: 2)
    keywords = TINY | {"engine": "auto", "rounds": 400}
    variants = {"a": "fedavg", "b": {"strategy": "fedavg", "stop": {"patience": 1}}}
    out = tmp_path / "sweep"
    assert demand(keywords, 1).steps < auto.WORTHWHILE_STEPS <= demand(keywords, 2).steps
    with pytest.raises(KeyboardInterrupt):
        fedproto.sweep(
            federation(), module(), variants, out=out, callbacks=[AfterRound(late)], **keywords
        )
    fedproto.sweep(federation(), module(), variants, out=out, **keywords)
    for run in ("a-seed0", "b-seed0"):
        (engine,) = json.loads((out / run / "run.json").read_text())["engines"]
        assert engine["name"] == "processes"
        assert engine["threads"] == 1


def late(_, record) -> None:
    if record.round == 20:
        raise KeyboardInterrupt


def demand(keywords: dict, runs: int) -> auto.Demand:
    config = fedproto.run(federation(), module(), "fedavg", **keywords | {"rounds": 1}).config
    config = replace(config, schedule=replace(config.schedule, rounds=keywords["rounds"]))
    return demand_of([config] * runs, federation())
