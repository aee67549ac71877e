"""Damaged recipes, run directories, data files and archives: never a traceback, never believed.

A few dozen cases a target here; ``make fuzz`` tries ten thousand, other ones every time. What it
finds becomes an `example` below.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from data_files import idx_bytes, image_bytes
from fedproto.config import read_config
from fedproto.config.recipe import apply_overrides, bundled_recipes, expand, read_recipe
from fedproto.data.base import DATASETS, prepared
from fedproto.data.files import FileTree
from fedproto.data.segmentation import read_mask
from fedproto.errors import FedprotoError
from fedproto.options import describe
from fedproto.rounds import load_federations
from fedproto.store import RunStore
from fedproto.store.checking import check_run
from fuzzing import ODD, damaged, damages, fuzzed
from helpers import same_tensors, simulate
from run_directories import snapshot, tiny

RECIPES = {name: path.read_text() for name, path in bundled_recipes().items()}
OPTIONS = sorted(
    {
        f"{section}.{name}"
        for section, table in read_config(tomllib.loads(RECIPES["quickstart"])).to_dict().items()
        if isinstance(table, dict)
        for name in table
    }
    | {
        f"data.{option.name}"
        for name in DATASETS.names()
        for option in describe(DATASETS.get(name))
    }
    | {"seed", "label", "sweep.seed", "variants", "sweep", "data", "strategy.name", "data.name"}
)


@fuzzed
@given(name=st.sampled_from(sorted(RECIPES)), changes=damages())
@example(name="quickstart", changes=[("end", 0.0, 0, b""), ("insert", 0, 0, b"a = " + b"[" * 5000)])
@example(name="quickstart", changes=[("end", 0.0, 0, b""), ("insert", 0, 0, b"a = " + b"9" * 5000)])
def test_damaged_recipes(fuzz_folder, name, changes):
    path = fuzz_folder / "recipe.toml"
    path.write_bytes(damaged(RECIPES[name].encode(), changes))
    with contextlib.suppress(FedprotoError):
        for config in read_recipe(str(path)).values():
            assert read_config(config.to_dict()) == config


@fuzzed
@given(settings_=st.dictionaries(st.sampled_from(OPTIONS), ODD, min_size=1, max_size=3))
@example(settings_={"train.lr": 10**400})
@example(settings_={"data.seed": 2**32})
@example(settings_={"engine.device": "mps"})
def test_odd_options(settings_):
    recipe = tomllib.loads(RECIPES["quickstart"])
    with contextlib.suppress(FedprotoError):
        recipe = apply_overrides(recipe, [])
        for key, value in settings_.items():
            section, _, option = key.rpartition(".")
            table = recipe.setdefault(section, {}) if section else recipe
            if isinstance(table, dict):
                table[option] = value
        for config in expand(recipe).values():
            assert read_config(json.loads(json.dumps(config.to_dict()))) == config
            small = config.data is not None and getattr(config.data, "clients", 1) <= 50
            if small and getattr(config.model, "hidden", 1) <= 64:
                load_federations([config])


TABLES = st.dictionaries(
    st.sampled_from(["strategy", "data", "model", "train", "label", "seed", "name", "schedule"]),
    ODD | st.dictionaries(st.sampled_from(["name", "lr", "path", "clients"]), ODD, max_size=2),
    max_size=3,
)


@fuzzed
@given(
    variants=ODD | st.lists(TABLES, max_size=3),
    sweep=ODD | st.dictionaries(st.sampled_from(OPTIONS), ODD | st.lists(ODD, max_size=3)),
    extends=st.sampled_from(["quickstart", "demo"]) | ODD,
)
@example(variants=[{"strategy": {"name": ["x"]}}], sweep={}, extends="quickstart")
@example(variants=[], sweep={"seed": [1, [2]], "data.name": [{}]}, extends="x" * 5000)
def test_recipes_of_odd_types(fuzz_folder, variants, sweep, extends):
    """What TOML can hold, in the places of tables, lists and names."""
    path = fuzz_folder / "odd.toml"
    tables = {"extends": extends, "variants": variants, "sweep": sweep}
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in tables.items()))
    with contextlib.suppress(FedprotoError):
        for config in read_recipe(str(path)).values():
            assert read_config(config.to_dict()) == config


def toml(value) -> str:
    """A value as TOML writes it; strings as in JSON, which are a part of its own."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value).replace("\x7f", "\\u007f")


@pytest.fixture(scope="module")
def fuzz_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDPROTO_CACHE", str(folder / "cache"))
        patch.setenv("FEDPROTO_LIMITS", "file=1e7 pixels=1e6")
        yield folder


@pytest.fixture(scope="module")
def whole(fuzz_folder):
    path = fuzz_folder / "run"
    simulate([RunStore.create(path, tiny())])
    return (
        path,
        snapshot(path),
        RunStore.open(path).records(),
        RunStore.open(path).load_checkpoint(),
    )


