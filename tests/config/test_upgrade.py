"""Configurations that runs of earlier versions left behind."""

from __future__ import annotations

import json

import pytest

from archives import unpacked
from fedproto.cli import main
from fedproto.config import digest_of, read_config
from fedproto.config.upgrade import upgraded
from fedproto.disk.integrity import sealed, unsealed
from fedproto.store import RunStore
from paper.library import Library, options_without_successor, settings_digest

OLD = {"name": "fedavg", "weights": "size", "sampling": "uniform", "tolerate_partial_work": False}


def test_a_configuration_of_today_is_left_as_it_is():
    today = {"strategy": {"name": "fedprox", "mu": 0.1}, "schedule": {"partial_work": False}}
    assert upgraded(today) == today
    assert options_without_successor(today) == []


def test_partial_work_that_is_written_down_is_the_strategys_own():
    old = read_config(upgraded({"strategy": OLD}))
    new = read_config({"strategy": {"name": "fedavg"}})
    assert old.schedule.partial_work is False
    assert new.schedule.partial_work is None
    assert settings_digest(old) == settings_digest(new)
    tolerant = read_config(upgraded({"strategy": OLD | {"tolerate_partial_work": True}}))
    assert settings_digest(tolerant) != settings_digest(new)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, []),
        ({"rehearsal": 0.0, "rehearsed": "trained", "balance": 1.0, "sharpness": None}, []),
        ({"head": "average", "head_weights": "margins", "head_others": 0.5}, []),
        ({"head": "by-class", "head_weights": "counts"}, []),
        ({"head": "by-class", "head_weights": "margins"}, ["head_weights"]),
        ({"weights": "balanced", "rehearsal": 1.0}, ["weights", "rehearsal"]),
        ({"sharpness": 0.0, "max_attention": 0.5}, ["sharpness", "max_attention"]),
    ],
)
def test_options_that_are_gone_are_named_where_they_took_effect(options, names):
    assert options_without_successor({"strategy": OLD | options}) == names


def test_a_run_with_an_option_that_is_gone_passes_for_no_other(tmp_path):
    """Rehearsal apart, these are the runs of fairness and toleration."""
    unpacked(tmp_path, "guidance")
    described = {
        file.parent: json.loads(file.read_text())["config"] for file in tmp_path.rglob("run.json")
    }
    gone = {path for path, config in described.items() if options_without_successor(config)}
    known = {path for paths in Library(tmp_path)._paths.values() for path in paths}
    assert gone
    assert known == described.keys() - gone
    assert all(RunStore.open(path).records() for path in gone), "they stay readable"


@pytest.mark.parametrize(
    ("section", "gone"),
    [
        ("aggregate", {"rule": "trimmed-mean"}),
        ("task", {"background_prototype": True}),
        ("strategy", {"name": "fedatt", "norm": "spectral"}),
    ],
)
def test_a_run_with_a_value_that_is_gone_passes_for_no_other(tmp_path, capsys, section, gone):
    tiny = ["schedule.rounds=2", "schedule.cohort=2", "data.clients=4", "engine.name=reference"]
    path = tmp_path / "run"
    command = ["run", "quickstart", f"--out={path}", "--quiet"]
    assert main([*command, *(f"--set={one}" for one in tiny)]) == 0
    description = unsealed((path / "run.json").read_bytes())
    tables = description["config"]
    tables[section] = gone if "name" in gone else {**tables.get(section, {}), **gone}
    # Its checkpoints are of a run with this configuration as well.
    description["earlier"] = [description["digest"]]
    description["digest"] = digest_of(tables)
    (path / "run.json").write_bytes(sealed(description))
    capsys.readouterr()
    for command in ("compare", "resume"):
        assert main([command, str(path)]) == 2
        assert "holds a configuration that cannot be read here" in capsys.readouterr().err
