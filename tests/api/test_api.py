"""Python can do what the command line can: sections as keywords, tables, pages, predictions."""

from __future__ import annotations

import json
import logging
import sys
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedproto
from fedproto import Callback, FedAvg, Federation, FedProto
from fedproto.cli import main
from fedproto.config.options import EvaluateOptions
from fedproto.errors import ConfigError, DataError, StoreError, TrainingError
from helpers import AfterRound

TINY = {"rounds": 3, "cohort": 3, "epochs": 1, "engine": "reference"}


def federation(clients: int = 5) -> Federation:
    rng = np.random.RandomState(3)
    data = []
    for _ in range(clients):
        labels = rng.randint(0, 3, 20)
        data.append((rng.rand(20, 1, 4, 4) + labels[:, None, None, None], labels))
    return Federation.from_clients(data, num_classes=3, class_names=["ant", "bee", "cat"])


def frozen() -> nn.Module:
    made = module()
    return made.requires_grad_(requires_grad=False)


def module() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def result():
    return fedproto.run(federation(), module, "fedproto", lr=0.1, **TINY)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    variants = {
        "by size": "fedavg",
        "alike": {"name": "fedavg", "weights": "uniform"},
        "FedProto": FedProto(),
        "stragglers": {"strategy": FedAvg(), "delta": 0.7},
    }
    out = tmp_path_factory.mktemp("sweep") / "runs"
    return fedproto.sweep(federation(), module, variants, seeds=2, out=out, lr=0.1, **TINY), out


def test_every_section_is_a_keyword(tmp_path):
    told: list[tuple[str, int]] = []
    result = fedproto.run(
        federation(),
        module(),
        "fedprox",
        out=tmp_path / "run",
        label="mine",
        seed=4,
        schedule={"rounds": 4, "cohort": 2},
        delta=0.5,
        train={"epochs": 1},
        lr=0.2,
        engine={"name": "reference"},
        device="cpu",
        evaluate=EvaluateOptions(every=2),
        stop={"patience": 9},
        store={"keep": 0},
        measure={"every": 2, "what": ["dissimilarity"]},
        augment={},
        callbacks=[AfterRound(lambda config, record: told.append((config.title, record.round)))],
        progress=True,
    )
    config = result.config
    assert (config.schedule.rounds, config.schedule.cohort, config.schedule.delta) == (4, 2, 0.5)
    assert (config.train.epochs, config.train.lr) == (1, 0.2)
    assert (config.engine.name, config.engine.device) == ("reference", "cpu")
    assert (config.evaluate.every, config.stop.patience, config.store.keep) == (2, 9, 0)
    assert told == [("mine", number) for number in range(4)]
    assert "dissimilarity" in result.metrics
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 4


