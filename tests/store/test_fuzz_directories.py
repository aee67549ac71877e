"""Run directories of strangers with right fingerprints, links and pipes: no traceback, no trace.

A few dozen cases a target here; ``make fuzz`` tries ten thousand.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fedproto
from fedproto.cli import main
from fedproto.config import digest_of
from fedproto.disk.integrity import sealed, unsealed
from fedproto.errors import FedprotoError
from fedproto.store import RunStore
from fedproto.store.checkpoints import read_tensors, tensors_file
from fedproto.store.sweeps import create_sweep
from fuzzing import CASES, ODD, fuzzed
from helpers import simulate
from run_directories import snapshot, tiny


def two_of_three_rounds(path: Path, **sections) -> None:
    """A run whose last round is still to be done."""
    store = RunStore.create(path, tiny(schedule={"rounds": 3, "cohort": 2}, **sections))
    simulate([store])
    lines = (path / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (path / "rounds.jsonl").write_bytes(b"".join(lines[:2]))
    (path / "checkpoints" / "round-000003.safetensors").unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of four rounds with two done, and what must not change outside of it."""
    folder = tmp_path_factory.mktemp("directories")
    two_of_three_rounds(folder / "whole")
    outside = folder / "outside"
    outside.mkdir()
    for name in ("README.md", "round-000001.safetensors", "measures.json"):
        (outside / name).write_text("mine")
    return folder


