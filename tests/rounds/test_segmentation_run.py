"""Federated segmentation from the command line: train, be killed, resume, compare, predict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedproto.cli import main
from fedproto.data.segmentation import palette
from fedproto.data.shapes import Shapes
from fedproto.store import RunStore

RECIPE = """
[data]
name = "shapes"
images = 80
size = 32
classes = 2
clients = 4
alpha = 10.0

[model]
name = "deeplab-small"

[train]
epochs = 5
batch_size = 8
optimizer = "adam"
lr = 2e-2
lr_schedule = "polynomial"
weight_decay = 4e-5

[augment]
flip = true
scale = [0.75, 1.5]

[schedule]
rounds = 5
cohort = 2

[engine]
name = "reference"
eval_batch_size = 50
"""
VARIANTS = """
[[variants]]
label = "FedAvg"
strategy = { name = "fedavg" }

[[variants]]
label = "FedProto"
strategy = { name = "fedproto" }
"""


def lines(path: Path) -> list[dict]:
    records = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
    return [{**record, "seconds": 0, "hash": ""} for record in records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A sweep of FedAvg and FedProto that was killed in its third round and resumed."""
    folder = tmp_path_factory.mktemp("segmentation")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE + VARIANTS)
    command = [
        sys.executable,
        "-m",
        "fedproto",
        "sweep",
        str(recipe),
        "--out",
        str(folder / "both"),
    ]
    records = folder / "both" / "fedproto" / "rounds.jsonl"
    process = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL
    )
    while not records.exists() or records.read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert len(lines(records.parent)) < 5
    assert main(["resume", str(folder / "both"), "--quiet"]) == 0
    return folder


def test_both_strategies_learn_and_resume_after_a_kill(folder):
    for name in ("fedavg", "fedproto"):
        records = lines(folder / "both" / name)
        assert [record["round"] for record in records] == list(range(5))
        metrics = records[-1]["metrics"]
        # Two figures that are each an eighth of the pixels: chance is below 0.1.
        assert metrics["miou"] > 0.5
        assert {"iou_disc", "iou_square", "miou_with_background", "pixel_accuracy"} <= set(metrics)


def test_a_resumed_run_is_the_same_as_one_that_was_never_killed(folder):
    recipe = folder / "alone.toml"
    recipe.write_text(RECIPE + '\n[strategy]\nname = "fedproto"\n')
    assert main(["run", str(recipe), "--quiet", "--out", str(folder / "alone")]) == 0
    assert lines(folder / "alone") == lines(folder / "both" / "fedproto")


def test_comparison_is_by_miou(folder, capsys):
    assert main(["compare", str(folder / "both"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"miou", "loss", "mean over rounds"} <= set(rows[0]["values"])


def test_a_run_tested_on_validation_data_alone_is_compared_and_drawn(tmp_path, capsys):
    recipe = tmp_path / "pooled.toml"
    recipe.write_text(RECIPE + '\n[strategy]\nname = "centralized"\n')
    settings = ["data.test=0.0", "data.validation=0.2", "schedule.rounds=1", "train.epochs=1"]
    changes = [f"--set={setting}" for setting in settings]
    run = tmp_path / "run"
    assert main(["run", str(recipe), "--quiet", "--out", str(run), *changes]) == 0
    capsys.readouterr()
    plots = tmp_path / "plots"
    assert main(["compare", str(run), "--json", "--plots", str(plots)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert {"validation_miou", "loss"} <= row["values"].keys()
    names = {path.name for path in plots.iterdir()}
    assert names == {"validation_miou.png", "validation_loss.png"}


@pytest.fixture
def picture(tmp_path) -> Path:
    """A generated image, enlarged and widened to a size no training image has."""
    images = Shapes(images=1, size=32, classes=2, clients=1, partition="iid", seed=5)
    pixels = images.load(tmp_path).samples.inputs[0].movedim(0, -1).numpy()
    wide = np.concatenate([pixels, pixels[:, :16]], axis=1)
    picture = Image.fromarray((255 * wide).astype(np.uint8)).resize((120, 80))
    picture.save(tmp_path / "mine.png")
    return tmp_path / "mine.png"


def test_predict_writes_a_map_beside_a_users_picture(folder, picture, capsys):
    run = folder / "both" / "fedproto"
    assert main(["predict", str(run), str(picture), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert sum(facts["classes"].values()) == pytest.approx(1)
    assert facts["file"] == str(picture.parent / "mine-segmentation.png")
    labels = Image.open(facts["file"])
    assert labels.size == (120, 80)
    assert labels.mode == "P"
    assert labels.getpalette()[:9] == palette()[:3].flatten().tolist()
    assert set(np.unique(labels)) <= {0, 1, 2}
    assert main(["predict", str(run), str(picture.parent), "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1, "a map is no picture to predict"
    Image.open(picture).save(picture.with_suffix(".bmp"))
    assert main(["predict", str(run), str(picture.parent)]) == 2
    assert "their maps would be one file" in capsys.readouterr().err


def test_predict_into_a_folder_and_its_mistakes(folder, picture, tmp_path, capsys):
    run, out = folder / "both" / "fedproto", tmp_path / "maps"
    assert main(["predict", str(run), str(picture), "--out", str(out)]) == 0
    assert len(list(out.iterdir())) == 1
    assert "wrote" in capsys.readouterr().out
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no picture")
    for arguments, message in (
        ([run, tmp_path / "missing.jpg"], "missing.jpg cannot be read"),
        ([run, broken], "does not decode as an image"),
        ([tmp_path, picture], "is not a run directory"),
        ([folder, picture], "is not a run but holds several"),
        ([run, picture, picture, "--out", out], "the same name"),
    ):
        assert main(["predict", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err


def test_predict_of_a_classifier_gives_probabilities(tmp_path, capsys):
    settings = ["data.name=digits", "data.clients=5", "model.hidden=8", "model.features=8"]
    settings += ["schedule.rounds=1", "schedule.cohort=2", "train.epochs=1"]
    run = tmp_path / "run"
    changes = [f"--set={setting}" for setting in settings]
    assert main(["run", "quickstart", "--quiet", "--out", str(run), *changes]) == 0
    Image.fromarray(np.full((20, 30), 100, dtype=np.uint8)).save(tmp_path / "grey.png")
    capsys.readouterr()
    assert main(["predict", str(run), str(tmp_path / "grey.png"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    p = torch.tensor(list(facts["classes"].values()))
    assert list(facts["classes"]) == [str(digit) for digit in range(10)]
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert facts["entropy"] == pytest.approx(float(-(p * p.log()).sum()), abs=1e-4)


def test_a_run_without_a_checkpoint_predicts_nothing(folder, picture, tmp_path, capsys):
    store = RunStore.open(folder / "both" / "fedavg")
    RunStore.create(tmp_path / "new", store.config)
    assert main(["predict", str(tmp_path / "new"), str(picture)]) == 2
    assert "no checkpoint yet" in capsys.readouterr().err
