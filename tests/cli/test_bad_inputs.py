"""Inputs that once ended in a traceback or were accepted without a word: each is named instead."""

from __future__ import annotations

import contextlib
import gzip
import zipfile

import numpy as np
import pytest
import torch

import fedproto
from data_files import idx_bytes, image_bytes, write_mnist, write_tar, write_zip
from fedproto.cli import main
from fedproto.config import read_config
from fedproto.config.recipe import read_recipe
from fedproto.data.federation import Federation
from fedproto.disk.files import VARIABLE
from fedproto.errors import ConfigError, DataError
from fedproto.models.mobilenet import load_pretrained
from fedproto.rounds import load_federations
from run_directories import TINY

HUGE = 10**400


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))


def loaded(**data):
    model = {"name": "mlp", "hidden": 4, "features": 4}
    schedule = {"rounds": 1, "cohort": 1}
    config = read_config(TINY | {"data": data, "model": model, "schedule": schedule})
    return load_federations([config])


@pytest.mark.parametrize(
    "setting",
    [
        f"train.lr={HUGE}",
        "train.lr=" + "1" * 5000,
        "data.seed=4294967296",
        "engine.device=mps",
        "engine.device=xpu",
        "engine.device=meta",
        "model.hidden=100000000000",
        "data.clients=100000000000000",
        "label=" + "[" * 5000 + " schedule.rounds=1",
        f"model.hidden={2**63}",
        f"train.batch_size={10**30}",
        "data.name=shapes data.alpha=1e308",
        "data.name=shapes data.alpha=1e-320",
        "strategy.name=fedatt strategy.epsilon=1e308",
        "data.name=shapes data.images=9223372036854775807",
        f"data.name=synthetic data.clients={2**63 - 1}",
        "data.name=images data.path=" + "x" * 5000,
        "data.name=images data.path=~nobody-here/x",
        "strategy.name=[]",
        "serve.average=window serve.window=9000000000000000000",
        "strategy.name=ghbm strategy.tau=9000000000000000000",
    ],
    ids=lambda setting: setting[:24],
)
def test_impossible_settings_are_named(tmp_path, setting, capsys):
    settings = [f"--set={each}" for each in setting.split(" ")]
    code = main(["run", "quickstart", "--out", str(tmp_path / "run"), *settings])
    said = capsys.readouterr().err
    if setting.startswith("label"):
        return  # a strange label is a label; it must not crash
    assert code == 2
    assert said.startswith("error: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "\x00", "[a]\n[a]"])
def test_texts_that_are_no_recipe_are_named(tmp_path, text):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(str(tmp_path / "recipe.toml"))


def encrypted(path):
    write_zip(path, {"train-images-idx3-ubyte": b"content"})
    content = bytearray(path.read_bytes())
    for header, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(header) + flags] |= 1
    path.write_bytes(content)


def packed_in_an_unknown_way(path):
    write_zip(path, {"train-images-idx3-ubyte": b"content"})
    content = bytearray(path.read_bytes())
    for header, method in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.index(header) + method] = 77
    path.write_bytes(content)


def corrupt_xz(path):
    write_tar(path, {"a/one.txt": bytes(1000)}, "w:xz")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("mnist.zip", encrypted),
        ("mnist.zip", packed_in_an_unknown_way),
        ("mnist.tar", corrupt_xz),
    ],
    ids=["encrypted", "unknown", "xz"],
)
def test_archives_that_cannot_be_unpacked_are_named(tmp_path, name, damage):
    folder = tmp_path / "MNIST"
    folder.mkdir()
    damage(folder / name)
    with pytest.raises(DataError, match=name):
        loaded(name="mnist", clients=2)
    assert main(["data", "check", "mnist"]) != 0


@pytest.mark.parametrize("kind", ["gz", "zip", "tar.gz"])
def test_a_small_file_does_not_become_a_huge_one(tmp_path, kind, monkeypatch):
    """Ten kilobytes that become ten megabytes, with a limit of one."""
    monkeypatch.setenv(VARIABLE, "file=1e6")
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    name, bomb = "train-images-idx3-ubyte", bytes(10_000_000)
    if kind == "gz":
        (folder / f"{name}.gz").write_bytes(gzip.compress(bomb))
    elif kind == "zip":
        with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, bomb)
    else:
        write_tar(folder / "all.tar.gz", {name: bomb}, "w:gz")
    with pytest.raises(DataError, match="over the limit of 1,000,000 for 'file'"):
        loaded(name="mnist", clients=2)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("fil=3", "did you mean 'file'?"),
        ("file=many", "limit 'file=many': write it as name=number"),
        ("file=100", "over the limit of 100 for 'file'"),
    ],
)
def test_limits_are_set_and_checked(tmp_path, capsys, monkeypatch, limit, message):
    monkeypatch.setenv("FEDPROTO_LIMITS", limit)
    write_mnist(tmp_path, np.repeat(np.arange(10), 10))
    assert main(["sweep", "mnist", "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(0, 28, 28), (20, 0, 28)])
def test_idx_files_without_an_image_are_named(tmp_path, shape):
    write_mnist(tmp_path, np.repeat(np.arange(10), 10))
    path = tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx_bytes(np.zeros(shape))))
    labels = path.with_name("t10k-labels-idx1-ubyte.gz")
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(shape[0]))))
    with pytest.raises(DataError, match="empty"):
        loaded(name="mnist", clients=2)


