"""`fedproto reproduce field`: published figures beside ours, also of runs still on their way."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedproto.cli import main
from fedproto.models import build_model
from fedproto.models.resnet import ResNet18Options
from fedproto.store import RunStore
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord
from paper.cases import Scope
from paper.experiments.field import Field, published
from paper.settings import UniformResNet18, by_windows, thinned

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = "schedule.rounds=20"


def archive(folder: Path, finals: dict[str, list[float]], rounds: int = 20) -> None:
    """Run directories as an archive has them, with records alone.

    The accuracy is half of that in `finals` until the 18th round, and that in `finals` after it.
    """
    scope = Scope(scale="paper", only=("field-cnn",), settings=(ROUNDS,))
    for request in Field().requests(scope):
        config = request.config
        scores = finals.get(config.title, [])
        if config.seed < len(scores):
            store = RunStore.create(folder / f"{config.title}-{config.seed}", config)
            for index in range(rounds):
                accuracy = scores[config.seed] / (1 if index >= 18 else 2)
                store.append(
                    RoundRecord(index, [0], [], [], {}, {0: 1.0}, {"accuracy": accuracy}, 1, 1, 1.0)
                )


def shown(runs: Path, out: Path) -> dict[str, dict[str, str]]:
    """The table that the command makes from some runs, by method."""
    arguments = ["--scale=paper", "--only=field-cnn", f"--set={ROUNDS}", "--existing"]
    assert main(["reproduce", "field", *arguments, f"--runs={runs}", f"--out={out}"]) == 0
    with (out / "paper/field-cnn/field.csv").open(encoding="utf-8") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_ours_stand_beside_theirs_with_distance_and_order(tmp_path):
    archive(tmp_path / "a", {"FedAvg": [0.70, 0.72, 0.71], "FedDyn": [0.69], "FedACG": [0.8]})
    rows = shown(tmp_path, tmp_path / "out")
    assert rows.keys() == {"FedAvg", "FedDyn", "FedACG"}
    assert float(rows["FedAvg"]["ours"]) == pytest.approx(71.0)
    assert float(rows["FedAvg"]["std_over_seeds"]) == pytest.approx(1.0)
    assert float(rows["FedAvg"]["difference"]) == pytest.approx(71.0 - 71.68)
    assert (rows["FedAvg"]["seeds"], rows["FedDyn"]["seeds"]) == ("3", "1")
    ranks = {name: (row["rank"], row["published_rank"]) for name, row in rows.items()}
    assert ranks == {"FedAvg": ("1.0", "2.0"), "FedDyn": ("2.0", "1.0"), "FedACG": ("", "")}


def test_runs_on_their_way_are_shown_at_the_round_that_all_seeds_reached(tmp_path, capsys):
    archive(tmp_path, {"FedAvg": [0.5]}, rounds=20)
    archive(tmp_path / "second", {"FedAvg": [0, 0.7]}, rounds=19)
    (tmp_path / "second/FedAvg-0/run.json").unlink()
    row = shown(tmp_path, tmp_path / "out")["FedAvg"]
    assert (row["rounds"], row["of_rounds"], row["seeds"]) == ("19", "20", "2")
    # The last tenth of 20 rounds, up to round 19: the 18th and the 19th.
    assert float(row["ours"]) == pytest.approx(100 * (0.75 * 0.5 + 0.75 * 0.7) / 2)
    said = capsys.readouterr().out
    assert "FL-SAM" in said
    assert published()["field-cnn"]["differences"][0] in said


def test_every_published_figure_has_its_method_in_the_recipe():
    for case in Field.cases:
        configs = [one.config for one in Field().requests(Scope("paper", only=(case,)))]
        entry = published()[case]
        methods = entry.get("models", {config.title: "" for config in configs})
        assert entry["figures"].keys() <= methods.keys()
        for text in filter(None, methods.values()):
            tested = {configs[0].serve.text, *configs[0].serve.also}
            assert ServeOptions.parse(text).text in tested


def test_the_deciding_runs_are_trained_first():
    scope = Scope("paper", only=("field-cnn", "field-resnet"))
    orders = {(one.case, one.config.title): one.order for one in Field().requests(scope)}
    first = {key for key, order in orders.items() if order == 0}
    assert first == {
        *(("field-cnn", name) for name in ("FedAvg", "FedDyn", "FedSAM")),
        *(("field-resnet", name) for name in ("FedAvg", "FedACG")),
    }


@given(
    counts=st.lists(st.integers(60, 200), min_size=2, max_size=6),
    clients=st.integers(2, 23),
    seed=st.integers(0, 2**31),
)
def test_windows_share_everything_out_in_equal_sizes(counts, clients, seed):
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(len(counts)), counts))
    one, other = (
        by_windows(labels, np.random.RandomState(seed), clients=clients, alpha=1.0)
        for _ in range(2)
    )
    sizes = [len(part) for part in one]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(one)), np.arange(len(labels)))
    for part, again in zip(one, other, strict=True):
        np.testing.assert_array_equal(part, again)


def test_a_large_share_becomes_clients_with_fewer_classes_each():
    labels = np.repeat(np.arange(20), 300)
    parts = by_windows(labels, np.random.RandomState(0), clients=20, alpha=1e4)
    mixed = [len(np.unique(labels[part])) for part in parts]
    assert min(mixed) == 20  # even shares are windows themselves
    skewed = by_windows(labels, np.random.RandomState(0), clients=20, alpha=0.01)
    assert [len(part) for part in skewed] == [300] * 20
    assert np.mean([len(np.unique(labels[part])) for part in skewed]) < 5


def test_classes_are_thinned_to_a_geometric_series():
    labels = np.random.RandomState(1).permutation(np.repeat(np.arange(3), 100))
    kept = thinned(labels, np.random.RandomState(0), 0.25)
    assert np.bincount(labels[kept]).tolist() == [100, 50, 25]
    assert len(thinned(labels, np.random.RandomState(0), 1.0)) == 300


def test_convolutions_of_the_fields_resnet_begin_as_pytorch_draws_them():
    models = [
        build_model(kind(), (3, 8, 8), 10, seed=0) for kind in (UniformResNet18, ResNet18Options)
    ]
    drawn, he = (one.state_dict() for one in models)
    name = "layer4.1.conv2.weight"  # 512 filters of 9 · 512 numbers
    bound = (9 * 512) ** -0.5
    assert float(drawn[name].abs().max()) <= bound
    assert float(drawn[name].std()) == pytest.approx(bound / 3**0.5, rel=0.01)
    assert float(he[name].std()) == pytest.approx(bound * 2**0.5, rel=0.01)
    assert drawn.keys() == he.keys()


def test_the_script_trains_for_limited_time_and_packs_records_alone(tmp_path):
    command = ["bash", "paper/field.sh", "field-cnn", "3", "--scale=smoke"]
    places = {"RUNS": str(tmp_path / "runs"), "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "FedDyn" in done.stdout
    with tarfile.open(tmp_path / "field-cnn.tar.xz") as packed:
        names = [name for name in packed.getnames() if "." in Path(name).name]
    assert {Path(name).name for name in names} >= {"run.json", "rounds.jsonl"}
    assert not [name for name in names if name.endswith(".safetensors")]
