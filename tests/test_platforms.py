"""macOS, Windows and spawned processes, as far as they can be imitated here."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import types

import pytest

from fedproto.disk import files
from fedproto.engines import auto
from fedproto.errors import StoreError

MUCH_WORK = auto.Demand(jobs_per_round=100, steps=10 * auto.WORTHWHILE_STEPS)

SPAWNED = """
import multiprocessing
import torch
import fedproto

def train(engine):
    return fedproto.run(
        "synthetic", "mlp", "fedavg", rounds=2, cohort=4, epochs=1, engine={"name": engine},
    ).state.params

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(train, ["auto"])
    for name, tensor in train("reference").items():
        assert torch.equal(tensor, spawned[name]), name
"""


@pytest.mark.parametrize(
    ("platform", "methods"), [("darwin", ["spawn", "fork"]), ("win32", ["spawn"])]
)
def test_where_forking_is_not_safe_the_reference_engine_is_chosen(monkeypatch, platform, methods):
    monkeypatch.setattr(auto, "available_cores", lambda: 4)
    if sys.platform == "linux":
        assert auto._obstacle_to_processes(MUCH_WORK) is None
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    assert "cannot be forked safely" in auto._obstacle_to_processes(MUCH_WORK)


def test_a_program_that_spawns_processes_trains_in_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_windows_locks_keep_a_second_process_out(monkeypatch, tmp_path):
    held: set[tuple[int, int]] = set()
    windows = types.ModuleType("msvcrt")
    windows.LK_NBLCK = 2

    def locking(descriptor, mode, number):
        assert (mode, number) == (windows.LK_NBLCK, 1)
        about = files.os.fstat(descriptor)
        if (about.st_dev, about.st_ino) in held:
            raise PermissionError(13, "Permission denied")
        held.add((about.st_dev, about.st_ino))

    windows.locking = locking
    monkeypatch.setitem(sys.modules, "msvcrt", windows)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(files, "_POSIX", False)
    with files.Folder(tmp_path).locked():
        in_use = pytest.raises(StoreError, match="in use by another process")
        with in_use, files.Folder(tmp_path).locked():
            pass
        (tmp_path / "other").mkdir()
        with files.Folder(tmp_path / "other").locked():
            pass