def test_celeba_lists_with_names_of_any_script_are_read(tmp_path):
    folder = tmp_path / "celeba"
    names = [f"bild-ü{number}.png" for number in range(12)]
    (folder / "img_align_celeba").mkdir(parents=True)
    (folder / "identity_CelebA.txt").write_text(
        "".join(f"{name} {place // 6}\n" for place, name in enumerate(names))
    )
    (folder / "list_attr_celeba.txt").write_text(
        f"{len(names)}\nSmiling\n"
        + "".join(f"{name} {1 if place % 2 else -1}\n" for place, name in enumerate(names))
    )
    for name in names:
        path = folder / "img_align_celeba" / name
        path.write_bytes(image_bytes(np.zeros((8, 8, 3), dtype=np.uint8)))
    (federation,) = loaded(name="celeba", size=8).values()
    assert len(federation.clients) == 2
    (folder / "identity_CelebA.txt").write_text(f"a.png {10**40}\n")
    with pytest.raises(DataError, match="identity_CelebA"):
        loaded(name="celeba", size=8)


@pytest.mark.parametrize("damage", ["header", "values", "short", "gone"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    write_mnist(tmp_path, np.repeat(np.arange(10), 10))
    (before,) = loaded(name="mnist", clients=2).values()
    everything = np.arange(len(before.samples))
    wanted = before.samples.batch(everything)[0].clone()
    (path,) = (tmp_path / "cache").glob("*/images.npy")
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[12] ^= 255
    elif damage == "values":
        content[-100] ^= 255
    path.unlink()
    if damage != "gone":
        path.write_bytes(content[:-1000] if damage == "short" else content)
    (after,) = loaded(name="mnist", clients=2).values()
    assert torch.equal(after.samples.batch(everything)[0], wanted)


class Stub(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)


def test_damaged_or_broken_pretrained_weights_are_named(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save(Stub().state_dict(), path)
    content = path.read_bytes()
    load_pretrained(Stub(), str(path))
    for place in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[place] ^= 255
        path.write_bytes(damaged)
        with contextlib.suppress(ConfigError):  # damage in unused bytes does no harm
            load_pretrained(Stub(), str(path))
    torch.save({"layer.weight": torch.full((4, 4), torch.nan), "layer.bias": torch.ones(4)}, path)
    with pytest.raises(ConfigError, match=r"'layer.weight' contains NaN"):
        load_pretrained(Stub(), str(path))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_no_numbers_are_refused(value):
    inputs = np.ones((10, 3))
    inputs[4, 1] = value
    with pytest.raises(DataError, match="client 0: its inputs contain NaN or infinite"):
        Federation.from_clients([(inputs, np.arange(10) % 2)])


def test_an_absurd_label_is_refused():
    labels = np.arange(10)
    labels[3] = 10**12
    with pytest.raises(DataError, match="over the limit of 100,000 for 'classes'"):
        Federation.from_clients([(np.ones((10, 3)), labels)])


@pytest.mark.parametrize(
    "recipe",
    [
        'extends = "quickstart"\n[strategy]\nname = ["x"]',
        'extends = "quickstart"\n[[variants]]\nstrategy = {name = {a = 1}}',
        'extends = "' + "x" * 5000 + '"',
        'extends = "~nobody-here/x"',
        "extends = [1]",
        'extends = "quickstart"\nvariants = "' + "x" * 300 + '"',
        'extends = "quickstart"\n[sweep]\nx' + ".x" * 3000 + " = [1]",
        'extends = "quickstart"\n[strategy]\nname = 3\n[sweep]\nstrategy.name = [[1], {}]',
    ],
    ids=["list", "table", "long", "home", "number", "long variants", "deep", "swept"],
)
def test_recipes_of_odd_types_are_an_error(tmp_path, recipe, capsys):
    (tmp_path / "recipe.toml").write_text(recipe)
    assert main(["sweep", str(tmp_path / "recipe.toml")]) == 2
    assert main(["sweep", "x" * 5000]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_zero_without_its_sign_is_the_same_zero():
    assert str(read_config(TINY | {"schedule": {"delta": -0.0}}).schedule.delta) == "0.0"


def test_a_sweep_of_very_many_runs_is_refused_before_it_is_made(tmp_path, capsys):
    many = list(range(1000))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'extends = "quickstart"\n[sweep]\nseed = {many}\ndata.seed = {many}\n')
    assert main(["sweep", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "the sweep is over the limit of 10,000 for 'runs'" in said
    assert "FEDPROTO_LIMITS='runs=…'" in said
    with pytest.raises(DataError, match="over the limit of 10,000 for 'runs'"):
        fedproto.sweep("digits", "mlp", {"a": "fedavg"}, seeds=10**8)


def test_whole_numbers_do_not_pass_for_pretrained_weights(tmp_path):
    module = torch.nn.Linear(2, 2)
    weights = {name: value.detach().long() for name, value in module.state_dict().items()}
    torch.save(weights, tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match=r"non-floating-point values in weight \(int64\)"):
        load_pretrained(module, str(tmp_path / "weights.pth"))


def test_a_run_from_python_whose_updates_are_all_refused_warns():
    keywords = {"rounds": 2, "cohort": 3, "lr": 1e30, "engine": "reference"}
    with pytest.warns(fedproto.HardlyLearnedWarning, match=r"has hardly learned: 6 of 6 updates"):
        result = fedproto.run("digits", "mlp", "fedavg", **keywords)
    assert len(result.records) == 2
