"""Metrics sent to TensorBoard and W&B: every round once, whatever happens to the service."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from contextlib import contextmanager
from typing import ClassVar

import pytest

from fedproto.callback import Callback, CallbackList
from fedproto.cli import main
from fedproto.store import RunStore
from fedproto.store.sinks import SinkCallback, TensorBoard, WeightsAndBiases
from report_runs import make_record, write_run

QUICK = ["--quiet", "--set", "engine.name=reference", "--set", "schedule.rounds=2"]


class Heard(Callback):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.rounds: list[int] = []

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def on_round(self, config, record) -> None:
        del config
        self.rounds.append(record.round)


class FakeWriter:
    """Stands in for TensorBoard's writer; what it was given, by folder."""

    logs: ClassVar[dict[str, list[tuple[str, float, int]]]] = {}

    def __init__(self, folder: str) -> None:
        self.log = self.logs.setdefault(folder, [])
        self.log.clear()

    def add_text(self, tag: str, text: str) -> None:
        self.texts = {tag: text}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.log.append((tag, value, step))

    def add_histogram(self, tag: str, values, step: int) -> None:
        self.log.append((tag, float(values.sum()), step))

    def close(self) -> None:
        self.closed = True


class FakeWandb(types.ModuleType):
    """Stands in for W&B: runs by id, each refusing steps that do not ascend."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.util.spec_from_loader("wandb", None)
        self.histories: dict[str, dict[int, dict[str, float]]] = {}
        self.broken = 0
        self.asked = 0
        self.described: dict[str, dict] = {}

    def init(self, *, id: str, resume: str, name: str, **about):
        self.asked += 1
        self.described[id] = {"name": name, **about}
        if self.broken:
            raise ConnectionError("no route\nto the host")
        assert resume == "allow"
        history = self.histories.setdefault(id, {})
        service = self

        class Session:
            step = max(history, default=-1) + 1

            def log(self, values: dict[str, float], step: int) -> None:
                if service.broken:
                    raise ConnectionError("gone")
                assert step >= max(history, default=0), "a step that was passed already"
                assert step not in history
                history[step] = values

            def finish(self) -> None:
                pass

        return Session()


@pytest.fixture
def fake_wandb(monkeypatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def fake_tensorboard(monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(TensorBoard, "available", classmethod(lambda _: True))
    monkeypatch.setattr(FakeWriter, "logs", {})
    return FakeWriter.logs


@contextmanager
def logging_to(names, stores, heard: Heard):
    callback = CallbackList([heard, *(SinkCallback(name, stores, heard) for name in names)])
    yield callback
    callback.on_end()


def feed(callback: Callback, store: RunStore, begun: int, ended: int) -> None:
    """What the round loop keeps and tells of rounds from one to another."""
    for round_ in range(len(store.records()), begun):
        store.append(make_record(round_))
    store.go_back_to(begun)
    for round_ in range(begun, ended):
        store.append(make_record(round_))
        callback.on_round(store.config, make_record(round_))


def store_of(path, rounds=0, **options) -> RunStore:
    write_run(path, rounds=rounds, planned=10, **options)
    return RunStore.open(path)


def test_every_round_is_logged_once_after_a_kill(tmp_path, fake_wandb, fake_tensorboard):
    store = store_of(tmp_path / "run")
    names = ["tensorboard", "wandb"]
    with logging_to(names, [store], Heard()) as callback:
        feed(callback, store, 0, 7)
    with logging_to(names, [store], Heard()) as callback:  # goes on from the checkpoint of round 5
        feed(callback, store, 5, 10)
    ((_, history),) = fake_wandb.histories.items()
    assert list(history) == list(range(1, 11))
    assert history[7]["accuracy"] == make_record(6).metrics["accuracy"]
    (log,) = fake_tensorboard.values()
    steps = [step for tag, _, step in log if tag == "accuracy"]
    assert steps == list(range(1, 11))
    assert {tag for tag, _, _ in log} >= {"loss", "round/seconds", "attention"}


def test_a_run_that_began_without_it_is_logged_from_the_first_round(tmp_path, fake_wandb):
    store = store_of(tmp_path / "run")
    with logging_to(["wandb"], [store], Heard()) as callback:
        feed(callback, store, 8, 10)
    ((_, history),) = fake_wandb.histories.items()
    assert list(history) == list(range(1, 11))


def test_runs_that_are_over_are_logged_too(tmp_path, fake_wandb):
    stores = [store_of(tmp_path / name, rounds=4) for name in ("one", "two")]
    with logging_to(["wandb"], stores, Heard()):
        pass
    assert [list(history) for history in fake_wandb.histories.values()] == [[1, 2, 3, 4]] * 2
    (one, _) = fake_wandb.described.values()
    assert (one["name"], one["group"]) == ("fedavg seed 0", tmp_path.name)
    assert one["config"]["schedule"]["rounds"] == 10


def test_a_service_out_of_reach_is_named_and_asked_once(tmp_path, fake_wandb, fake_tensorboard):
    fake_wandb.broken = True
    stores = [store_of(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    heard = Heard()
    with logging_to(["wandb", "tensorboard"], stores, heard) as callback:
        for store in stores:
            feed(callback, store, 0, 3)
    assert heard.rounds == [0, 1, 2] * 2
    assert len(heard.notices) == 1
    assert heard.notices[0].startswith("wandb failed (no route); the run continues without it")
    assert fake_wandb.asked == 1
    assert len(fake_tensorboard) == 2


def test_a_service_lost_on_the_way_gets_the_rest_later(tmp_path, fake_wandb):
    store, heard = store_of(tmp_path / "run"), Heard()
    with logging_to(["wandb"], [store], heard) as callback:
        feed(callback, store, 0, 4)
        fake_wandb.broken = True
        feed(callback, store, 4, 8)
    assert len(heard.notices) == 1
    fake_wandb.broken = False
    with logging_to(["wandb"], [store], heard) as callback:
        feed(callback, store, 8, 10)
    ((_, history),) = fake_wandb.histories.items()
    assert list(history) == list(range(1, 11))


@pytest.mark.parametrize("kind", [TensorBoard, WeightsAndBiases])
def test_what_is_not_installed_is_named_before_anything_begins(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr(kind, "available", classmethod(lambda _: False))
    name = "tensorboard" if kind is TensorBoard else "wandb"
    out = tmp_path / "run"
    assert main(["run", "quickstart", "--out", str(out), "--log-to", name]) == 2
    assert f"pip install '{name}>=" in capsys.readouterr().err
    assert not out.exists()


def test_logging_leaves_the_run_as_it_is(tmp_path, fake_wandb):
    def trained(name: str, *more: str) -> tuple[str, list[dict]]:
        path = tmp_path / name
        assert main(["run", "quickstart", "--out", str(path), *QUICK, *more]) == 0
        rounds = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        return json.loads((path / "run.json").read_text())["digest"], [
            record | {"seconds": 0, "hash": ""} for record in rounds
        ]

    assert trained("logged", "--log-to", "wandb") == trained("plain")
    ((_, history),) = fake_wandb.histories.items()
    assert list(history) == [1, 2]


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_itself_reads_the_log(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = store_of(tmp_path / "run")
    for begun, ended in ((0, 7), (5, 10)):
        with logging_to(["tensorboard"], [store], Heard()) as callback:
            feed(callback, store, begun, ended)
    log = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    log.Reload()
    assert [event.step for event in log.Scalars("accuracy")] == list(range(1, 11))
    assert log.Scalars("loss")[3].value == pytest.approx(make_record(3).metrics["loss"])
