"""Run directories of strangers, and run directories that change while a run writes to them."""

from __future__ import annotations

import shutil
import threading

import pytest

from fedproto.callback import Callback
from fedproto.cli import main
from fedproto.errors import StoreError
from fedproto.store import RunStore
from fedproto.store.checking import check_run
from helpers import simulate
from run_directories import tiny


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of four rounds, stopped after the second."""
    path = tmp_path_factory.mktemp("hostile") / "run"
    store = RunStore.create(path, tiny(schedule={"rounds": 4, "cohort": 3}))

    class Stop(Callback):
        def on_round(self, config, record):
            del config
            if record.round == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate([store], Stop())
    return path


@pytest.fixture
def run(stopped, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "round-000001.safetensors").write_text("mine")
    (tmp_path / "victim").write_text("mine")
    return shutil.copytree(stopped, tmp_path / "run")


def untouched(folder):
    assert (folder / "victim").read_text() == "mine"
    assert [path.read_text() for path in (folder / "outside").iterdir()] == ["mine"]


PLANTED = [
    "report.html.partial",
    "report.html",
    "rounds.jsonl.partial",
    "run.json.partial",
    "checkpoints/round-000003.safetensors.partial",
    "checkpoints/round-000003.safetensors",
    ".lock",
]


@pytest.mark.parametrize("name", PLANTED)
def test_no_file_outside_is_overwritten(run, tmp_path, name):
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "victim")
    main(["report", str(run)])
    main(["resume", str(run), "-q", "--rounds=5"])
    untouched(tmp_path)


@pytest.mark.parametrize("name", ["checkpoints", "analysis", "export", "clients"])
def test_no_folder_outside_is_written_or_emptied(run, tmp_path, name, capsys):
    if (run / name).exists():
        shutil.copytree(run / name, tmp_path / "outside", dirs_exist_ok=True)
        shutil.rmtree(run / name)
    shutil.copy(tmp_path / "victim", tmp_path / "outside" / "README.md")
    (run / name).symlink_to(tmp_path / "outside")
    shutil.copytree(run / name, tmp_path / "before")
    for command in ("resume", "analyse", "export"):
        main([command, str(run)])
    assert "Traceback" not in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "outside").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()
    }


class Once(Callback):
    """Does something after the first round that it hears of."""

    def __init__(self, act):
        self.act = act

    def on_round(self, config, record):
        del config, record
        act, self.act = self.act, lambda: None
        act()


def test_a_run_whose_directory_was_replaced_stops_and_the_new_run_is_whole(run, tmp_path):
    new = tiny(seed=7)

    def replace():
        run.rename(tmp_path / "moved")
        RunStore.create(run, new)

    with pytest.raises(StoreError, match="was moved, deleted or replaced during the run"):
        simulate([RunStore.open(run)], Once(replace))
    # What the first did is safe where its directory is now, and both go on.
    simulate([RunStore.open(tmp_path / "moved")])
    simulate([RunStore.open(run)])
    for path, rounds in ((run, 3), (tmp_path / "moved", 4)):
        assert len(RunStore.open(path).records()) == rounds
        assert not check_run(path).faults


@pytest.mark.parametrize("act", ["lock deleted", "deleted"])
def test_a_run_without_its_lock_or_directory_stops(run, act):
    def remove():
        if act == "deleted":
            shutil.rmtree(run)
        else:
            (run / ".lock").unlink()

    with pytest.raises(StoreError, match="was moved, deleted or replaced during the run"):
        simulate([RunStore.open(run)], Once(remove))
    assert run.exists() == (act != "deleted")


def test_check_finds_nothing_wrong_with_a_run_in_progress(tmp_path):
    """A run that writes and removes checkpoints as fast as it can, and a check in each moment."""
    store = RunStore.create(tmp_path / "run", tiny(schedule={"rounds": 40, "cohort": 3}))
    verdicts, running = [], threading.Event()

    def look():
        while not running.is_set():
            verdicts.append(check_run(store.path))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        simulate([store])
    finally:
        running.set()
        thread.join()
    assert [fault for verdict in verdicts for fault in verdict.faults] == []


@pytest.mark.parametrize("when", ["before the records", "after the records"])
def test_rounds_that_end_while_check_looks_are_no_damage(run, monkeypatch, when):
    """Rounds that end between two looks add records and checkpoints, and remove others."""
    counted, done = RunStore.iterate_records, []

    def with_more_rounds(store, lines=None):
        first = not done
        done.append(True)
        if first and when == "before the records":
            simulate([RunStore.open(run)])
        found = list(counted(store, lines))
        if first and when == "after the records":
            simulate([RunStore.open(run)])
        return iter(found)

    monkeypatch.setattr(RunStore, "iterate_records", with_more_rounds)
    verdict = check_run(run)
    assert done
    assert verdict.faults == []
