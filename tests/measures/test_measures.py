"""Measures taken during training: what they say, and that training does not notice them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from data_files import write_mnist
from fedproto import Centralized, FedAvg, FedProto, run
from fedproto.cli import main
from fedproto.config import RunConfig, read_config
from fedproto.config.recipe import read_recipe
from fedproto.data.tasks import task_named
from fedproto.disk.integrity import sealed
from fedproto.engines.base import ENGINES, EngineOptions, Workload
from fedproto.errors import ConfigError
from fedproto.measures import MEASURES, Measure, MeasureOptions
from fedproto.measures.features import mmd2
from fedproto.report.arrangement import arrange
from fedproto.report.results import find_runs
from fedproto.rng import Purpose, stream
from fedproto.rounds import run_rounds
from fedproto.rounds.identity import check_reference
from fedproto.store import RunStore
from fedproto.store.run import read_records
from helpers import begin, config_of, every_strategy, same_tensors, simulate, strategy_name

ALL = ("dissimilarity", "margin")
KEYS = {"dissimilarity", "aggregate_mean_margin"}


def measured(config: RunConfig, **options) -> RunConfig:
    return replace(config, measure=MeasureOptions(**{"every": 1, "what": ALL} | options))


def carry_out(configs, federation, model, engine="reference"):
    options = EngineOptions(name=engine, device="cpu")
    workload = Workload(federation, model, task_named(federation.task), options)
    made = ENGINES.get(engine)(workload)
    for config in configs:
        check_reference(config)
    runs = [begin(config, model) for config in configs]
    try:
        for _ in run_rounds(runs, made):
            pass
    finally:
        made.close()
    return runs


@pytest.mark.parametrize("engine", ["reference", "stacked", "processes"])
def test_measures_change_no_bit_of_the_training(small_federation, small_model, engine):
    config = config_of(FedProto())
    plain, watched = (
        carry_out([each], small_federation, small_model, engine)[0]
        for each in (config, measured(config))
    )
    assert same_tensors(plain.state.params, watched.state.params)
    for one, other in zip(plain.records, watched.records, strict=True):
        own = {name: value for name, value in other.metrics.items() if name in one.metrics}
        for changed in (one.metrics, own):
            changed.pop("aggregate_mean_margin")
        assert own == one.metrics
        assert KEYS - {"aggregate_mean_margin"} <= other.metrics.keys()
        tables = {name: other.tables[name] for name in one.tables}
        assert replace(one, metrics={}, seconds=0) == replace(
            other, metrics={}, tables=tables, seconds=0
        )


def test_measuring_leaves_the_global_generators_alone(small_federation, small_model):
    torch.manual_seed(5)
    np.random.seed(5)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    carry_out([measured(config_of(FedAvg(), rounds=1))], small_federation, small_model)
    assert (torch.rand(1), np.random.rand()) == expected


@pytest.mark.parametrize("strategy", every_strategy(), ids=strategy_name)
def test_every_strategy_is_measured_alike(small_federation, small_model, strategy):
    (done,) = carry_out(
        [measured(config_of(strategy, rounds=3), every=2)], small_federation, small_model
    )
    # After the second round and after the last one; in between nothing that looks like a measure.
    assert [KEYS & record.metrics.keys() for record in done.records] == [set(), KEYS, KEYS]


def test_measures_are_those_of_the_model_after_the_round(small_federation, small_model):
    (done,) = carry_out([measured(config_of(FedAvg(), rounds=2))], small_federation, small_model)
    metrics, state = done.records[-1].metrics, done.state
    model = small_model
    model.load_state_dict(state.params)
    clients, samples = small_federation.clients, small_federation.samples
    with torch.no_grad():
        x, y = samples.batch(np.concatenate([client.train for client in clients]))
        features = model.features(x.float())
        means = [features[y == label].mean(dim=0) for label in range(4)]
        distances = [
            float((one - other).norm()) for one in means for other in means if one is not other
        ]
    assert metrics["aggregate_mean_margin"] == pytest.approx(np.mean(distances), rel=1e-5)


def test_the_training_loss_is_the_weighted_mean_of_the_clients_losses(
    small_federation, small_model
):
    """Σ n_k L_k / Σ n_k of the aggregate model; the margin also per root of the channels."""
    (run,) = carry_out(
        [measured(config_of(FedAvg()), what=("loss", "margin"))], small_federation, small_model
    )
    model = copy.deepcopy(small_model)
    model.load_state_dict({**run.state.params, **run.state.buffers})
    losses, sizes = [], []
    for client in small_federation.clients:
        inputs, targets = small_federation.samples.batch(client.train)
        with torch.no_grad():
            losses.append(float(torch.nn.functional.cross_entropy(model(inputs.float()), targets)))
        sizes.append(len(targets))
    metrics = run.records[-1].metrics
    assert metrics["aggregate_train_loss"] == pytest.approx(np.average(losses, weights=sizes))
    assert metrics["margin_per_channel"] == pytest.approx(
        metrics["aggregate_mean_margin"] / np.sqrt(6)
    )


def test_margin_without_the_measure_is_that_of_fedprotos_cohort(small_federation, small_model):
    (plain,) = carry_out([config_of(FedProto())], small_federation, small_model)
    (watched,) = carry_out(
        [measured(config_of(FedProto()), what=("loss",))], small_federation, small_model
    )
    for one, other in zip(plain.records, watched.records, strict=True):
        name = "aggregate_mean_margin"
        assert one.metrics[name] == other.metrics[name]


def test_runs_of_a_sweep_are_measured_each_by_its_own_options(small_federation, small_model):
    configs = [
        measured(config_of(FedAvg()), what=("margin",)),
        config_of(FedAvg()),
        measured(config_of(FedAvg(), rounds=2), what=("dissimilarity",)),
    ]
    one, two, three = carry_out(configs, small_federation, small_model, "stacked")
    assert all(KEYS & record.metrics.keys() == {"aggregate_mean_margin"} for record in one.records)
    assert not any(KEYS & record.metrics.keys() for record in two.records)
    assert len(three.records) == 2
    assert all(record.metrics["dissimilarity"] > 0 for record in three.records)


def reference_run(federation, model, path, **options):
    return run(federation, model, Centralized(), rounds=3, cohort=4, epochs=2, out=path, **options)


def test_mmd_to_a_centrally_trained_run(small_federation, small_model, tmp_path):
    central = reference_run(small_federation, small_model, tmp_path / "central")
    options = {"what": ("mmd",), "reference": str(tmp_path / "central")}
    configs = [measured(config_of(FedAvg(), rounds=1), **options)]
    (done,) = carry_out(configs, small_federation, small_model)
    ours = small_model
    ours.load_state_dict(done.state.params)
    inputs = []
    for place, client in enumerate(small_federation.clients):
        order = stream(0, Purpose.MEASURED_SAMPLES, place).permutation(len(client.test))
        inputs.append(small_federation.samples.batch(client.test[order])[0].float())
    assert min(len(x) for x in inputs) > 1
    with torch.no_grad():
        p, q = [ours.features(x) for x in inputs], [central.model.features(x) for x in inputs]
    sigma = float(torch.pdist(torch.cat(q).double()).median())
    expected = [mmd2(*pair, sigma, paired=True) for pair in zip(p, q, strict=True)]
    assert done.records[-1].metrics["mmd"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert abs(np.mean(expected)) > 1e-4


def test_mmd_of_the_reference_to_itself_is_zero(small_federation, small_model, tmp_path):
    reference_run(small_federation, small_model, tmp_path / "central")
    options = MeasureOptions(every=3, what=("mmd",), reference=str(tmp_path / "central"))
    again = reference_run(small_federation, small_model, tmp_path / "again", measure=options)
    assert again.metrics["mmd"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("nothing", "is not a run directory; name that of a finished run of strategy"),
        ("fedavg", "is a run of 'fedavg', not centrally trained"),
        ("unfinished", "is not finished; first 'fedproto resume"),
        ("other data", r"has another \[data\] than this run"),
        ("no checkpoint", "has no checkpoint"),
    ],
)
def test_references_that_cannot_be_used_are_refused_before_training(tmp_path, prepare, message):
    path = tmp_path / "reference"
    small = ["schedule.rounds=2", "schedule.cohort=2", "train.epochs=1", "data.clients=4"]
    name = "fedavg" if prepare == "fedavg" else "centralized"
    changes = {
        "other data": ["data.seed=5"],
        "no checkpoint": ["store.checkpoint_every=0"],
    }
    if prepare != "nothing":
        extra = changes.get(prepare, [])
        (config,) = read_recipe("quickstart", [f"strategy.name={name}", *small, *extra]).values()
        store = RunStore.create(path, config)
        if prepare != "unfinished":
            simulate([store])
    (config,) = read_recipe(
        "quickstart",
        [
            *small,
            "strategy.name=fedavg",
            "measure.every=1",
            'measure.what=["mmd"]',
            f"measure.reference={path}",
        ],
    ).values()
    store = RunStore.create(tmp_path / "run", config)
    with pytest.raises(ConfigError, match=message):
        simulate([store])
    assert store.records() == []


def test_mmd_without_a_reference_says_what_to_give(small_federation, small_model):
    config = measured(config_of(FedAvg()), what=("mmd",))
    with pytest.raises(ConfigError, match=r"measure 'mmd' needs measure\.reference"):
        carry_out([config], small_federation, small_model)


def test_an_engine_without_the_data_says_so(small_federation, small_model, monkeypatch):
    monkeypatch.setattr(ENGINES.get("reference"), "holds_data", False)
    with pytest.raises(
        ConfigError, match=r"stays with the clients over Flower; set measure\.every"
    ):
        carry_out([measured(config_of(FedAvg()))], small_federation, small_model)
    carry_out([config_of(FedAvg())], small_federation, small_model)


def test_a_measure_that_fails_is_named(small_federation, small_model, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory\nand a stack of details")

    monkeypatch.setattr(MEASURES.get("margin"), "take", fail)
    message = "measure 'margin' after round 1 failed: out of memory; leave it out of measure.what"
    with pytest.raises(Exception, match=message):
        carry_out([measured(config_of(FedAvg()))], small_federation, small_model)


def test_values_that_are_no_numbers_are_left_out(small_federation, small_model, monkeypatch):
    measure = MEASURES.get("dissimilarity")
    monkeypatch.setattr(measure, "take", lambda *_: {"dissimilarity": float("nan")})
    (done,) = carry_out([measured(config_of(FedAvg()))], small_federation, small_model)
    assert all("dissimilarity" not in record.metrics for record in done.records)


def test_a_stopped_run_goes_on_with_the_same_measures(small_federation, small_model, tmp_path):
    options = MeasureOptions(every=2, what=ALL)
    settings = {"rounds": 4, "cohort": 3, "epochs": 1, "measure": options}
    whole = run(small_federation, small_model, FedProto(), out=tmp_path / "whole", **settings)
    run(small_federation, small_model, FedProto(), out=tmp_path / "cut", **settings)
    records = (tmp_path / "cut/rounds.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cut/rounds.jsonl").write_text("".join(records[:3]))
    (tmp_path / "cut/checkpoints/round-000004.safetensors").unlink()
    again = run(small_federation, small_model, FedProto(), out=tmp_path / "cut", **settings)
    assert [each.metrics for each in again.records] == [each.metrics for each in whole.records]


def test_a_run_with_measures_is_not_taken_for_one_without(small_federation, small_model, tmp_path):
    settings = {"rounds": 1, "cohort": 3, "epochs": 1, "out": tmp_path / "run"}
    run(small_federation, small_model, FedAvg(), **settings)
    with pytest.raises(Exception, match=r"differs in measure\.every"):
        run(small_federation, small_model, FedAvg(), **settings, measure=MeasureOptions(every=1))


def test_runs_from_before_there_were_measures_can_be_read(small_federation, small_model, tmp_path):
    from fedproto.config import digest_of

    path = tmp_path / "run"
    settings = {"rounds": 1, "cohort": 3, "epochs": 1, "out": path}
    run(small_federation, small_model, FedAvg(), **settings)
    description = json.loads((path / "run.json").read_text())
    del description["config"]["measure"]
    description["digest"] = digest_of(description["config"])
    del description["hash"]
    (path / "run.json").write_bytes(sealed(description))
    assert RunStore.open(path).config.measure == MeasureOptions()


def test_seeds_with_references_of_their_own_share_a_row(tmp_path):
    for seed in (0, 1):
        config = replace(
            measured(config_of(FedAvg(), seed=seed), reference=f"central-{seed}"), label="x"
        )
        RunStore.create(tmp_path / str(seed), config)
    assert [len(group.runs) for group in arrange(find_runs([tmp_path])).groups] == [2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"what": ["margn"], "every": 1},
            r"measure\.what: unknown measure 'margn'; did you mean 'margin'\?",
        ),
        ({"every": -1}, r"measure\.every must be at least 0"),
    ],
)
def test_wrong_options_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        read_config({"strategy": {"name": "fedavg"}, "measure": given})


def test_every_measure_says_what_it_is():
    known = {"clients", "dissimilarity", "loss", "margin", "mmd"}
    assert known <= set(MEASURES.names())
    assert all(issubclass(MEASURES.get(name), Measure) for name in MEASURES.names())
    assert all(MEASURES.get(name).__doc__ for name in MEASURES.names())


def test_clients_and_classes_are_scored_while_training(tmp_path):
    """The tables of the record are what an analysis of the same model finds."""
    out = tmp_path / "run"
    arguments = [
        "schedule.rounds=4",
        "train.epochs=1",
        "measure.every=3",
        'measure.what=["clients"]',
    ]
    settings = [f"--set={argument}" for argument in arguments]
    assert main(["run", "quickstart", *settings, f"--out={out}", "--quiet"]) == 0
    assert main(["analyse", str(out), "--what=clients"]) == 0
    records = RunStore.open(out).records()
    assert [sorted(record.tables) for record in records] == [
        [], [], ["class", "client"], ["class", "client"],
    ]  # fmt: skip
    last = records[-1]
    assert json.loads((out / "analysis" / "measures.json").read_text())["tables"] == last.tables
    mean = np.mean([*last.tables["client"].values()])
    assert last.metrics["mean_client_accuracy"] == pytest.approx(mean, abs=1e-5)
    assert "mean_client_accuracy" not in records[0].metrics


def test_clients_are_scored_at_the_end_of_every_run(tmp_path, capsys):
    out = tmp_path / "run"
    settings = ["--set=schedule.rounds=2", "--set=train.epochs=1"]
    assert main(["run", "quickstart", *settings, f"--out={out}", "--quiet"]) == 0
    first, last = RunStore.open(out).records()
    assert not first.tables
    values = sorted(last.tables["client"].values())
    tenth = values[: -(-len(values) // 10)]
    assert last.metrics["mean_client_accuracy"] == pytest.approx(np.mean(values), abs=1e-4)
    assert last.metrics["worst_tenth_accuracy"] == pytest.approx(np.mean(tenth), abs=1e-4)
    assert last.metrics["at_zero_accuracy"] == values.count(0) / len(values)
    assert main(["compare", str(out), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["values"]["mean client"][0] == last.metrics["mean_client_accuracy"]


def test_clients_are_scored_when_a_run_stops_early(tmp_path):
    out = tmp_path / "run"
    settings = ["--set=schedule.rounds=9", "--set=train.epochs=1", "--set=stop.target=0.01"]
    assert main(["run", "quickstart", *settings, f"--out={out}", "--quiet"]) == 0
    records = RunStore.open(out).records()
    assert len(records) < 9
    assert "mean_client_accuracy" in records[-1].metrics


def test_a_client_with_most_of_the_test_samples_is_warned_of(tmp_path, capsys):
    settings = ["--set=schedule.rounds=1", "--set=train.epochs=1", f"--out={tmp_path / 'run'}"]
    assert main(["run", "quickstart", *settings]) == 0
    about = json.loads((tmp_path / "run" / "run.json").read_text())["data"]
    said = f"one client holds {100 * about['largest_test_share']:.0f} % of the test samples"
    assert said in capsys.readouterr().err


def test_test_samples_that_clients_train_on_are_said_wherever_scores_are(tmp_path, capsys):
    """In the record, while training, in tables, on the page; of older runs without the share."""
    settings = ["--set=schedule.rounds=1", "--set=train.epochs=1", f"--out={tmp_path / 'run'}"]
    shared = ["--set=data.partition=first", "--set=data.mean_size=40", "--set=data.minimum=2"]
    assert main(["run", "quickstart", "--set=data.name=digits", *settings, *shared]) == 0
    file = tmp_path / "run" / "run.json"
    about = json.loads(file.read_text())["data"]
    assert 0.1 < about["test_overlap"] < 1
    said = f"{100 * about['test_overlap']:.1f} % of the test samples of digits"
    assert said in capsys.readouterr().err
    for option in ("--markdown", "--latex", "--json"):
        assert main(["compare", str(tmp_path / "run"), option]) == 0
        assert said in capsys.readouterr().out.replace(r"\%", "%")
    RunStore.open(tmp_path / "run").describe(data={})
    assert main(["compare", str(tmp_path / "run"), "--markdown"]) == 0
    assert "some of the test samples of digits" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "some of the test samples of digits" in (tmp_path / "run" / "report.html").read_text()


def test_a_run_names_the_files_of_its_data(tmp_path, monkeypatch):
    write_mnist(tmp_path, np.arange(10).repeat(30))
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    names = [
        "data.name=mnist",
        "data.clients=10",
        "schedule.rounds=1",
        "schedule.cohort=2",
        "train.epochs=1",
    ]
    settings = [f"--set={name}" for name in names]
    assert main(["run", "quickstart", *settings, f"--out={tmp_path / 'run'}"]) == 0
    files = json.loads((tmp_path / "run" / "run.json").read_text())["files"]
    assert len(files) == 4
    for name, size in files.items():
        assert (tmp_path / "MNIST" / name).stat().st_size == size


def test_records_from_before_there_were_tables_are_read(tmp_path):
    assert main(["run", "quickstart", "--set=schedule.rounds=1", f"--out={tmp_path / 'run'}"]) == 0
    file = tmp_path / "run" / "rounds.jsonl"
    record = json.loads(file.read_text())
    record.pop("tables")
    record.pop("hash")  # which such records did not have either
    (read,) = read_records(json.dumps(record).encode() + b"\n", file, fingerprinted=False)
    assert read.tables == {}
