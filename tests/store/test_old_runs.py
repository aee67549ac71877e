"""Run directories of earlier versions open and compare; to continue them is refused.

`old_run` was made by version 0.1.0: a run of FedProto stopped after two of four rounds.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedproto.cli import main
from fedproto.store import RunStore
from fedproto.strategies.fedproto import COUNT, SUM

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


def test_it_is_compared_but_not_resumed(stopped, capsys):
    assert main(["compare", str(stopped.path)]) == 0
    assert "fedproto" in capsys.readouterr().out
    before = (stopped.path / "rounds.jsonl").read_bytes()
    assert main(["resume", str(stopped.path), "--quiet"]) == 2
    assert "other random streams; it can be read, but not continued" in capsys.readouterr().err
    assert (stopped.path / "rounds.jsonl").read_bytes() == before
