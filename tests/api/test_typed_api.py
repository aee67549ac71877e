"""The Python API as a program and its author see it: signatures, mistakes, tables, figures."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

import fedproto
from documents import ROOT
from fedproto import ConfigError, DataError, Federation, TrainingError, TrainOptions
from fedproto.api.table import Table
from fedproto.config import RunConfig, Sections
from fedproto.config.recipe import COMMON
from fedproto.config.run import CHOICES, SECTIONS, dotted_names
from fedproto.store import read_description

TINY = {"rounds": 3, "cohort": 3, "epochs": 3, "lr": 0.5}


def federation() -> Federation:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(4):
        labels = torch.arange(15) % 3
        noise = torch.rand(15, 4, generator=generator)
        parts.append((noise + labels[:, None], labels))
    return Federation.from_clients(parts, num_classes=3)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture(scope="module")
def results():
    strategies = {"FedAvg": "fedavg", "50 % & [ours]_1": "fedproto"}
    return fedproto.sweep(federation(), net, strategies, seeds=3, **TINY)


def test_common_options_are_in_the_signatures_and_sections_are_typed():
    for function in (fedproto.run, fedproto.sweep):
        parameters = inspect.signature(function).parameters
        assert list(parameters)[:2] == ["data", "model"]
        assert set(COMMON) <= set(parameters)
    for option, section in COMMON.items():
        assert f"{section}.{option}" in dotted_names(option)
    typed = set(get_type_hints(Sections))
    others = {"seed", "label", *CHOICES}
    assert typed == set(SECTIONS) == {item.name for item in fields(RunConfig)} - others


MISSPELT = """
import fedproto

fedproto.run("digits", "mlp", "fedavg", rounds=2, train=fedproto.TrainOptions(momentum=0.9))
fedproto.sweep("digits", "mlp", ["fedavg"], seeds=2, grid={"lr": [0.1]}, engine={"device": "cpu"})
fedproto.run("digits", "mlp", "fedavg", epoch=2)
fedproto.run("digits", "mlp", "fedavg", train=fedproto.TrainOptions(momentun=0.9))
fedproto.sweep("digits", "mlp", ["fedavg"], servr={"optimizer": "adam"})
fedproto.run("digits", "mlp", fedproto.FedProx(mew=0.1))
fedproto.run("digits", "mlp", "fedavg", rounds="ten")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_type_checker_finds_misspelt_options(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MISSPELT)
    # In the project's folder and with its options, so that what `make lint` has read is not read
    # again.
    found = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in found.stdout.splitlines() if "program.py" in line]
    lines = {int(line.split(":")[1]) for line in errors if ": error: " in line}
    assert lines == {6, 7, 8, 9, 10}, found.stdout


def test_names_are_there_for_completion():
    code = "import fedproto, sys; print(*dir(fedproto)); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, imported = found.stdout.splitlines()
    assert {"run", "sweep", "FedAvg", "DataError", "TrainingError", "TrainOptions"} <= {
        *names.split()
    }
    assert imported == "False"
    assert all(hasattr(fedproto, name) for name in fedproto.__all__)
    assert issubclass(DataError, fedproto.FedprotoError)
    assert issubclass(TrainingError, fedproto.FedprotoError)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"momentum": 0.5}, r"write train={'momentum': ...} or server={'momentum': ...}"),
        ({"patience": 5}, r"belongs to a section; write stop={'patience': ...}, or"),
        (
            {"strategy": "ghbm", "tau": 0.5},
            r"write server={'tau': ...} or strategy={'name': ..., 'tau': ...},",
        ),
        ({"mu": 0.5}, r"keyword 'mu' belongs to .*; write strategy={'name': ..., 'mu': ...},"),
        ({"zzz": 1}, "unknown keyword 'zzz'; known: aggregate,"),
        ({"epoch": 1}, "did you mean 'epochs'"),
    ],
)
def test_keywords_are_never_taken_for_something_else(keywords, message):
    with pytest.raises(ConfigError, match=message) as refused:
        fedproto.run(federation(), net, **{"strategy": "fedavg", **TINY, **keywords})
    assert len(str(refused.value)) < 250


