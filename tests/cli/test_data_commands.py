"""fedproto data stats and plot, and where the data root comes from."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image

import fedproto
from data_files import write_mnist
from fedproto.cli import main
from fedproto.data.base import DATASETS
from fedproto.data.federation import statistics

pytest_plugins = ["data_fixtures"]
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data root with a small MNIST; the environment names another one."""
    write_mnist(tmp_path / "root", np.arange(400) % 10)
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path / "elsewhere"))
    return tmp_path / "root"


def test_stats_counts_classes_clients_and_samples(root, capsys):
    arguments = ["data", "stats", "mnist", "--data-root", str(root), "--set", "clients=20"]
    facts = statistics(DATASETS.get("mnist")(clients=20).load(root))
    assert facts["clients"] == 20
    assert facts["samples"] + facts["validation"] == 400
    assert facts["most_classes"] == 2
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for name in ("std", "most_classes", "validation", "test_set"):
        value = facts[name]
        value = f"{value:.4g}" if isinstance(value, float) else value
        assert re.search(rf"{name} +│ +{value} ", shown)


def test_plot_draws_classes(root, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib (fedproto[plots])")
    out = tmp_path / "plots"
    arguments = ["data", "plot", "mnist", "--data-root", str(root), "--out", str(out)]
    assert main([*arguments, "--set", "clients=12", "--set", "partition=dirichlet"]) == 0
    shown = capsys.readouterr().out
    assert (out / "mnist-classes.png").read_bytes().startswith(b"\x89PNG")
    assert f"wrote {out / 'mnist-classes.png'}" in shown


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("alpha=0", "alpha must be above 0"),
        ("classes_per_client=11", "classes_per_client must be between 1 and the 10 classes"),
        ("clients=401", "clients must be between 1 and the 400 samples"),
        ("colour=red", "unknown option 'colour'"),
    ],
)
def test_impossible_settings_end_with_one_line(root, capsys, setting, message):
    assert main(["data", "stats", "mnist", "--data-root", str(root), "--set", setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_missing_files_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    assert main(["data", "stats", "mnist"]) == 2
    assert f"there are no files in {tmp_path / 'MNIST'}; get them with" in capsys.readouterr().err


def test_training_takes_the_data_root(root, tmp_path):
    recipe = tmp_path / "few.toml"
    recipe.write_text(
        """
        data = { name = "mnist", clients = 10 }
        model = { name = "cnn", channels1 = 2, channels2 = 2, features = 8 }
        strategy = { name = "fedproto" }
        train = { epochs = 1 }
        schedule = { rounds = 2, cohort = 2 }
        """
    )
    arguments = ["run", str(recipe), "--out", str(tmp_path / "run"), "--quiet"]
    assert main([*arguments, "--data-root", str(root)]) == 0
    records = fedproto.load(tmp_path / "run").records
    assert len(records) == 2
    assert "validation_accuracy" in records[0].metrics


def test_a_pipe_hears_of_long_preparations(tmp_path, capsys):
    for label in ("dark", "light"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(10):
            Image.new("L", (6, 6), 9 * number).save(tmp_path / "pictures" / label / f"{number}.png")
    settings = [f"path={tmp_path / 'pictures'}", "size=6", "clients=2", "partition=iid"]
    command = ["data", "stats", "images", *(f"--set={one}" for one in settings)]
    assert main(command) == 0
    assert capsys.readouterr().err == "preparing …\n"
    assert main(command) == 0
    assert capsys.readouterr().err == "", "it is prepared once"
