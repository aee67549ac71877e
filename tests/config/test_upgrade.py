"""Configurations that runs of earlier versions left behind."""

from __future__ import annotations

import json

import pytest

from archives import unpacked
from fedproto.config import read_config
from fedproto.config.upgrade import upgraded
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
