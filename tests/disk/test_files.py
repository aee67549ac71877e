"""Writing never follows a link, and a directory that is held is noticed to be another one."""

from __future__ import annotations

import os
import shutil

import pytest

from fedproto.disk.files import Folder, explained, open_regular, write_atomically
from fedproto.errors import StoreError


@pytest.fixture
def victim(tmp_path):
    file = tmp_path / "victim"
    file.write_text("mine")
    return file


@pytest.mark.parametrize("name", ["file", "below/file"])
def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path, name):
    folder = Folder(tmp_path)
    folder.write(name, b"one")
    folder.write(name, b"two")
    assert (tmp_path / name).read_bytes() == b"two"
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == ["file"]


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path, victim):
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "file"
    file.symlink_to(victim)
    write_atomically(file, b"new")
    assert file.read_bytes() == b"new"
    assert not file.is_symlink()
    assert victim.read_text() == "mine"


def test_nothing_is_appended_through_a_link(tmp_path, victim):
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(StoreError, match="link is a symbolic link"):
        Folder(tmp_path).append("link", b"more")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("act", ["write", "append", "remove", "make"])
def test_no_folder_below_is_a_link(tmp_path, victim, act):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(victim, outside / "victim")
    run = tmp_path / "run"
    run.mkdir()
    (run / "below").symlink_to(outside)
    folder = Folder(run)
    with pytest.raises(StoreError, match="below is a symbolic link"):
        {
            "write": lambda: folder.write("below/victim", b""),
            "append": lambda: folder.append("below/victim", b"x"),
            "remove": lambda: folder.remove("below/victim"),
            "make": lambda: folder.make("below"),
        }[act]()
    assert (outside / "victim").read_text() == "mine"
    assert [path.name for path in outside.iterdir()] == ["victim"]


def test_the_path_that_a_user_chose_may_lead_through_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    Folder(tmp_path / "link").write("below/file", b"x")
    assert (tmp_path / "real" / "below" / "file").read_bytes() == b"x"


def test_a_lock_is_not_made_through_a_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "made")
    with (
        pytest.raises(StoreError),
        explained(tmp_path),
        Folder(tmp_path / "run").locked(),
    ):
        pass
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "folder"])
def test_only_regular_files_are_read(tmp_path, kind):
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(file)


def moved(run):
    run.rename(run.with_name("moved"))


def deleted(run):
    shutil.rmtree(run)


def replaced(run):
    moved(run)
    run.mkdir()
    (run / ".lock").touch()


def lock_deleted(run):
    (run / ".lock").unlink()


def lock_replaced(run):
    lock_deleted(run)
    (run / ".lock").touch()


@pytest.mark.parametrize(
    "change",
    [moved, deleted, replaced, lock_deleted, lock_replaced],
    ids=lambda change: change.__name__,
)
def test_a_directory_that_is_held_is_missed(tmp_path, change):
    run = tmp_path / "run"
    run.mkdir()
    folder = Folder(run)
    with folder.locked():
        folder.write("file", b"one")
        change(run)
        before = sorted(tmp_path.rglob("*"))
        for act in (folder.write, folder.append):
            with pytest.raises(StoreError, match="was moved, deleted or replaced during the run"):
                act("file", b"two")
        assert sorted(tmp_path.rglob("*")) == before


def test_what_is_written_goes_to_the_locked_directory(tmp_path, monkeypatch):
    """Even if it is replaced between the look at it and the write."""
    run = tmp_path / "run"
    run.mkdir()
    folder = Folder(run)
    with folder.locked():
        monkeypatch.setattr(folder, "check_in_place", lambda: None)
        replaced(run)
        folder.write("below/file", b"two")
    assert (tmp_path / "moved" / "below" / "file").exists()
    assert [path.name for path in run.iterdir()] == [".lock"]