def test_names_alone_are_enough(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="fedproto"):
        result = fedproto.run(
            {"name": "digits", "clients": 4},
            {"name": "mlp", "hidden": 4, "features": 4},
            out=tmp_path / "run",
            **(TINY | {"engine": "auto"}),
        )
    assert result.config.title == "fedproto"
    assert "engine: reference (too little work to share out)" in caplog.text
    # The command line takes over what names alone describe.
    assert main(["analyse", str(tmp_path / "run"), "--what=clients"]) == 0
    assert main(["resume", str(tmp_path / "run"), "-q"]) == 0


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"strategy": "fedavgg"}, ConfigError, "did you mean 'fedavg'"),
        ({"strategy": 3}, ConfigError, "strategy must be a section of options"),
        ({"lrr": 0.1}, ConfigError, "unknown keyword 'lrr'; did you mean 'lr'"),
        ({"every": 2}, ConfigError, "write evaluate={.every.: ...} or measure={.every.: ...}"),
        ({"schedule": 3}, ConfigError, "schedule must be a section"),
        ({"rounds": 0}, ConfigError, "schedule.rounds must be at least 1"),
        ({"cohort": 9}, ConfigError, "schedule.cohort must be at most 5"),
        ({"engine": "refrence"}, ConfigError, "did you mean 'reference'"),
        ({"model": nn.Linear(3, 3)}, TrainingError, "does not accept the data.s inputs"),
        ({"model": lambda: 3}, ConfigError, "must return a torch module, not int"),
        ({"model": "cmn"}, ConfigError, "did you mean 'cnn'"),
        ({"data": "digitz"}, ConfigError, "did you mean 'digits'"),
        ({"data": (np.ones((9, 4)), np.ones(9))}, ConfigError, "Federation.from_clients.* tuple$"),
        ({"model": None}, ConfigError, "a torch module, .* not NoneType$"),
        ({"model": frozen()}, TrainingError, "no parameter with requires_grad = True$"),
        ({"model": nn.Sequential(module(), nn.Softmax(1))}, TrainingError, "leave out its softmax"),
        ({"strategy": FedAvg}, ConfigError, r"an instance, such as FedAvg\(\), not a class$"),
        ({"callbacks": [print]}, ConfigError, "must be a list of fedproto.Callback, not .<built"),
        ({"callbacks": [Callback]}, ConfigError, "must be a list of fedproto.Callback, not .<cl"),
        ({"train": "adam"}, ConfigError, "train is 'adam', not a section of options"),
        ({"data": {"name": "mnist", "alpha": 0.1}}, ConfigError, "alpha has no effect .* to 'dir"),
        ({"out": __file__}, StoreError, "cannot be made: File exists; choose another directory"),
    ],
)
def test_mistakes_are_named(keywords, error, message):
    given = {"data": federation(), "model": module(), **keywords}
    with pytest.raises(error, match=message):
        fedproto.run(given.pop("data"), given.pop("model"), **TINY | given)


