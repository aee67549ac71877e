"""Looking into finished runs: files, table, and clear words where it cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedproto
from fedproto import FedAvg
from fedproto.analysis import embedding
from fedproto.analysis.embedding import embed
from fedproto.cli import main
from fedproto.data.base import data_root
from fedproto.data.segmentation import palette
from fedproto.errors import ConfigError, StoreError
from fedproto.models.base import build_model
from fedproto.report.analysing import read_parts
from fedproto.report.results import StoredRun
from fedproto.report.style import class_colors
from fedproto.store import RunStore
from fedproto.types import RoundRecord
from helpers import config_of

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
    assert main(["analyse", str(path), "--what=scores"]) == 0
    scores = read_parts(path, ["scores"])["scores"]
    store = RunStore.open(path)
    federation, state = store.config.data.load(data_root()), store.load_checkpoint()
    model = build_model(store.config.model, federation.input_shape, federation.num_classes, 0)
    model.load_state_dict(state.params)
    right, labels = [], []
    for client in federation.clients:
        x, y = federation.samples.batch(client.test)
        with torch.no_grad():
            right.append((model(x).argmax(dim=1) == y).double())
        labels.append(y)
    per_client, per_class = scores["per_client"], scores["per_class"]
    assert scores["round"] == 2
    assert per_client["client"] == list(range(len(federation.clients)))
    assert per_client["examples"] == [len(each) for each in right]
    assert per_client["accuracy"] == pytest.approx([float(each.mean()) for each in right])
    every, label = torch.cat(right), torch.cat(labels)
    present = sorted(set(label.tolist()))
    assert per_class["class"] == [str(place) for place in present]
    assert per_class["examples"] == [int((label == place).sum()) for place in present]
    expected = [float(every[label == place].mean()) for place in present]
    assert per_class["accuracy"] == pytest.approx(expected)


def test_calibration_and_measures_agree_with_those_taken_in_training(runs, tmp_path):
    out, central = tmp_path / "measured", runs / "central"
    options = settings(
        *FEDAVG,
        "measure.every=2",
        'measure.what=["dissimilarity", "margin", "ece", "mmd"]',
        f"measure.reference={central}",
    )
    assert main(["run", "quickstart", *options, f"--out={out}", "-q"]) == 0
    taken = RunStore.open(out).records()[-1].metrics
    what = ["--what=calibration", "--what=measures"]
    assert main(["analyse", str(out), *what]) == 0
    parts = read_parts(out, ["calibration", "measures", "scores"])
    assert parts.keys() == {"calibration", "measures"}
    calibration, measures = parts["calibration"], parts["measures"]
    assert calibration["ece"] == pytest.approx(taken["ece"])
    bins = calibration["bins"]
    assert bins[0].keys() == {"low", "high", "confidence", "accuracy", "count"}
    federation = RunStore.open(out).config.data.load(data_root())
    assert sum(each["count"] for each in bins) == len(federation.test_indices)
    for name in ("dissimilarity", "aggregate_mean_margin", "mmd"):
        assert measures[name] == pytest.approx(taken[name], rel=1e-5), name
    # Another run that never measured anything gets the same from the command line.
    other = run_of(runs)
    assert main(["analyse", str(other), "--what=measures", f"--reference={central}"]) == 0
    assert read_parts(other, ["measures"])["measures"]["mmd"] == pytest.approx(taken["mmd"])


def test_several_runs_give_a_table(runs, capsys):
    options = ["--what=scores", "--what=measures"]
    found = fedproto.load_all(runs / "fedavg")
    lines = [fedproto.analyse(run, ["scores", "measures"])["facts"] for run in found]
    assert [line["round"] for line in lines] == [2, 2, 2]
    assert all(line["aggregate_mean_margin"] >= 0 for line in lines)
    capsys.readouterr()
    assert main(["analyse", str(runs / "fedavg"), *options]) == 0
    text = capsys.readouterr().out
    assert "fedavg · seed 1" in text
    head = next(line for line in text.splitlines() if "accuracy %" in line)
    assert head.index("accuracy %") < head.index("AMM")
    assert f"{100 * lines[1]['accuracy']:.1f}" in text


def test_embedding_holds_points_classes_and_colours(runs):
    path = run_of(runs)
    assert main(["analyse", str(path), "--what=embedding", "--samples=40"]) == 0
    content = read_parts(path, ["embedding"])["embedding"]
    assert content["method"] == "tsne"
    assert len(content["x"]) == len(content["y"]) == len(content["class"]) == 40
    assert len(content["classes"]) == len(content["colors"]) == 10
    assert max(content["class"]) < 10
    assert len(set(content["colors"])) == 10


def test_segmentation_gets_maps_scores_and_measures(tmp_path):
    recipe, out = tmp_path / "shapes.toml", tmp_path / "run"
    recipe.write_text(SHAPES)
    assert main(["run", str(recipe), f"--out={out}", "-q"]) == 0
    taken = RunStore.open(out).records()[-1].metrics
    assert {"dissimilarity", "aggregate_mean_margin", "ece"} <= taken.keys()
    assert main(["analyse", str(out), "--samples=60"]) == 0
    parts = read_parts(out, ["scores", "calibration", "embedding", "measures"])
    assert len(parts) == 4
    scores, federation = parts["scores"], RunStore.open(out).config.data.load(data_root())
    assert scores["per_client"].keys() == {"client", "examples", "miou"}
    assert scores["per_class"].keys() == {"class", "examples", "iou"}
    found = dict(zip(scores["per_class"]["class"], scores["per_class"]["iou"], strict=True))
    for name, value in found.items():
        assert value == pytest.approx(taken[f"iou_{name}"], abs=1e-9), name
    pixels = sum(each["count"] for each in parts["calibration"]["bins"])
    assert pixels == sum(scores["per_class"]["examples"])
    assert parts["calibration"]["ece"] == pytest.approx(taken["ece"])
    assert set(parts["embedding"]["class"]) <= {1, 2}
    colours = ["#{:02x}{:02x}{:02x}".format(*colour) for colour in palette()[:3].tolist()]
    assert parts["embedding"]["colors"] == colours
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
        (["--what=score"], "what: unknown part 'score'; did you mean 'scores'?"),
        (["--what=measures", "--reference=nowhere"], "measure.reference nowhere is not a run"),
    ],
)
def test_mistakes_are_answered_in_one_line(runs, capsys, arguments, message):
    assert main(["analyse", str(run_of(runs)), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


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
    (tmp_path / "analysis/scores.json").write_text("{")
    with pytest.raises(StoreError, match=r"scores\.json cannot be read .* fedproto analyse"):
        read_parts(tmp_path, ["scores"])


def test_clusters_stay_together_in_the_plane():
    rng = np.random.RandomState(0)
    label = np.arange(60) % 3
    features = (10 * rng.normal(size=(3, 8))[label] + rng.normal(size=(60, 8))).astype(np.float32)
    places = embed(features)
    distance = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    assert (label[distance.argmin(axis=1)] == label).all()
    assert np.array_equal(places, embed(features))


@pytest.mark.parametrize("block", [50, 10**6])
def test_a_step_of_tsne_goes_down_the_divergence(monkeypatch, block):
    """Against automatic differentiation of KL(P ‖ Q), however the pairs are cut into blocks."""
    monkeypatch.setattr(embedding, "_BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    near = embedding._affinities(
        torch.randn(37, 5, dtype=torch.float64, generator=generator), perplexity=8.0
    )
    assert float(near.sum()) == pytest.approx(1)
    assert torch.equal(near, near.t())
    places = torch.randn(37, 2, generator=generator)
    exact = places.double().requires_grad_()
    others = ~torch.eye(37, dtype=torch.bool)
    q = (1 / (1 + torch.cdist(exact, exact).square()))[others]
    p = near.double()[others]
    divergence = torch.special.xlogy(p, p).sum() - (p * (q / q.sum()).log()).sum()
    (expected,) = torch.autograd.grad(divergence, exact)
    assert torch.allclose(
        embedding._gradient(places, near, 1.0).double(), expected, rtol=1e-4, atol=1e-7
    )


def test_neighbours_are_as_many_as_the_perplexity_says():
    """Vectors at equal distances: each has the entropy that was asked for."""
    square = torch.rand(6, 20, dtype=torch.float64).sort(dim=1).values * 1e4
    chance = embedding._calibrated(square, math.log(7.0))
    entropy = torch.special.entr(chance).sum(dim=1)
    assert torch.allclose(entropy.exp(), torch.full_like(entropy, 7.0), rtol=1e-6)


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


def record(round_, attention, cohort=None):
    return RoundRecord(
        round=round_,
        cohort=cohort or sorted(attention),
        stragglers=[],
        dropped=[],
        epochs={},
        attention=attention,
        metrics={},
        bytes_down=0,
        bytes_up=0,
        seconds=0.0,
    )


def test_the_spread_of_the_weights_over_clients_and_rounds():
    records = [record(0, {0: 0.25, 2: 0.75}), record(1, {}, [1, 3]), record(2, {2: 1.0})]
    run = StoredRun(Path("run"), config_of(FedAvg()), records)
    assert run.attention_spread() == {"lowest": 0.5, "highest": 1.5, "deviation": 0.5}
    assert replace(run, records=records[1:]).attention_spread() is None
