"""Damage, edits and races in a run directory: all are noticed, and nothing is written outside."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fedproto.store.run
from fedproto.cli import main
from fedproto.config.recipe import expand
from fedproto.disk.integrity import sealed
from fedproto.errors import StoreError
from fedproto.store import RunStore, read_description
from fedproto.store.sweeps import create_sweep, open_runs
from helpers import simulate
from run_directories import snapshot, tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("integrity") / "run"
    simulate([RunStore.create(path, tiny(store={"keep": 0}))])
    return path


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def unfinished(run) -> Path:
    """The same run, stopped after its second round."""
    keep_rounds(run, 2)
    return run


def keep_rounds(run: Path, rounds: int) -> None:
    lines = (run / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (run / "rounds.jsonl").write_bytes(b"".join(lines[:rounds]))
    for path in sorted((run / "checkpoints").iterdir())[rounds:]:
        path.unlink()


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def rewritten(run: Path, change) -> None:
    """Changes a checkpoint and keeps what it says about itself."""
    path = newest(run)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    about = json.loads(metadata["fedproto"])
    change(tensors, about)
    save_file(tensors, path, {"fedproto": json.dumps(about)})


def swap(tensors, about):
    del about
    names = [name for name, tensor in tensors.items() if tensor.dim() == 2]
    one, other = next(
        (one, other)
        for one in names
        for other in names
        if one < other and tensors[one].shape == tensors[other].shape
    )
    tensors[one], tensors[other] = tensors[other], tensors[one]


def not_a_number(tensors, about):
    del about
    tensors[min(tensors)].view(-1)[0] = torch.nan


def other_dtype(tensors, about):
    del about
    tensors[min(tensors)] = tensors[min(tensors)].double()


def renamed(tensors, about):
    del about
    tensors["params/other"] = tensors.pop(min(tensors))


def other_round(tensors, about):
    del tensors
    about["round"] = 1


def without_fingerprint(tensors, about):
    tensors[min(tensors)].mul_(2)
    del about["hash"]


def as_if_older(tensors, about):
    without_fingerprint(tensors, about)
    about["format"] = 1


@pytest.mark.parametrize(
    "change",
    [not_a_number, other_dtype, renamed, other_round, without_fingerprint, as_if_older],
    ids=lambda change: change.__name__,
)
def test_a_changed_checkpoint_is_not_believed(unfinished, change):
    rewritten(unfinished, change)
    before = snapshot(unfinished)
    with pytest.raises(StoreError, match=r"damaged|cannot be read"):
        simulate([RunStore.open(unfinished)])
    assert snapshot(unfinished) == before


def test_swapped_tensors_are_noticed(tmp_path):
    store = RunStore.create(tmp_path / "run", tiny())
    state = fedproto.types.ServerState(1, {"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}, {})
    store.save_checkpoint(state)
    rewritten(store.path, swap)
    with pytest.raises(StoreError, match="is damaged"):
        store.load_checkpoint()


def test_a_checkpoint_under_another_rounds_name_is_noticed(unfinished):
    path = newest(unfinished)
    path.rename(path.with_name("round-000001.safetensors"))
    with pytest.raises(StoreError, match="has a name of another round"):
        RunStore.open(unfinished).load_checkpoint()


def test_no_flipped_bit_of_a_checkpoint_is_accepted(unfinished):
    path, store = newest(unfinished), RunStore.open(unfinished)
    content = path.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 400)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            store.load_checkpoint()


def edit_metric(lines):
    lines[0]["metrics"]["loss"] += 0.01


def edit_seconds(lines):
    lines[0]["seconds"] += 1


def edit_attention(lines):
    lines[1]["attention"][next(iter(lines[1]["attention"]))] = 0.9


def swap_lines(lines):
    lines[0], lines[1] = lines[1], lines[0]


def strip_fingerprints(lines):
    for line in lines:
        line.pop("hash")
    lines[0]["metrics"]["loss"] = 0.0


@pytest.mark.parametrize(
    "edit",
    [edit_metric, edit_seconds, edit_attention, swap_lines, strip_fingerprints],
    ids=lambda edit: edit.__name__,
)
def test_an_edited_record_shows(unfinished, edit):
    file = unfinished / "rounds.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    edit(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = snapshot(unfinished)
    with pytest.raises(StoreError, match=r"is damaged|out of order"):
        simulate([RunStore.open(unfinished)])
    assert snapshot(unfinished) == before


@pytest.mark.parametrize(
    "line",
    [
        '{"round": 0, "metrics": {"loss": NaN}}',
        '{"round": 0}',
        "[]",
        "[" * 100_000,
        '{"round": 0, "cohort": 5, "stragglers": [], "dropped": [], "epochs": {}, "attention": {},'
        ' "metrics": {}, "bytes_down": 0, "bytes_up": 0, "seconds": 0.1}',
        '{"round": 0, "cohort": [], "stragglers": [], "dropped": [], "epochs": {}, "attention": {},'
        ' "metrics": {"loss": 1' + "0" * 400 + '}, "bytes_down": 0, "bytes_up": 0, "seconds": 0.1}',
    ],
    ids=["nan", "short", "list", "nested", "kind", "huge"],
)
def test_what_is_no_record_is_named_at_a_report(run, line, capsys):
    (run / "rounds.jsonl").write_text(line + "\n")
    assert main(["report", str(run)]) == 2
    assert "rounds.jsonl line 1 is damaged" in capsys.readouterr().err


def as_format_1(run: Path) -> None:
    """The directory as versions before the fingerprints wrote it."""
    description = read_description(run) | {"format": 1}
    (run / "run.json").write_text(json.dumps(description, indent=2))
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("hash")
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in (run / "checkpoints").iterdir():
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["fedproto"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        kept = {"format": 1, "round": about["round"], "digest": about["digest"]}
        save_file(tensors, path, {"fedproto": json.dumps(kept)})


def test_directories_without_fingerprints_are_read(whole, unfinished, tmp_path, capsys):
    whole = Path(shutil.copytree(whole, tmp_path / "whole"))
    as_format_1(whole)
    as_format_1(unfinished)
    assert len(RunStore.open(whole).records()) > len(RunStore.open(unfinished).records())
    assert RunStore.open(unfinished).load_checkpoint() is not None
    assert main(["check", str(unfinished)]) == 0
    assert "begun without fingerprints" in capsys.readouterr().out
    assert main(["resume", str(whole), "--quiet"]) == 0
    assert main(["resume", str(unfinished), "--quiet"]) == 2
    assert "it can be read, but not continued" in capsys.readouterr().err


def to_a_file(folder):
    shutil.rmtree(folder)
    folder.write_text("")


def to_a_loop(folder):
    shutil.rmtree(folder)
    folder.symlink_to(folder)


@pytest.mark.parametrize("hide", [to_a_file, to_a_loop], ids=lambda hide: hide.__name__)
def test_unreadable_checkpoints_are_not_taken_for_absent_ones(unfinished, hide):
    hide(unfinished / "checkpoints")
    before = (unfinished / "rounds.jsonl").read_bytes()
    with pytest.raises(StoreError, match="checkpoints"):
        simulate([RunStore.open(unfinished)])
    assert (unfinished / "rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize("blocked", ["checkpoints", "rounds.jsonl", "run.json"])
def test_missing_permissions_are_named_and_nothing_is_lost(unfinished, blocked, monkeypatch):
    before = snapshot(unfinished)

    def refusing(method):
        def call(self, *args, **kwargs):
            if blocked in self.parts:
                raise PermissionError(13, "Permission denied", str(self))
            return method(self, *args, **kwargs)

        return call

    opened = os.open

    def opening(path, *args, **kwargs):
        return refusing(lambda _: opened(path, *args, **kwargs))(Path(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opening)
        for name in ("iterdir", "read_bytes", "stat", "open"):
            patch.setattr(Path, name, refusing(getattr(Path, name)))
        with pytest.raises(StoreError, match=f"{blocked}.*: Permission denied"):
            simulate([RunStore.open(unfinished)])
    assert snapshot(unfinished) == before


def test_of_two_processes_that_start_at_once_one_is_turned_away(tmp_path, monkeypatch):
    """The first is held where it looked at the directory and wrote nothing; the second overtakes.

    It would both begin and end, were there nothing of the first one's to see.
    """
    looked, overtaken = threading.Event(), threading.Event()

    def hold_the_first():
        if not looked.is_set():
            looked.set()
            overtaken.wait(timeout=1)
        return {}

    monkeypatch.setattr(fedproto.store.run, "describe_environment", hold_the_first)
    outcomes = []

    def create():
        try:
            RunStore.create(tmp_path / "run", tiny())
            outcomes.append("created")
        except StoreError as error:
            outcomes.append(str(error))

    first, second = (threading.Thread(target=create) for _ in range(2))
    first.start()
    assert looked.wait(timeout=30)
    second.start()
    second.join(timeout=0.5)
    overtaken.set()
    first.join()
    second.join()
    assert sorted(outcome == "created" for outcome in outcomes) == [False, True]
    assert any("holds a run already" in outcome for outcome in outcomes)


def test_a_lock_outlives_the_description(tmp_path):
    """Whoever puts another run.json in the place of this one still finds the directory locked."""
    store = RunStore.create(tmp_path / "run", tiny())
    content = (store.path / "run.json").read_bytes()
    with store.folder.locked():
        (store.path / "run.json").unlink()
        (store.path / "run.json").write_bytes(content)
        with pytest.raises(StoreError, match="in use by another process"):
            simulate([RunStore.open(store.path)])


@pytest.mark.parametrize("name", ["../../x", "..", ".", "", "a/b", "/tmp/x", "a\\b", "a\0b"])
def test_a_sweep_cannot_name_a_run_outside_itself(tmp_path, name):
    sweep = tmp_path / "deep" / "sweep"
    sweep.mkdir(parents=True)
    (sweep / "sweep.json").write_bytes(sealed({"runs": {name: tiny().to_dict()}}))
    before = snapshot(tmp_path)
    with pytest.raises(StoreError, match="a run cannot be called"):
        open_runs(sweep)
    with pytest.raises(StoreError, match="a run cannot be called"):
        create_sweep(tmp_path / "other", {name: tiny()})
    assert snapshot(tmp_path) == before


def test_an_edited_list_of_runs_shows(tmp_path):
    create_sweep(tmp_path, {"one": tiny(seed=1)})
    file = tmp_path / "sweep.json"
    file.write_text(file.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(StoreError, match="was changed after it was written"):
        open_runs(tmp_path)


LABELS = ["実験", "Ünder", "Проба 2", "🎉", "..", "/", "a" * 400, "../../x"]


@pytest.mark.parametrize("label", LABELS, ids=range(len(LABELS)))
def test_any_label_names_a_folder_of_the_sweep(tmp_path, label):
    tables = tiny().to_dict() | {"label": label}
    ((name, config),) = expand(tables).items()
    (store,) = create_sweep(tmp_path / "sweep", {name: config})
    assert store.path.parent == tmp_path / "sweep"
    assert store.path.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["sweep"]


def test_labels_in_other_scripts_stay_readable():
    tables = tiny().to_dict() | {"variants": [{"label": "実験 1"}, {"label": "Ünder_über"}]}
    assert list(expand(tables)) == ["実験-1", "ünder-über"]


def test_check_says_that_all_is_whole(whole, capsys):
    before = snapshot(whole)
    assert main(["check", str(whole)]) == 0
    assert "OK (3 rounds, 3 checkpoints)" in capsys.readouterr().out
    assert snapshot(whole) == before


def test_check_says_what_can_be_saved_and_it_can(whole, run, capsys):
    newest(run).write_bytes(newest(run).read_bytes()[:-1] + b"x")
    assert main(["check", str(run)]) == 1
    said = capsys.readouterr().out
    assert "round-000003.safetensors is damaged" in said
    assert f"delete round-000003.safetensors from checkpoints; then 'fedproto resume {run}'" in said
    assert "continues from round 2" in said
    newest(run).unlink()
    assert main(["resume", "-q", str(run)]) == 0
    assert newest(run).read_bytes() == newest(whole).read_bytes()


def test_check_names_a_damaged_record_and_the_lines_before_it(run, capsys):
    file = run / "rounds.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b'"loss": ', b'"loss": 1') + lines[2])
    assert main(["check", str(run)]) == 1
    said = capsys.readouterr().out
    assert "line 2 is damaged: it was changed after it was written" in said
    assert "keep the first 1 lines of rounds.jsonl alone" in said
    assert "continues from round 1" in said


def test_check_reads_what_clients_kept(tmp_path, capsys):
    store = RunStore.create(tmp_path / "run", tiny(strategy={"name": "scaffold"}))
    simulate([store])
    assert main(["check", str(store.path)]) == 0
    file = sorted((store.path / "clients").rglob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["check", str(store.path)]) == 1
    said = capsys.readouterr().out
    assert f"{file} is damaged: its content does not match its fingerprint; restore" in said
    assert "recoverable: records and checkpoints" in said


def test_check_reads_what_a_deployment_and_a_sweep_have_beside_their_runs(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    simulate(create_sweep(sweep, {"one": tiny(seed=1), "two": tiny(seed=2)}))
    (sweep / "clients.json").write_bytes(sealed({"data": []}))
    assert main(["check", str(tmp_path)]) == 0
    assert f"{sweep}: OK (a list of runs, 2 of them started)" in capsys.readouterr().out
    for name, old, new in (
        ("clients.json", "[]", "[1]"),
        ("sweep.json", '"seed": 1', '"seed": 3'),
    ):
        file = sweep / name
        text = file.read_text()
        file.write_text(text.replace(old, new))
        assert main(["check", str(sweep)]) == 1
        said = capsys.readouterr().out
        assert f"{file}" in said
        assert f"{sweep}: damaged" in said
        assert f"{sweep / 'two'}: OK" in said
        file.write_text(text)


def test_check_looks_through_whole_folders(whole, tmp_path, capsys):
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / name)
    (tmp_path / "b" / "run.json").write_text("{")
    assert main(["check", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path / 'a'}: OK" in said
    assert f"{tmp_path / 'b'}: damaged" in said
