"""`fedproto reproduce field`: published figures beside ours, also of runs still on their way."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fedproto.cli import main
from fedproto.store import RunStore
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord
from paper.cases import Scope
from paper.experiments.field import Field, published

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


@pytest.mark.slow
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