def test_sweep_says_its_order():
    with pytest.raises(ConfigError, match="data, model and strategies in this order"):
        fedproto.sweep({"FedAvg": "fedavg"}, federation(), net)
    with pytest.raises(ConfigError, match="give them labels"):
        fedproto.sweep(federation(), net, ["fedavg", "fedavg"], **TINY)


def test_sections_are_objects_and_numpy_scalars_are_numbers():
    result = fedproto.run(
        federation(), net, fedproto.FedProx(mu=np.float32(0.5)), rounds=np.int64(1),
        cohort=np.int32(2), lr=np.float32(0.5), seed=np.int64(3), train=TrainOptions(momentum=0.9),
    )  # fmt: skip
    config = result.config
    assert (config.schedule.rounds, config.schedule.cohort, config.seed) == (1, 2, 3)
    assert (config.train.lr, config.train.momentum, config.strategy.mu) == (0.5, 0.9, 0.5)
    assert type(config.train.lr) is float
    with pytest.raises(ConfigError, match="rounds must be a"):
        fedproto.run(federation(), net, rounds=np.float64(1.5))


def test_results_print_as_the_comparison(results):
    rows = results.table()
    assert [row["method"] for row in rows] == ["FedAvg", "50 % & [ours]_1"]
    finals = [run.stored().final("accuracy") for run in results["FedAvg"]]
    assert rows[0]["accuracy"] == pytest.approx(np.mean(finals))
    assert rows[0]["accuracy sd"] == pytest.approx(np.std(finals, ddof=1))
    assert rows[1]["difference"] == pytest.approx(rows[1]["accuracy"] - rows[0]["accuracy"])
    text = repr(results)
    assert text == str(results.table())
    head, line, first, second = text.splitlines()
    columns = [
        "method",
        "accuracy %",
        "difference",
        "95 % interval",
        "p",
        "seeds",
        "rounds",
        "loss",
    ]
    assert head.split() == " ".join(columns).split()
    assert f"{100 * np.mean(finals):.1f} ± {100 * np.std(finals, ddof=1):.1f}" in first
    assert "[ours]" in second
    assert max(map(len, (head, line, first, second))) < 110
    assert results.to_pandas().equals(rows.to_pandas())
    assert len(results.rounds()) == 18
    assert len(str(results.rounds()).splitlines()) == 20
    assert fedproto.Results([]).__repr__() == "Results()"


def test_a_table_goes_into_a_paper(results):
    text = results.to_latex()
    assert text.startswith("\\begin{tabular}{lrrrrrrr}\n\\toprule\n")
    assert r"50 \% \& [ours]\_1 & " in text
    assert r" $\pm$ " in text
    assert text.count(r" \\") == 3
    assert "±" not in text
    assert not re.search(r"(?<!\$)[<>]|[ &]-\d", text), "read as other signs outside of formulas"
    baseline = results.table(baseline="50 % & [ours]_1")
    assert baseline[1]["difference"] is None


def test_signs_of_numbers_are_set_as_such_in_latex():
    table = Table([{"method": "Fed-Avg <1>", "interval": "-3.4 to -0.1", "p": "< 0.001"}])
    row = table.to_latex().splitlines()[4]
    assert row == r"Fed-Avg $<$1$>$ & $-$3.4 to $-$0.1 & $<$ 0.001 \\"


def test_an_unknown_score_is_a_clear_error(results):
    for call in (results.plot, results.table, results[0].plot):
        with pytest.raises(ConfigError, match="unknown metric 'acc'; known: accuracy,"):
            call("acc")


def test_a_figure_shows_in_a_notebook(results, tmp_path):
    figure = results.plot("loss")
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "curves.pdf")
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_a_figure_without_matplotlib_says_how_to_install_it(results, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="figures need matplotlib: pip install 'matplotlib"):
        results.plot()


