"""The run directory: what is written, and what is refused when it was damaged."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedproto import load
from fedproto.cli import main
from fedproto.config import digest_of, read_config
from fedproto.config.options import StoreOptions
from fedproto.disk.integrity import sealed
from fedproto.errors import ConfigError, StoreError
from fedproto.store import RunStore, open_or_create, read_description
from fedproto.store.sweeps import create_sweep, extend, open_runs, run_directories
from fedproto.types import RoundRecord
from helpers import make_state, same_tensors, simulate
from run_directories import TINY, snapshot, tiny


def record(round_: int) -> RoundRecord:
    return RoundRecord(
        round_,
        [1, 3],
        [3],
        [],
        {1: 2, 3: 0},
        {1: 0.25, 3: 0.75},
        {"loss": 1.5},
        9,
        8,
        0.1,
        {},
        None,
    )


@pytest.fixture
def finished(tmp_path):
    store = RunStore.create(tmp_path / "run", tiny())
    simulate([store])
    return store


def test_a_run_directory_tells_what_was_run_with_what(finished):
    description = read_description(finished.path)
    assert read_config(description["config"]) == finished.config
    environment = description["environment"]
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["devices"][0].startswith("cpu")
    assert [each.round for each in finished.records()] == [0, 1, 2]
    assert finished.finished


def test_records_come_back_as_they_were(tmp_path):
    store = RunStore.create(tmp_path / "run", tiny())
    for round_ in range(2):
        store.append(record(round_))
    assert store.records() == [record(0), record(1)]


def test_states_come_back_as_they_were(tmp_path):
    store, state = RunStore.create(tmp_path / "run", tiny()), make_state(round_=2)
    store.save_checkpoint(state)
    again = store.load_checkpoint()
    assert again.round == 2
    assert same_tensors(again.params, state.params)
    assert same_tensors(again.buffers, state.buffers)
    assert same_tensors(again.memory, state.memory)
    assert again.params["bias"].dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [4, 5]),
        ({"keep": 0}, [1, 2, 3, 4, 5]),
        ({"keep": 1}, [5]),
        ({"checkpoint_every": 2, "keep": 0}, [2, 4, 5]),
        ({"checkpoint_every": 0}, []),
    ],
    ids=str,
)
def test_checkpoints_can_be_thinned_or_turned_off(tmp_path, options, expected):
    store = RunStore.create(tmp_path / "run", tiny(store=options))
    for round_ in range(1, 6):
        store.save_checkpoint(make_state(round_), last=round_ == 5)
    names = sorted(path.stem for path in (store.path / "checkpoints").glob("*"))
    assert names == [f"round-{round_:06d}" for round_ in expected]


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_without_all_checkpoints_can_be_continued_too(tmp_path, finished, every):
    store = RunStore.create(tmp_path / "other", tiny(store={"checkpoint_every": every}))
    simulate([store])
    lines = (store.path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (store.path / "rounds.jsonl").write_bytes(b"".join(lines[:2]))
    for path in (store.path / "checkpoints").glob("*3.safetensors"):
        path.unlink()
    simulate([RunStore.open(store.path)])
    assert [each.metrics for each in store.records()] == [
        each.metrics for each in finished.records()
    ]


def test_a_finished_run_is_left_alone(finished):
    before = snapshot(finished.path)
    simulate([RunStore.open(finished.path)])
    assert snapshot(finished.path) == before


def test_a_line_cut_short_by_a_kill_is_left_out(finished):
    path = finished.path / "rounds.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [each.round for each in finished.records()] == [0, 1]


def damage_line(path):
    file = path / "rounds.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0][:30] + b"\n", *lines[1:]]))


def truncate_checkpoint(path):
    file = max((path / "checkpoints").iterdir())
    file.write_bytes(file.read_bytes()[:100])


def empty_checkpoint(path):
    max((path / "checkpoints").iterdir()).write_bytes(b"")


def foreign_checkpoint(path):
    other = RunStore.create(path.parent / "foreign", tiny(seed=9))
    other.save_checkpoint(make_state(3))
    shutil.copy(max((other.path / "checkpoints").iterdir()), max((path / "checkpoints").iterdir()))


def change_config(path):
    file = path / "run.json"
    file.write_text(file.read_text().replace('"epochs": 1', '"epochs": 2'))


def damage_description(path):
    (path / "run.json").write_text("{")


def future_format(path):
    description = read_description(path)
    (path / "run.json").write_bytes(sealed(description | {"format": 99}))


def unknown_option(path):
    file = path / "run.json"
    text = json.dumps(read_description(path)).replace('"epochs"', '"epoches"')
    file.write_bytes(sealed(json.loads(text)))


def lose_records(path):
    (path / "rounds.jsonl").unlink()


DAMAGES = {
    damage_line: "line 1 is damaged",
    truncate_checkpoint: "round-000002.safetensors cannot be read .* delete it to begin again",
    empty_checkpoint: "round-000002.safetensors cannot be read",
    foreign_checkpoint: "belongs to a run with another configuration",
    change_config: "was changed after it was written",
    damage_description: "run.json is damaged",
    future_format: "is of format 99",
    unknown_option: "did you mean 'epochs'",
    lose_records: "has 0 records but the checkpoint is of round 2",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_directory_is_refused_and_left_as_it_was(finished, damage):
    # The run was killed before its last record: there is something left to do.
    file = finished.path / "rounds.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:2]))
    for path in (finished.path / "checkpoints").glob("*3.safetensors"):
        path.unlink()
    damage(finished.path)
    before = snapshot(finished.path)
    with pytest.raises(StoreError, match=DAMAGES[damage]):
        simulate([RunStore.open(finished.path)])
    assert snapshot(finished.path) == before


def test_a_truncated_checkpoint_can_be_deleted_to_go_on(finished):
    expected = finished.records()
    truncate_checkpoint(finished.path)
    with pytest.raises(StoreError, match="delete it to continue from round-000002"):
        finished.load_checkpoint()
    max((finished.path / "checkpoints").iterdir()).unlink()
    simulate([RunStore.open(finished.path)])
    assert [each.metrics for each in finished.records()] == [each.metrics for each in expected]


def test_a_run_begun_before_an_option_existed_goes_on(tmp_path, finished):
    older = RunStore.create(tmp_path / "older", tiny())
    description = read_description(older.path)
    del description["config"]["evaluate"]["validation"]
    description["digest"] = digest_of(description["config"])
    (older.path / "run.json").write_bytes(sealed(description))
    simulate([RunStore.open(older.path)])
    (older.path / "rounds.jsonl").unlink()
    for path in (older.path / "checkpoints").iterdir():
        path.unlink()
    reopened = open_or_create(older.path, tiny())
    simulate([reopened])
    assert [each.metrics for each in reopened.records()] == [
        each.metrics for each in finished.records()
    ]


def test_a_directory_in_use_is_not_written_twice(tmp_path):
    store = RunStore.create(tmp_path / "run", tiny())
    with store.folder.locked(), pytest.raises(StoreError, match="in use by another process"):
        simulate([RunStore.open(store.path)])


def test_a_directory_in_use_is_waited_for_as_long_as_asked(tmp_path):
    store = RunStore.create(tmp_path / "run", tiny())
    with contextlib.ExitStack() as held:
        held.enter_context(store.folder.locked())
        leave = threading.Timer(0.5, held.close)
        leave.start()
        simulate([RunStore.open(store.path)], patience=30)
        leave.join()
    assert store.records()


def test_an_existing_run_is_not_overwritten(finished):
    with pytest.raises(StoreError, match="holds a run already; continue it with 'fedproto resume"):
        RunStore.create(finished.path, tiny())


def test_a_run_of_another_configuration_is_named_by_what_differs(finished):
    with pytest.raises(StoreError, match=r"differs in schedule.rounds, seed\)"):
        open_or_create(finished.path, tiny(seed=5, schedule={"rounds": 9, "cohort": 3}))
    assert open_or_create(finished.path, tiny()).config == finished.config


def test_a_folder_with_other_things_is_not_used(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match="is not empty and holds no run"):
        RunStore.create(tmp_path, tiny())
    with pytest.raises(StoreError, match="is not empty and holds no sweep"):
        create_sweep(tmp_path, {"a": tiny()})


def test_a_full_disk_keeps_the_last_good_state(tmp_path, finished, monkeypatch):
    store = RunStore.create(tmp_path / "full", tiny())
    calls = {"left": 7}
    fsync = os.fsync

    def full(descriptor):
        calls["left"] -= 1
        if calls["left"] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=r"No space left on device; .* then resume the run"):
            simulate([store])
    assert not list(store.path.rglob("*.partial"))
    done = len(store.records())
    assert 0 < done < 3
    simulate([RunStore.open(store.path)])
    assert [each.metrics for each in store.records()] == [
        each.metrics for each in finished.records()
    ]


def test_a_sweep_stopped_before_its_runs_began_is_whole(tmp_path):
    configs = {"one": tiny(seed=1), "two": tiny(seed=2)}
    create_sweep(tmp_path / "sweep", configs)
    shutil.rmtree(tmp_path / "sweep" / "two")
    stores = open_runs(tmp_path / "sweep")
    assert [store.config.seed for store in stores] == [1, 2]
    with pytest.raises(StoreError, match="holds a sweep already"):
        create_sweep(tmp_path / "sweep", configs)
    with pytest.raises(StoreError, match="a run 'one' of another configuration"):
        create_sweep(tmp_path / "sweep", {"one": tiny(seed=7)}, reuse=True)
    assert len(create_sweep(tmp_path / "sweep", configs, reuse=True)) == 2


@pytest.mark.parametrize(
    "runs", [3, {}, [], {"a": {}}, {"a": 1}, {"a": {"schedule": 3}}, {"a": {"schedule": []}}]
)
def test_a_damaged_sweep_is_refused(tmp_path, runs):
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    for reading in (open_runs, lambda path: extend(path, 9)):
        with pytest.raises(StoreError, match="start the sweep again"):
            reading(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}"])
def test_a_list_of_runs_that_is_none_is_refused(tmp_path, content):
    (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(StoreError, match="start the sweep again"):
        open_runs(tmp_path)


def test_store_options_are_no_part_of_the_result():
    assert tiny(store={"keep": 9}).digest() == tiny().digest()
    assert StoreOptions().checkpoint_every == 1


def validated(tmp_path, **store) -> RunStore:
    sections = {
        "data": {**TINY["data"], "validation": 0.3},
        "train": {**TINY["train"], "lr": 1.5},  # scores go up and down
        "schedule": {**TINY["schedule"], "rounds": 8},
        "serve": {"average": "ema"},
        "store": {"keep": 0, "best": True, **store},
    }
    made = RunStore.create(tmp_path / "run", tiny(**sections))
    simulate([made])
    return made


def test_the_best_model_is_the_one_served_after_the_best_validated_round(tmp_path):
    store = validated(tmp_path)
    scores = [one.metrics["validation_accuracy"] for one in store.records()]
    best = scores.index(max(scores))
    assert best < len(scores) - 1  # otherwise the newest is the best, and this shows little
    kept = store.load_best()
    state = store.read_checkpoint(store.path / "checkpoints" / f"round-{best + 1:06d}.safetensors")
    assert kept.round == best + 1
    assert same_tensors(kept.params, state.served.params)
    assert not kept.memory
    newest, chosen = (load(store.path, best=which) for which in (False, True))
    assert same_tensors(chosen.model.state_dict(), {**chosen.model.state_dict(), **kept.params})
    assert not same_tensors(newest.state.served.params, chosen.state.served.params)
    for name, more in (("newest", []), ("best", ["--best"])):
        assert main(["export", str(store.path), "--out", str(tmp_path / name), *more]) == 0
    exported = load_file(tmp_path / "best" / "model.safetensors")
    assert same_tensors(exported, {**exported, **kept.params})


def test_a_damaged_best_model_is_named_and_a_missing_one_too(tmp_path, finished, capsys):
    with pytest.raises(StoreError, match=r"has no best model; train with store\.best = true"):
        finished.load_best()
    store = validated(tmp_path / "other")
    file = store.path / "checkpoints" / "best.safetensors"
    file.write_bytes(file.read_bytes()[:-8] + b"\0" * 8)
    with pytest.raises(StoreError, match=r"best.safetensors is damaged.*use the newest model"):
        store.load_best()
    assert main(["check", str(store.path)]) != 0
    assert "best.safetensors" in capsys.readouterr().out


def test_the_best_model_needs_validation_data(tmp_path):
    with pytest.raises(ConfigError, match=r"store\.best chooses by validation scores"):
        simulate([RunStore.create(tmp_path / "run", tiny(store={"best": True}))])


def test_folders_that_vanish_during_a_search_are_passed_over(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    RunStore.create(tmp_path / "runs" / "one", tiny())
    (tmp_path / "runs" / "gone").mkdir()
    listed = os.scandir

    def vanished(path):
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", vanished)
    assert run_directories(tmp_path / "runs") == [tmp_path / "runs" / "one"]