def test_a_result_is_a_table_and_short_to_print(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = result.rounds()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert rows[-1]["accuracy"] == result.metrics["accuracy"]
    with pytest.raises(ConfigError, match="needs pandas"):
        rows.to_pandas()
    frames = types.ModuleType("pandas")
    frames.DataFrame = lambda rows: ("frame", rows)
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert rows.to_pandas() == ("frame", list(rows))
    federation = result.federation
    things = (result, result.state, federation, federation.clients[0], federation.samples)
    for thing in (*things, federation.clients):
        assert len(repr(thing)) < 400
    assert "5 clients with 80 samples" in repr(result.federation)


def test_a_factory_gives_every_seed_its_own_weights():
    runs = fedproto.sweep(federation(), module, {"a": "fedavg"}, seeds=[3, 4], **TINY)
    one, two = (run.build() for run in runs)
    assert not torch.equal(one[1].weight, two[1].weight)
    assert torch.equal(one[1].weight, runs[0].build()[1].weight)


def test_a_sweep_is_the_runs_one_by_one(swept):
    results, out = swept
    assert len(results) == 8
    alone = fedproto.run(federation(), module, FedProto(), lr=0.1, seed=1, **TINY)
    (_, same) = results["FedProto"]
    for name, tensor in alone.state.params.items():
        assert torch.equal(tensor, same.state.params[name])
    assert {row["method"] for row in results.table()} == {
        "by size", "alike", "FedProto", "stragglers",
    }  # fmt: skip
    assert [row["seeds"] for row in results.table()] == ["0 1"] * 4
    assert results["stragglers"][0].config.schedule.delta == 0.7
    with pytest.raises(KeyError, match="no run is called 'Alike'"):
        results["Alike"]
    assert len(fedproto.load_all(out)) == 8
    assert main(["compare", str(out)]) == 0


def test_a_sweep_goes_on_where_it_stands(swept):
    results, out = swept
    before = {path: path.read_bytes() for path in out.rglob("rounds.jsonl")}
    variants = {run.config.title: run.config.strategy for run in results}
    with pytest.raises(StoreError, match=r"'stragglers-seed0' .* differs in schedule.delta\)"):
        fedproto.sweep(federation(), module, variants, seeds=1, out=out, lr=0.1, **TINY)
    variants["stragglers"] = {"strategy": "fedavg", "delta": 0.7}
    again = fedproto.sweep(federation(), module, variants, seeds=2, out=out, lr=0.1, **TINY)
    assert [run.metrics for run in again] == [run.metrics for run in results]
    assert {path: path.read_bytes() for path in out.rglob("rounds.jsonl")} == before
    with pytest.raises(ConfigError, match="at least one"):
        fedproto.sweep(federation(), module, {})
    fewer = fedproto.sweep(federation(), module, variants, seeds=1, out=out, lr=0.1, **TINY)
    assert [run.metrics for run in fewer] == [run.metrics for run in results[::2]]
    assert len(fedproto.load_all(out)) == 8


def test_runs_are_looked_at_and_reported(result, swept, tmp_path):
    found = fedproto.analyse(result, "clients")
    scores = found["metrics"]["mean_client_accuracy"]
    assert scores == pytest.approx(result.metrics["mean_client_accuracy"])
    assert [*found["tables"]["class"]] == ["ant", "bee", "cat"]
    page = result.report(tmp_path / "page.html").read_text()
    assert "bee" in page
    axes = result.plot().axes[0]
    assert len(axes.lines) == 1
    results, _ = swept
    lines = [line for axes in results.plot("loss").axes for line in axes.lines]
    assert len([line for line in lines if line.get_alpha() is None]) == 4, "a mean per method"
    assert len(lines) == 4 + 8, "and a thin line per seed"
    assert results.report(tmp_path / "all.html").stat().st_size > 10_000


def test_a_result_is_kept_and_loaded(result, tmp_path, capsys):
    path = result.save(tmp_path / "kept")
    with pytest.raises(ConfigError, match=r"load\(run, model=...\)"):
        fedproto.load(path).model  # noqa: B018
    with pytest.raises(ConfigError, match=r"load\(run, data=...\)"):
        fedproto.load(path).federation  # noqa: B018
    assert main(["best", str(path), "--by=accuracy"]) == 0
    assert "its recipe, without the data or model given in Python:" in capsys.readouterr().err
    loaded = fedproto.load(path, model=module, data=federation())
    assert loaded.records == result.records
    x = torch.rand(2, 1, 4, 4)
    assert torch.equal(loaded.model(x), result.model(x))
    assert fedproto.analyse(loaded, ["clients"])["metrics"]
    other = fedproto.load(path, model=module, data=federation(4))
    with pytest.raises(StoreError, match="changed since"):
        fedproto.analyse(other, ["clients"])
    with pytest.raises(StoreError, match="nowhere does not exist"):
        fedproto.load_all(tmp_path / "nowhere")


def test_new_inputs_are_classified(result, tmp_path):
    inputs = result.federation.samples.inputs[:6]
    found = fedproto.predict(result, inputs.numpy())
    scores = torch.softmax(result.model(inputs.float()), dim=1)
    assert [list(each.probabilities) for each in found] == [["ant", "bee", "cat"]] * 6
    assert list(found[0].probabilities.values()) == pytest.approx(scores[0].tolist(), rel=1e-5)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        Image.new("L", (9, 9), 60 * number).save(folder / f"{number}.png")
    assert len(fedproto.predict(result, folder)) == 3
    assert len(fedproto.predict(result, [folder / "0.png", str(folder / "1.png")])) == 2
    for wrong in (torch.zeros(2, 3), [folder, 3], tmp_path / "none.png", [tmp_path / "pictures/x"]):
        with pytest.raises(DataError):
            fedproto.predict(result, wrong)


def test_the_command_line_predicts_a_folder(tmp_path, capsys):
    data, model = {"name": "digits", "clients": 4}, {"name": "mlp", "hidden": 4, "features": 4}
    fedproto.run(data, model, out=tmp_path / "run", **TINY)
    (tmp_path / "some" / "below").mkdir(parents=True)
    for path in ("some/a.png", "some/below/b.png"):
        Image.new("L", (8, 8), 99).save(tmp_path / path)
    (tmp_path / "some" / "text.txt").write_text("")
    command = ["predict", str(tmp_path / "run"), str(tmp_path / "some"), "--json"]
    assert main(command) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["image"].rpartition("/")[2] for line in lines] == ["a.png", "b.png"]
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "empty")]) == 2
    assert "contains no image" in capsys.readouterr().err
