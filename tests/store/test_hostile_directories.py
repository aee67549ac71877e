"""Run directories of strangers, and run directories that change while a run writes to them."""

from __future__ import annotations

import shutil
import threading
from base64 import b64encode

import pytest

from fedproto.callback import Callback
from fedproto.cli import main
from fedproto.errors import StoreError
from fedproto.store import RunStore
from fedproto.store.checking import check_run
from fedproto.store.sweeps import create_sweep
from helpers import simulate
from run_directories import snapshot, tiny


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
    codes = main(["report", str(run)]), main(["resume", str(run), "-q", "--rounds=5"])
    untouched(tmp_path)
    # What nobody can foresee is in nobody's way: temporary files have fresh names.
    assert codes == (0, 0) or not name.endswith(".partial")


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


@pytest.mark.parametrize("command", ["resume", "analyse"])
def test_a_run_of_a_sweep_that_is_a_link_is_not_followed(tmp_path, command, capsys):
    """Neither to a run of the user's, which would go on for more rounds, nor to an empty folder."""
    create_sweep(tmp_path / "sweep", {"a": tiny(), "b": tiny(seed=1)})
    simulate([RunStore.create(tmp_path / "mine", tiny())])
    (tmp_path / "empty").mkdir()
    for name, target in (("a", "mine"), ("b", "empty")):
        shutil.rmtree(tmp_path / "sweep" / name)
        (tmp_path / "sweep" / name).symlink_to(tmp_path / target)
    before = snapshot(tmp_path / "mine")
    more = ["--rounds=9"] if command == "resume" else []
    assert main([command, str(tmp_path / "sweep"), *more]) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert snapshot(tmp_path / "mine") == before
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_tuning_does_not_follow_links(tmp_path, capsys):
    (tmp_path / "outside").mkdir()
    settings = ["--set=schedule.rounds=1", f"--out={tmp_path / 'tuned'}"]
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "trials").symlink_to(tmp_path / "outside")
    assert main(["tune", "tune-digits", *settings]) == 2
    assert "trials is a symbolic link" in capsys.readouterr().err
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("name", ["analysis", "analysis/maps"])
def test_no_pictures_from_elsewhere_get_into_the_page(run, tmp_path, name):
    private = tmp_path / "private" / "maps" if name == "analysis" else tmp_path / "private"
    private.mkdir(parents=True)
    (private / "000000-picture.png").write_bytes(b"secret")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "private")
    assert main(["report", str(run)]) == 0
    assert b64encode(b"secret") not in (run / "report.html").read_bytes()


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