def quietly(*arguments):
    """A command whose output does not matter; a mistake of a user's is not a traceback."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(list(map(str, arguments))) in (0, 1, 2)


def places(value, path=()):
    """The places in nested tables and lists."""
    yield path
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from places(inner, (*path, key))


def changed(value, where, new):
    """Nested tables with another value in some place."""
    found = copy.deepcopy(value)
    options = [path for path in places(found) if path]
    *above, last = options[where % len(options)]
    inner = found
    for key in above:
        inner = inner[key]
    inner[last] = new
    return found


VALUES = ODD | st.sampled_from([None, "\x1b[2J", "../../x", "[/]", "=1", 1e308, [[]], {"name": []}])


@fuzzed
@given(where=st.integers(0, 10_000), new=VALUES, redigest=st.booleans())
@example(where=0, new="\ud800", redigest=True)
@example(where=1, new={"strategy": {"name": []}}, redigest=True)
def test_descriptions_with_right_fingerprints(folder, where, new, redigest):
    run = folder / "described"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "whole", run)
    tables = changed(unsealed((run / "run.json").read_bytes()), where, new)
    with contextlib.suppress(TypeError, AttributeError, FedprotoError):
        if redigest:
            tables["digest"] = digest_of(tables["config"])
    try:
        text = sealed(tables)
    except ValueError:  # what is no number of JSON
        text = json.dumps(tables).encode()
    (run / "run.json").write_bytes(text)
    for command in (["compare"], ["check"], ["report"], ["export"]):
        quietly(*command, run)
    with contextlib.suppress(FedprotoError):
        fedproto.load(run)


@fuzzed
@given(line=st.integers(0, 1), where=st.integers(0, 500), new=VALUES)
@example(line=0, where=0, new=0.5)
def test_records_with_right_fingerprints(folder, line, where, new):
    run = folder / "recorded"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "whole", run)
    lines = (run / "rounds.jsonl").read_bytes().splitlines()
    record = changed(unsealed(lines[line]), where, new)
    with contextlib.suppress(ValueError):  # what is no number of JSON cannot be written at all
        lines[line] = sealed(record, None).rstrip()
    (run / "rounds.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    for command in (["compare"], ["check"], ["report"]):
        quietly(*command, run)


@fuzzed
@given(where=st.integers(0, 500), new=VALUES)
def test_analyses_of_strangers(folder, where, new):
    run = folder / "analysed"
    if not run.exists():
        shutil.copytree(folder / "whole", run)
        quietly("analyse", run)
    kept = folder / "analysis"
    if not kept.exists():
        shutil.copytree(run / "analysis", kept)
    for file in kept.glob("*.json"):
        found = changed(json.loads(file.read_text()), where, new)
        (run / "analysis" / file.name).write_text(json.dumps(found))
    quietly("report", run)


REMEMBERED = {
    "strategy": {"name": "ditto"},
    "data": {"name": "digits", "clients": 12, "validation": 0.2},
    "serve": {"average": "ema", "also": ["average=window"]},
    "store": {"best": True},
}
"""Clients, the served model and others beside it, and the best one have files or tensors."""

TENSORS = {
    "integers": torch.Tensor.long,
    "doubles": torch.Tensor.double,
    "flat": torch.Tensor.flatten,
    "longer": lambda one: one.flatten().repeat(2),
    "empty": lambda one: one.flatten()[:0],
    "number": torch.Tensor.sum,
    "not a number": lambda one: torch.full_like(one.float(), torch.nan),
    "huge": lambda one: torch.full_like(one.float(), 1e38),
}
GONE, RENAMED = "gone", "renamed"


@fuzzed
@given(
    kind=st.sampled_from(["checkpoints/round-*", "checkpoints/best*", "clients/*/*"]),
    which=st.integers(0, 20),
    tensors=st.dictionaries(
        st.integers(0, 100), st.sampled_from([GONE, RENAMED, *TENSORS]), max_size=3
    ),
    about=st.dictionaries(st.sampled_from(["round", "digest", "client"]), VALUES, max_size=1),
    command=st.sampled_from([["resume", "-q"], ["export"], ["export", "--best"], ["check"]]),
)
@example(  # half of an averaged model
    kind="checkpoints/round-*", which=0, tensors={6: GONE}, about={}, command=["resume", "-q"]
)
@pytest.mark.timeout(max(300, CASES))
def test_tensors_with_right_fingerprints(folder, kind, which, tensors, about, command):
    """Checkpoints, the best model and what clients kept."""
    if not (folder / "remembered").exists():
        two_of_three_rounds(folder / "remembered", **REMEMBERED)
    run = folder / "tensors"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "remembered", run)
    files = sorted(run.glob(kind))
    file = files[which % len(files)]
    told, found = read_tensors(file)
    names = sorted(found)
    for place, change in tensors.items():
        name = names[place % len(names)]
        one = found.pop(name, None)
        if one is not None and change != GONE:
            found[name + "/x" * (change == RENAMED)] = TENSORS.get(change, torch.clone)(one)
    file.write_bytes(tensors_file(found, told | about))
    quietly(command[0], run, *command[1:])


@fuzzed
@given(where=st.integers(0, 10_000), new=VALUES)
def test_sweeps_with_right_fingerprints(folder, where, new):
    sweep = folder / "sweep"
    if not sweep.exists():
        simulate(create_sweep(sweep, {"a": tiny(), "b": tiny(seed=1)}))
        shutil.copy(sweep / "sweep.json", folder / "sweep.json")
    tables = changed(unsealed((folder / "sweep.json").read_bytes()), where, new)
    with contextlib.suppress(ValueError):  # what is no number of JSON cannot be written at all
        (sweep / "sweep.json").write_bytes(sealed(tables))
    for command in (["compare"], ["check"], ["report"]):
        quietly(*command, sweep)


NAMES = [
    ".lock", "run.json", "rounds.jsonl", "report.html", "report.html.partial", "run.json.partial",
    "rounds.jsonl.partial", "checkpoints", "checkpoints/round-000003.safetensors",
    "checkpoints/round-000001.safetensors", "checkpoints/x.partial", "clients", "analysis",
    "analysis/measures.json", "analysis/maps", "export", "export/README.md",
    "export/model.safetensors", "figures/accuracy.png", "nodes",
]  # fmt: skip
KINDS = [
    "link to a file", "link to a folder", "link to nothing", "link to itself", "pipe", "zeros",
]  # fmt: skip
COMMANDS = ["resume", "report", "export", "analyse", "check", "compare"]


def plant(path: Path, kind: str, outside: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
        return
    path.symlink_to(
        {
            "link to a file": outside / "README.md",
            "link to a folder": outside,
            "link to nothing": outside / "nothing",
            "link to itself": path,
            "zeros": Path("/dev/zero"),
        }[kind]
    )


# A case trains a round or two; so there are fewer of them.
@fuzzed
@given(
    planted=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(KINDS), min_size=1, max_size=2),
    command=st.sampled_from(COMMANDS),
)
@example(planted={"checkpoints": "link to a folder"}, command="resume")
@example(planted={"report.html.partial": "link to a file"}, command="report")
@example(planted={"rounds.jsonl": "pipe"}, command="resume")
@example(planted={"rounds.jsonl": "zeros"}, command="check")
@example(planted={"run.json": "pipe"}, command="compare")
@example(planted={"analysis/measures.json": "pipe"}, command="report")
@example(planted={"checkpoints/round-000001.safetensors": "pipe"}, command="check")
@pytest.mark.timeout(max(300, CASES))
def test_links_and_pipes(folder, planted, command):
    run = folder / "linked"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(folder / "whole", run)
    before = snapshot(folder / "outside")
    for name, kind in sorted(planted.items(), reverse=True):  # what is inside comes first
        with contextlib.suppress(OSError):
            plant(run / name, kind, folder / "outside")
    more = {"compare": ["--plots", run / "figures"], "resume": ["-q"]}
    quietly(command, run, *more.get(command, []))
    assert snapshot(folder / "outside") == before
