"""Run directories written before strategies could declare memory open, compare and resume.

`old_run` was made by version 0.1.0: a run of FedProto stopped after two of four rounds, and the
records and final checkpoint of the same run left alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedproto.cli import main
from fedproto.simulate import simulate
from fedproto.store import RunStore
from fedproto.strategies.fedproto import COUNT, SUM
from fedproto.types import under

OLD = Path(__file__).with_name("old_run")


@pytest.fixture
def stopped(tmp_path) -> RunStore:
    shutil.copytree(OLD / "run", tmp_path / "run")
    return RunStore.open(tmp_path / "run")


def test_its_memory_is_found_again(stopped):
    assert not stopped.finished
    state = stopped.load_checkpoint()
    assert state.round == 2
    assert set(state.memory) == {SUM, COUNT}


def test_it_goes_on_to_what_it_would_have_become(stopped):
    simulate([stopped])
    expected = [json.loads(line) for line in (OLD / "finished.jsonl").read_text().splitlines()]
    for record, theirs in zip(stopped.records(), expected, strict=True):
        attention = {int(client): share for client, share in theirs["attention"].items()}
        assert record.attention == pytest.approx(attention, abs=1e-6)
        known = {name: record.metrics[name] for name in theirs["metrics"]}
        assert known == pytest.approx(theirs["metrics"], abs=1e-5)
        assert (record.cohort, record.stragglers) == (theirs["cohort"], theirs["stragglers"])
        assert (record.bytes_up, record.bytes_down) == (theirs["bytes_up"], theirs["bytes_down"])
    state = stopped.load_checkpoint()
    ours = {**under("params", state.params), **under("buffers", state.buffers), **state.memory}
    theirs = load_file(OLD / "finished.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5)


def test_it_is_compared_and_resumed_from_the_command_line(stopped, capsys):
    assert main(["compare", str(stopped.path)]) == 0
    assert main(["resume", str(stopped.path), "--quiet"]) == 0
    assert RunStore.open(stopped.path).finished
    assert "fedproto" in capsys.readouterr().out
