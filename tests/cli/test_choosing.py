"""Choosing among configurations: sweeps that grow, the best of a grid, tuning; plans first."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib

import pytest
import torch

import fedproto
from fedproto.api.tuning import planned
from fedproto.cli.app import main
from fedproto.config.recipe import expand, read_recipe, recipe_text
from fedproto.data.digits import Digits
from fedproto.errors import ConfigError

RECIPE = """
seed = 0
data = { name = "digits", clients = 6, validation = 0.2 }
model = { name = "mlp", hidden = 8, features = 8 }
schedule = { rounds = 4, cohort = 3 }
train = { epochs = 1, batch_size = 20 }
engine = { name = "reference", device = "cpu" }

[tune]
trials = 4
factor = 2
[tune.space]
"train.lr" = [0.0001, 0.1, 0.3]
"train.momentum" = [0.0, 0.5]

[[variants]]
label = "FedAvg"
strategy = { name = "fedavg" }
[[variants]]
label = "FedProx"
strategy = { name = "fedprox" }
tune = { space = { strategy = { mu = [0.01, 1.0] } } }
[[variants]]
label = "FedProto [ours]"
strategy = { name = "fedproto" }
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


def test_a_finished_sweep_grows(recipe, tmp_path, capsys):
    out = ["--out", str(tmp_path / "runs")]
    assert main(["sweep", recipe, "--set", "sweep.seed=[0, 1]", *out]) == 0
    assert "runs: 24 rounds, 0.0 MB of weights" in capsys.readouterr().err
    assert main(["sweep", recipe, "--set", "sweep.seed=[0, 1]", *out]) == 2
    assert "add missing runs to it with --reuse" in capsys.readouterr().err
    assert main(["sweep", recipe, "--set", "sweep.seed=[0, 1, 2]", *out, "--reuse"]) == 0
    said = capsys.readouterr().err
    assert "found 6 finished and 0 begun, 3 to be trained from the start" in said
    assert "next: fedproto report" in said
    assert len(fedproto.load_all(tmp_path / "runs")) == 9
    assert main(["sweep", recipe, "--set", "sweep.seed=[0]", "--set", "train.lr=0.5", *out,
                 "--reuse"]) == 2  # fmt: skip
    assert "differs in train.lr); give the variant another label" in capsys.readouterr().err


def test_the_best_of_a_grid_is_a_recipe_that_runs(recipe, tmp_path, capsys):
    runs = str(tmp_path / "grid")
    grid = ["--set", "sweep.train.lr=[0.0001, 0.3]", "--set", "sweep.seed=[0, 1]"]
    assert main(["sweep", recipe, "--only", "FedAvg", *grid, "--out", runs]) == 0
    capsys.readouterr()
    assert main(["best", runs, "--by", "validation_accuracy"]) == 0
    told = capsys.readouterr()
    assert "best by validation_accuracy: FedAvg · lr" in told.err or "lr=0.3" in told.err
    tables = tomllib.loads(told.out)
    assert tables["train"]["lr"] == 0.3
    configs = expand(tables)
    assert [config.seed for config in configs.values()] == [0, 1]
    before = {run.config for run in fedproto.load_all(runs)}
    assert {config.located() for config in configs.values()} <= before
    assert main(["best", runs, "--by", "accuracy"]) == 0
    assert "a score on test data" in capsys.readouterr().err
    assert main(["best", runs, "--by", "validation_acuracy"]) == 2
    assert "did you mean 'validation_accuracy'" in capsys.readouterr().err


def chosen(path) -> dict[str, object]:
    tables = tomllib.loads((path / "tuned.toml").read_text(encoding="utf-8"))
    assert "tune" not in tables
    assert len(expand(tables)) == 3
    return {variant["label"]: variant for variant in tables["variants"]}


def records(path):
    return {
        run.path.name: [(record.round, record.metrics) for record in run.records]
        for run in fedproto.load_all(path / "trials")
    }