def test_a_grid_is_all_combinations(tmp_path):
    grid = {"lr": [0.05, 0.1], "server.momentum": [0.0, 0.9]}
    results = fedproto.sweep(
        federation(), net, ["fedavg"], grid=grid, server={"optimizer": "sgd"},
        seeds=np.int64(1), rounds=1, cohort=2, epochs=1, out=tmp_path / "grid",
    )  # fmt: skip
    found = [(run.config.train.lr, run.config.server.momentum) for run in results]
    assert found == [(0.05, 0.0), (0.05, 0.9), (0.1, 0.0), (0.1, 0.9)]
    assert len(results.table()) == 4
    assert (tmp_path / "grid" / "fedavg-lr0.05-momentum0.9-seed0").is_dir()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"grid": [0.1]}, r"grid must be a section of options, not \[0.1\]"),
        ({"callbacks": 3}, r"callbacks must be a list of fedproto.Callback, not 3"),
        ({"callbacks": [3]}, r"callbacks must be a list of fedproto.Callback, not \[3\]"),
        ({"callbacks": fedproto.Callback()}, r"callbacks must be a list of .* not <fedproto"),
        ({"grid": {"lr": 0.1}}, r"sweep.train.lr must be a list of values, not 0.1"),
        ({"grid": {"strategy": "fedavg"}}, r"sweep.strategy must be a list .* 'fedavg'"),
        ({"grid": {"mu": [0.1]}}, r"belongs to a section; write .*, or 'strategy.mu' in a grid$"),
        ({"seeds": [0, 0]}, r"would have the name 'fedavg-seed0'; .* name each value once$"),
        ({"grid": {"lr": []}}, r"sweep.train.lr must be a list of values, not \[\]"),
        ({"seeds": 0}, r"sweep.seed must be a list"),
        ({"seeds": 1.5}, r"sweep.seed must be a list"),
    ],
)
def test_values_to_try_are_lists(keywords, message):
    with pytest.raises(ConfigError, match=message):
        fedproto.sweep(federation(), net, ["fedavg"], **TINY | keywords)


def test_arrays_are_lists_of_values():
    results = fedproto.sweep(
        federation(), net, ["fedavg"], grid={"lr": np.array([0.1, 0.2])},
        seeds=np.array([0, 3]), rounds=1, cohort=2, epochs=1,
    )  # fmt: skip
    assert [run.config.seed for run in results] == [0, 3, 0, 3]
    assert results[np.int64(3)].config.train.lr == 0.2


def content(folder):
    """What runs are: their records without times, and their last weights."""
    found = {}
    for run in fedproto.load_all(folder):
        chain = [(record.round, record.metrics, record.cohort) for record in run.records]
        found[run.path.name] = (chain, run.state.params)
    return found


@pytest.mark.parametrize("engine", ["auto", "processes"])
def test_a_sweep_that_grew_equals_the_one_made_at_once(tmp_path, engine):
    three = {"FedAvg": "fedavg", "FedProto": "fedproto", "FedProx": {"name": "fedprox", "mu": 0.1}}
    two = {label: three[label] for label in ("FedAvg", "FedProto")}
    keywords = {**TINY, "engine": {"name": engine, "device": "cpu"}}
    fedproto.sweep(federation(), net, three, seeds=3, out=tmp_path / "once", **keywords)
    grown = tmp_path / "grown"
    fedproto.sweep(federation(), net, two, seeds=2, out=grown, **keywords)
    begun = {path: path.stat().st_mtime_ns for path in grown.rglob("rounds.jsonl")}
    fedproto.sweep(federation(), net, two, seeds=3, out=grown, **keywords)
    fedproto.sweep(federation(), net, three, seeds=3, out=grown, **keywords)
    assert {path: path.stat().st_mtime_ns for path in begun} == begun, "nothing is trained twice"
    one, other = content(tmp_path / "once"), content(grown)
    assert list(one) == list(other)
    for name in one:
        assert one[name][0] == other[name][0]
        for tensor, value in one[name][1].items():
            assert torch.equal(value, other[name][1][tensor])
    fedproto.sweep(federation(), net, two, seeds=2, out=grown, **keywords)
    assert content(grown).keys() == one.keys(), "those not asked for stay"


def test_runs_added_to_a_sweep_are_trained_by_its_engine(tmp_path, monkeypatch):
    # Worker processes are worth it for four runs, not for the two that the sweep begins with.
    monkeypatch.setattr("fedproto.engines.auto.WORTHWHILE_STEPS", 200)
    for seeds in (2, 4):
        fedproto.sweep(federation(), net, ["fedavg"], seeds=seeds, out=tmp_path, **TINY)
    found = [read_description(run.path)["engines"] for run in fedproto.load_all(tmp_path)]
    assert [[how["name"] for how in each] for each in found] == [["reference"]] * 4
