"""Event files for TensorBoard: every round once, and the run as it is without them."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from typing import ClassVar

import pytest
import torch

from fedproto.callback import Callback
from fedproto.cli import main
from fedproto.store import RunStore
from fedproto.store.tensorboard import TensorBoard
from fedproto.types import ServerState
from report_runs import make_record, write_run

QUICK = ["--quiet", "--set", "engine.name=reference", "--set", "schedule.rounds=2"]


class FakeWriter:
    """Stands in for TensorBoard's writer; what it was given, by folder."""

    logs: ClassVar[dict[str, list[tuple[str, float, int]]]] = {}
    closed: ClassVar[list[str]] = []

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.log = self.logs.setdefault(folder, [])
        self.log.clear()

    def add_text(self, tag: str, text: str) -> None:
        self.texts = {tag: text}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.log.append((tag, value, step))

    def add_histogram(self, tag: str, values, step: int) -> None:
        self.log.append((tag, float(values.sum()), step))

    def close(self) -> None:
        self.closed.append(self.folder)


@pytest.fixture
def fake_tensorboard(monkeypatch):
    package = types.ModuleType("tensorboard")
    package.__spec__ = importlib.util.spec_from_loader("tensorboard", None)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "tensorboard", package)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(FakeWriter, "logs", {})
    monkeypatch.setattr(FakeWriter, "closed", [])
    return FakeWriter.logs


def feed(callback: Callback, store: RunStore, begun: int, ended: int) -> None:
    """What the round loop keeps and tells of rounds from one to another."""
    for round_ in range(len(store.records()), begun):
        store.append(make_record(round_))
    store.go_back_to(begun)
    for round_ in range(begun, ended):
        store.append(make_record(round_))
        callback.on_round(store.config, make_record(round_))
    callback.on_end()


def store_of(path, rounds=0, **options) -> RunStore:
    write_run(path, rounds=rounds, planned=10, **options)
    return RunStore.open(path)


def steps_of(log: list[tuple[str, float, int]], name: str = "accuracy") -> list[int]:
    return [step for tag, _, step in log if tag == name]


def test_every_round_is_logged_once_after_a_kill(tmp_path, fake_tensorboard):
    store = store_of(tmp_path / "run")
    feed(TensorBoard([store]), store, 0, 7)
    feed(TensorBoard([store]), store, 5, 10)
    (log,) = fake_tensorboard.values()
    assert steps_of(log) == list(range(1, 11))
    assert steps_of(log, "attention") == list(range(1, 11))
    assert [value for tag, value, _ in log if tag == "round/seconds"] == [0.25] * 10


def test_a_run_that_began_without_it_is_logged_from_the_first_round(tmp_path, fake_tensorboard):
    store, other = store_of(tmp_path / "run", rounds=4), store_of(tmp_path / "other", rounds=2)
    feed(TensorBoard([other, store]), store, 4, 6)
    (log,) = fake_tensorboard.values()
    assert steps_of(log) == list(range(1, 7))


def test_runs_that_are_over_are_logged_too(tmp_path, fake_tensorboard):
    stores = [store_of(tmp_path / name, rounds=10) for name in ("one", "two")]
    for store in stores:
        store.save_checkpoint(ServerState(10, {"w": torch.zeros(1)}, {}), last=True)
    TensorBoard(stores).on_end()
    assert [steps_of(log) for log in fake_tensorboard.values()] == [list(range(1, 11))] * 2
    assert FakeWriter.closed == [str(store.path / "tensorboard") for store in stores]


def test_what_is_not_installed_is_named_before_anything_begins(tmp_path, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name)
    )
    out = tmp_path / "run"
    assert main(["run", "quickstart", "--out", str(out), "--tensorboard"]) == 2
    assert "pip install 'tensorboard>=" in capsys.readouterr().err
    assert not out.exists()


def test_logging_leaves_the_run_as_it_is(tmp_path, fake_tensorboard):
    def trained(name: str, *more: str) -> tuple[str, list[dict]]:
        path = tmp_path / name
        assert main(["run", "quickstart", "--out", str(path), *QUICK, *more]) == 0
        rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        return json.loads((path / "run.json").read_text())["digest"], [
            record | {"seconds": 0, "hash": ""} for record in rounds
        ]

    assert trained("logged", "--tensorboard") == trained("plain")
    (log,) = fake_tensorboard.values()
    assert steps_of(log) == [1, 2]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_itself_reads_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = store_of(tmp_path / "run")
    for begun, ended in ((0, 7), (5, 10)):
        feed(TensorBoard([store]), store, begun, ended)
    log = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    log.Reload()
    assert [event.step for event in log.Scalars("accuracy")] == list(range(1, 11))
    assert log.Scalars("loss")[3].value == pytest.approx(make_record(3).metrics["loss"])
