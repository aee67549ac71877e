"""Looking into finished runs: files, table, and clear words where it cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedproto
from fedproto.api import analysing
from fedproto.api.analysing import embed
from fedproto.cli import main
from fedproto.data.base import data_root
from fedproto.data.segmentation import palette
from fedproto.errors import ConfigError, StoreError
from fedproto.models.base import build_model
from fedproto.report.panels import read_measured, read_part
from fedproto.report.style import class_colors
from fedproto.store import RunStore
from fedproto.types import POOLED

TINY = [
    "schedule.rounds=2",
    "schedule.cohort=8",
    "schedule.delta=0.0",
    "train.epochs=1",
    "engine.name=reference",
]
FEDAVG = ["strategy.name=fedavg", "strategy.weights=uniform"]
SHAPES = """
[data]
name = "shapes"
images = 24
size = 32
classes = 2
clients = 3
alpha = 10.0

[model]
name = "deeplab-small"

[strategy]
name = "fedproto"

[train]
epochs = 1
batch_size = 8
lr = 1e-2

[schedule]
rounds = 1
cohort = 2

[measure]
every = 1

[engine]
name = "reference"
eval_batch_size = 10
"""


def settings(*changes: str) -> list[str]:
    return [f"--set={change}" for change in (*TINY, *changes)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A centrally trained run, and three seeds of FedAvg."""
    folder = tmp_path_factory.mktemp("runs")
    central = settings("strategy.name=centralized")
    assert main(["run", "quickstart", *central, f"--out={folder / 'central'}", "-q"]) == 0
    swept = settings(*FEDAVG, "sweep.seed=[0, 1, 2]")
    assert main(["sweep", "quickstart", *swept, f"--out={folder / 'fedavg'}", "-q"]) == 0
    return folder


def run_of(runs: Path, seed: int = 0) -> Path:
    return runs / "fedavg" / f"fedavg-seed{seed}"


def test_scores_per_client_and_class_are_those_of_the_model(runs):
    path = run_of(runs)
    assert main(["analyse", str(path), "--what=clients"]) == 0
    found = read_measured(path)
    store = RunStore.open(path)
    federation, state = store.config.data.load(data_root()), store.load_checkpoint()
    model = build_model(store.config.model, federation.input_shape, federation.num_classes, 0)
    model.load_state_dict(state.params)
    right, labels = {}, []
    for number, client in enumerate(federation.clients):
        x, y = federation.samples.batch(client.test)
        with torch.no_grad():
            right[str(number)] = (model(x).argmax(dim=1) == y).double()
        labels.append(y)
    assert found.round == 2
    expected = {client: float(each.mean()) for client, each in right.items()}
    assert found.tables["client"] == pytest.approx(expected, abs=1e-5)
    mean = sum(expected.values()) / len(expected)
    assert found.metrics["mean_client_accuracy"] == pytest.approx(mean)
    every, label = torch.cat([*right.values()]), torch.cat(labels)
    present = sorted(set(label.tolist()))
    expected = {str(place): float(every[label == place].mean()) for place in present}
    assert found.tables["class"] == pytest.approx(expected, abs=1e-5)


def test_measures_agree_with_those_taken_in_training(runs, tmp_path):
    out, central = tmp_path / "measured", runs / "central"
    options = settings(
        *FEDAVG,
        "measure.every=2",
        'measure.what=["dissimilarity", "margin", "mmd"]',
        f"measure.reference={central}",
    )
    assert main(["run", "quickstart", *options, f"--out={out}", "-q"]) == 0
    taken = RunStore.open(out).records()[-1].metrics
    names = ("dissimilarity", "margin", "mmd")
    assert main(["analyse", str(out), *(f"--what={name}" for name in names)]) == 0
    found = read_measured(out)
    assert found.reference == str(central)
    for name in ("dissimilarity", "aggregate_mean_margin", "mmd"):
        assert found.metrics[name] == pytest.approx(taken[name], rel=1e-5), name
    # Another run that never measured anything gets the same from the command line.
    other = run_of(runs)
    assert main(["analyse", str(other), "--what=mmd", f"--reference={central}"]) == 0
    assert read_measured(other).metrics["mmd"] == pytest.approx(taken["mmd"])


def test_single_measures_join_those_found_before(runs, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_of(runs), out)
    shutil.rmtree(out / "analysis", ignore_errors=True)
    file = out / "analysis/measures.json"
    margins = {"aggregate_mean_margin", "margin_per_channel"}
    for name, known in (("margin", margins), ("dissimilarity", {*margins, "dissimilarity"})):
        assert main(["analyse", str(out), f"--what={name}"]) == 0
        assert read_measured(out).metrics.keys() == known
    kept = {**json.loads(file.read_text()), "mmd": 0.5, "reference": "elsewhere"}
    file.write_text(json.dumps(kept))
    assert main(["analyse", str(out), "--what=margin"]) == 0
    assert json.loads(file.read_text()) == kept  # MMD stays what it was, with its reference
    file.write_text("{")  # damaged: made anew
    assert main(["analyse", str(out), "--what=margin"]) == 0
    assert read_measured(out).metrics.keys() == margins