FILES = ["run.json", "rounds.jsonl", "checkpoints/round-000003.safetensors"]


@fuzzed
@given(name=st.sampled_from(FILES), changes=damages())
def test_damaged_run_directories(whole, name, changes):
    path, before, records, state = whole
    file = path / name
    try:
        file.write_bytes(damaged(before[file], changes))
        with contextlib.suppress(FedprotoError):
            store = RunStore.open(path)
            assert store.config == tiny()
            # A last line cut short is what a kill leaves; nothing else may be missing or other.
            found = store.records()
            assert found == records[: len(found)]
            again = store.load_checkpoint()
            assert again.round == state.round
            assert same_tensors(again.params, state.params)
            assert same_tensors(again.buffers, state.buffers)
        with contextlib.suppress(FedprotoError):
            check_run(path)
    finally:
        file.write_bytes(before[file])
    assert snapshot(path) == before


def zipped(members) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def tarred(members, mode) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


MEMBERS = {"a/one.txt": b"one" * 50, "a/two.gz": b"\x1f\x8b", "three": bytes(300)}
ARCHIVES = {
    "x.zip": zipped(MEMBERS),
    "x.tar": tarred(MEMBERS, "w"),
    "x.tar.gz": tarred(MEMBERS, "w:gz"),
    "x.tgz": tarred(MEMBERS, "w:xz"),
}


@fuzzed
@given(name=st.sampled_from(sorted(ARCHIVES)), changes=damages())
def test_damaged_archives(fuzz_folder, name, changes):
    folder = fuzz_folder / "archive"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(damaged(ARCHIVES[name], changes))
    tree = FileTree(folder, {name: path})
    with contextlib.suppress(FedprotoError):
        for member in tree.locations:
            assert ".." not in Path(member).parts
            assert not Path(member).is_absolute()
        for _, content in tree.read_all(tree.locations):
            assert len(content) <= 10**7
    assert [each.name for each in folder.iterdir()] == [name]
    path.unlink()


def write_data(root: Path) -> dict[str, tuple[dict, list[Path]]]:
    """Small files of every format: how to load them, and which to damage."""
    rng = np.random.RandomState(0)
    labels = np.repeat(np.arange(10), 6)
    raw = root / "MNIST"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = rng.randint(0, 256, (len(labels), 4, 4))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    pictures = root / "pictures"
    for number in range(8):
        name = f"{number}.{'png' if number % 2 else 'bmp'}"
        picture = rng.randint(0, 256, (4, 4, 3)).astype(np.uint8)
        (pictures / str(number % 2)).mkdir(parents=True, exist_ok=True)
        (pictures / str(number % 2) / name).write_bytes(image_bytes(picture, name[-3:].upper()))
    images = {"name": "images", "path": str(pictures), "size": 4, "clients": 2}
    return {
        "mnist": ({"name": "mnist", "clients": 2}, sorted(raw.iterdir())),
        "images": (images, sorted(pictures.glob("*/*"))),
    }


@pytest.fixture(scope="module")
def data_sets(fuzz_folder):
    return write_data(fuzz_folder / "data")


@fuzzed
@given(name=st.sampled_from(["mnist", "images"]), which=st.integers(0, 8), changes=damages())
def test_damaged_data_files(fuzz_folder, data_sets, name, which, changes):
    options, files = data_sets[name]
    file = files[which % len(files)]
    before = file.read_bytes()
    source = DATASETS.get(options["name"])(**{k: v for k, v in options.items() if k != "name"})
    try:
        file.write_bytes(damaged(before, changes))
        with contextlib.suppress(FedprotoError):
            federation = source.load(fuzz_folder / "data")
            inputs, targets = federation.samples.batch(np.arange(len(federation.samples)))
            assert torch.isfinite(inputs).all()
            assert 0 <= int(targets.min()) <= int(targets.max()) < federation.num_classes
    finally:
        file.write_bytes(before)
        shutil.rmtree(fuzz_folder / "cache", ignore_errors=True)


MASK = image_bytes(np.arange(64, dtype=np.uint8).reshape(8, 8) % 3)


@fuzzed
@given(changes=damages())
def test_damaged_label_maps(changes):
    with contextlib.suppress(FedprotoError):
        assert set(np.unique(read_mask(damaged(MASK, changes), "mask", 3))) <= {0, 1, 2, 255}


@fuzzed
@given(changes=damages())
def test_damaged_prepared_arrays(fuzz_folder, changes):
    values = np.arange(50)
    arrays = prepared("fuzz", {}, {}, lambda builder: builder.put("values", values))
    assert np.array_equal(arrays["values"], values)
    (path,) = (fuzz_folder / "cache").glob("fuzz-*/values.npy")
    content = damaged(path.read_bytes(), changes)
    path.unlink()  # another file, so that what is mapped now stays as it is
    path.write_bytes(content)
    again = prepared("fuzz", {}, {}, lambda builder: builder.put("values", values))
    assert np.array_equal(again["values"], values)