def test_tuning_spends_the_same_on_every_method_and_never_reads_test_data(
    recipe, tmp_path, monkeypatch, capsys
):
    tuning = planned(tomllib.loads(RECIPE))
    assert list(tuning.rungs) == [(4, 2), (2, 4)]
    assert tuning.rounds_per_method == 4 * 2 + 2 * 2
    assert main(["tune", recipe, "--out", str(tmp_path / "clean")]) == 0
    told = capsys.readouterr()
    assert "3 methods, each with 4 for 2 rounds, then 2 for 4 rounds (12 rounds" in told.err
    assert "FedProto [ours]" in told.out
    spent = dict.fromkeys(("fedavg", "fedprox", "fedproto"), 0)
    for name, rounds in records(tmp_path / "clean").items():
        spent[name.partition("-")[0]] += len(rounds)
        assert all("validation_accuracy" in metrics for _, metrics in rounds)
        assert not any("accuracy" in metrics or "loss" in metrics for _, metrics in rounds)
    assert set(spent.values()) == {12}
    assert all(variant["train"]["lr"] > 0.0001 for variant in chosen(tmp_path / "clean").values())

    plain = Digits.load

    def poisoned(self, root):
        found = plain(self, root)
        where = torch.from_numpy(found.test_indices)
        found.samples.inputs[where] = torch.nan
        found.samples.targets[where] = 0
        return found

    monkeypatch.setattr(Digits, "load", poisoned)
    assert main(["tune", recipe, "--out", str(tmp_path / "poisoned")]) == 0
    assert records(tmp_path / "poisoned") == records(tmp_path / "clean")
    assert chosen(tmp_path / "poisoned") == chosen(tmp_path / "clean")


def test_a_tuning_that_was_killed_chooses_the_same(recipe, tmp_path):
    assert main(["tune", recipe, "--out", str(tmp_path / "whole")]) == 0
    # One process, whose children are killed: it imports only once.
    kill = """
import os, signal, sys
import sklearn.datasets, torch._dynamo
from fedproto.store.run import RunStore
from fedproto.cli import running
from fedproto.cli.app import main

append, (recipe, out) = RunStore.append, sys.argv[1:]
for rounds in (9, 21):  # in the first rung, and in the second
    left = [rounds]
    def dying(self, record):
        left[0] -= 1
        if left[0] < 0: os.kill(os.getpid(), signal.SIGKILL)
        append(self, record)
    RunStore.append = dying
    if not (pid := os.fork()):
        os._exit(main(['tune', recipe, '--out', out]))
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert not os.path.exists(out + "/tuned.toml")
"""
    torn = tmp_path / "torn"
    done = subprocess.run(
        [sys.executable, "-c", kill, recipe, str(torn)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert main(["tune", recipe, "--out", str(torn)]) == 0
    assert records(torn) == records(tmp_path / "whole")
    assert chosen(torn) == chosen(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("trials = 40", "FedAvg has 6 configurations to try, fewer than 40 trials"),
        ("trails = 4", "did you mean 'trials'"),
    ],
)
def test_impossible_tunings_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        planned(tomllib.loads(RECIPE.replace("trials = 4", change)))


def test_tuning_needs_validation_data(recipe, tmp_path, capsys):
    command = ["tune", recipe, "--set", "data.validation=0.0", "--out", str(tmp_path / "none")]
    assert main(command) == 2
    assert "set data.validation to the share" in capsys.readouterr().err


def test_a_dry_run_trains_nothing_that_is_kept(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", recipe, "--set", "sweep.seed=[0, 1]", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "6 runs: 24 rounds, 0.0 MB of weights on disk" in told
    assert "if all rounds took as long as the second one of FedAvg" in told
    assert main(["tune", recipe, "--dry-run"]) == 0
    assert not (tmp_path / "runs").exists()


def test_a_pipe_hears_of_progress(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fedproto.api.progress.Shown.EVERY_S", 0.0)
    assert main(["sweep", recipe, "--only", "FedAvg", "--out", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().err
    assert "round 1 of 4, about " in said
    assert "round 3 of 4, about " in said
    assert " % in round 3 of 4: FedAvg" in said
    assert "round 0 of 4, client 1 of 3\n" in said, "a round may take long"
    assert "round 2 of 4, client 2 of 3, about " in said


def test_a_tuning_that_was_stopped_says_where_it_continues(recipe, tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedproto.cli.running.tune", stop)
    for folder in ("small-tuned", "small-tuned-2"):
        assert main(["tune", recipe]) == 130
        said = capsys.readouterr().err
        assert f"the same command with --out runs/{folder} continues" in said


@pytest.mark.parametrize("name", ["quickstart", "methods-digits"])
def test_a_written_recipe_is_read_back(name):
    for config in read_recipe(name).values():
        text = recipe_text(config.to_recipe())
        assert list(expand(tomllib.loads(text)).values()) == [config]