def test_several_runs_give_a_table(runs, capsys):
    options = ["--what=clients", "--what=margin"]
    found = fedproto.load_all(runs / "fedavg")
    lines = [fedproto.analyse(run, ["clients", "margin"]) for run in found]
    assert [line["round"] for line in lines] == [2, 2, 2]
    assert all(line["metrics"]["aggregate_mean_margin"] >= 0 for line in lines)
    capsys.readouterr()
    assert main(["analyse", str(runs / "fedavg"), *options]) == 0
    text = capsys.readouterr().out
    assert "fedavg · seed 1" in text
    head = next(line for line in text.splitlines() if "mean client %" in line)
    assert head.index("worst tenth %") < head.index("AMM")
    assert f"{100 * lines[1]['metrics']['mean_client_accuracy']:.1f}" in text


def test_embedding_holds_points_classes_and_colours(runs, capsys, monkeypatch):
    path, given = run_of(runs), []
    monkeypatch.setattr(analysing, "embed", lambda vectors: given.append(vectors) or embed(vectors))
    capsys.readouterr()
    assert main(["analyse", str(path), "--what=embedding", "--samples=40"]) == 0
    assert capsys.readouterr().out == "", "no table, since there are no numbers"
    content = read_part(path, "embedding", dict)
    assert content["method"] == "tsne"
    assert len(content["x"]) == len(content["y"]) == len(content["class"]) == 40 + 10
    assert content["class"][40:] == list(range(content["prototypes"])) == list(range(10))
    run = fedproto.load(path)
    x, y = run.federation.samples.batch(run.federation.train_indices(POOLED))
    with torch.no_grad():
        features = run.model.features(x)
    for label in range(10):
        expected = features[y == label].mean(dim=0).numpy()
        assert given[0][40 + label] == pytest.approx(expected, abs=1e-4)
    assert len(content["classes"]) == len(content["colors"]) == 10
    assert max(content["class"]) < 10
    assert len(set(content["colors"])) == 10


def test_segmentation_gets_maps_scores_and_measures(tmp_path):
    recipe, out = tmp_path / "shapes.toml", tmp_path / "run"
    recipe.write_text(SHAPES)
    assert main(["run", str(recipe), f"--out={out}", "-q"]) == 0
    taken = RunStore.open(out).records()[-1].metrics
    assert {"dissimilarity", "aggregate_mean_margin"} <= taken.keys()
    assert main(["analyse", str(out), "--samples=60"]) == 0
    found, embedding = read_measured(out), read_part(out, "embedding", dict)
    federation = RunStore.open(out).config.data.load(data_root())
    assert {"mean_client_miou", "dissimilarity", "aggregate_mean_margin"} <= found.metrics.keys()
    for name, value in found.tables["class"].items():
        assert value == pytest.approx(taken[f"iou_{name}"], abs=1e-5), name
    assert set(embedding["class"]) <= {1, 2}
    colours = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in palette()[:3].tolist()]
    assert embedding["colors"] == colours
    files = sorted(path.name for path in (out / "analysis/maps").iterdir())
    kinds = ["feature-entropy", "picture", "prediction", "softmax-entropy", "truth"]
    stems = sorted({name.split("-", 1)[0] for name in files})
    assert len(stems) == 4
    assert files == [f"{stem}-{kind}.png" for stem in stems for kind in kinds]
    truth = np.asarray(Image.open(out / f"analysis/maps/{stems[0]}-truth.png"))
    _, expected = federation.samples.batch(np.array([int(stems[0])]))
    assert np.array_equal(truth, expected[0].numpy())
    assert int(stems[0]) in federation.test_indices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what=margins"], "what: unknown part 'margins'; did you mean 'margin'?"),
        (["--what=mmd", "--reference=nowhere"], "measure.reference nowhere is not a run"),
        (["--what=mmd"], "measure 'mmd' needs measure.reference"),
    ],
)
def test_mistakes_are_answered_in_one_line(runs, capsys, arguments, message):
    assert main(["analyse", str(runs / "fedavg"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, "said once of all runs"


def test_runs_that_cannot_be_looked_into_are_named(tmp_path, capsys):
    assert main(["analyse", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    bare = settings("store.checkpoint_every=0")
    assert main(["run", "quickstart", *bare, f"--out={tmp_path / 'bare'}", "-q"]) == 0
    capsys.readouterr()
    assert main(["analyse", str(tmp_path / "bare")]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


def test_a_damaged_file_is_named_with_its_remedy(tmp_path):
    (tmp_path / "analysis").mkdir()
    (tmp_path / "analysis/measures.json").write_text("{")
    with pytest.raises(StoreError, match=r"measures\.json cannot be read .* fedproto analyse"):
        read_measured(tmp_path)


def test_clusters_stay_together_in_the_plane():
    rng = np.random.RandomState(0)
    label = np.arange(60) % 3
    features = (10 * rng.normal(size=(3, 8))[label] + rng.normal(size=(60, 8))).astype(np.float32)
    places = embed(features)
    distance = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    assert (label[distance.argmin(axis=1)] == label).all()
    assert np.array_equal(places, embed(features))


def test_vectors_that_are_all_the_same_and_too_few_ones():
    assert np.isfinite(embed(np.ones((9, 2), dtype=np.float32))).all()
    with pytest.raises(ConfigError, match="at least four feature vectors, not 3"):
        embed(np.zeros((3, 2), dtype=np.float32))
    with pytest.raises(ConfigError, match="finite feature vectors"):
        embed(np.full((9, 2), np.nan, dtype=np.float32))


def test_colours_of_classes():
    assert class_colors(2, label_maps=True) == ["#000000", "#800000"]
    assert len(set(class_colors(10, label_maps=False))) == 10
    assert class_colors(11, label_maps=False)[0] == "#800000"
    assert len(set(class_colors(20, label_maps=False))) == 20
