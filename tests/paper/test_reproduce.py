"""`fedproto reproduce` at smoke scale: every table and figure, reuse, resuming, refusals."""

from __future__ import annotations

import csv
import fcntl
import json
import shutil
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from data_fixtures import session_folder
from fedproto.callback import Callback
from fedproto.cli import main
from fedproto.report.results import find_runs
from paper import reproduction
from paper.base import EXPERIMENTS
from paper.cases import Scope, split_setting
from paper.experiments.claims import claims
from paper.library import Library, Request, settings_digest
from paper.printed import paper

WITHOUT_PICTURE = {"numbers", "claims", "sorted", "guidance-grid", "serve-grid", "field"}
SYNTHETIC = ["accuracy", "--only=synthetic"]


def call(*arguments: str) -> tuple[int, str]:
    """A command's exit code and all that it printed."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = main(["reproduce", *arguments])
    return code, said.getvalue()


def table(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory) -> Path:
    """Everything, reproduced once for all processes of a test session."""
    folder = session_folder(tmp_path_factory) / "reproduced"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "said").exists():
            code, said = call("all", f"--runs={folder / 'runs'}", f"--out={folder / 'out'}")
            assert code == 0, said
            (folder / "said").write_text(said, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", EXPERIMENTS.names())
def test_every_table_and_figure_comes_as_csv_png_and_pdf(reproduced, name):
    out = reproduced / "out/smoke"
    assert len(table(out, name)) > 0
    if name not in WITHOUT_PICTURE:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    origin = json.loads((out / f"{name}.json").read_text())
    assert origin["command"] == "fedproto reproduce all --scale smoke"
    assert all(Path(run["directory"]).is_dir() for run in origin["runs"])
    experiment, library = EXPERIMENTS.get(name)(), Library(reproduced / "runs")
    wanted = experiment.requests(Scope()) or experiment.more(Scope(), library)
    assert bool(origin["runs"]) == bool(wanted)


def test_it_first_says_what_stands_in_and_what_is_missing(reproduced):
    said = (reproduced / "said").read_text(encoding="utf-8")
    before, _, _ = said.partition("engine:")
    assert "digits stands in for MNIST" in before
    assert "not the paper's settings" in before
    assert "0 runs exist" in before
    assert "std over deltas" in said


def test_the_accuracy_table_by_hand(reproduced):
    """The final value is the mean over the rounds on top: here the last of four."""
    runs = find_runs([reproduced / "runs/smoke/synthetic"])
    measured = [
        100 * run.records[-1].metrics["accuracy"]
        for run in runs
        if run.config.title == "FedAvg" and run.config.seed == 0
    ]
    assert len(measured) == 3
    (row,) = (
        row
        for row in table(reproduced / "out/smoke", "accuracy")
        if (row["data_set"], row["row"]) == ("Synthetic", "FedAvg")
        and row["quantity"] == "test accuracy (%)"
    )
    assert float(row["ours"]) == pytest.approx(sum(measured) / 3)
    assert float(row["paper"]) == 72.3
    assert float(row["paper_std"]) == 2.6
    assert float(row["difference"]) == pytest.approx(sum(measured) / 3 - 72.3)
    assert row["runs"] == "3"


def test_every_number_of_the_paper_has_its_row(reproduced):
    """Tables 1 to 4: what is printed once is there once, the margins beside both readings."""
    rows = table(reproduced / "out/smoke", "numbers")
    assert all(row["paper"] for row in rows)
    counts = {name: len(paper()[name]) for name in ("data", "accuracy", "loss", "margin", "ffd")}
    cells = {name: sum(map(len, paper()[name].values())) for name in counts}
    of_ablation = 4 * len(paper()["ablation"])
    tables = cells["accuracy"] + cells["loss"] + 2 * cells["margin"] + cells["ffd"]
    central = [row for row in rows if row["quantity"] == "test mIoU (%)"]
    assert len(rows) == 5 * counts["data"] + tables + of_ablation + len(central)
    (row,) = (
        row
        for row in rows
        if (row["data_set"], row["row"]) == ("MNIST", "FedAvg")
        and row["quantity"] == "test accuracy (%)"
    )
    assert float(row["distance"]) == pytest.approx((float(row["ours"]) - 88.8) / 3.8)


def test_every_claim_has_a_verdict(reproduced):
    rows = table(reproduced / "out/smoke", "claims")
    assert {row["claim"] for row in rows} == {each.claim for each in claims()}
    assert {row["verdict"] for row in rows} == {"unclear"}  # of one seed
    assert sum(row["seeds"] == "1" for row in rows) > 20


def test_both_partitions_of_the_claim_on_sorting_are_compared(reproduced):
    runs = [
        run
        for run in find_runs([reproduced / "runs/smoke/fpascal"])
        if run.config.title == "FedProto" and run.config.data.alpha == 0.01
    ]
    miou = {run.config.data.partition: 100 * run.records[-1].metrics["miou"] for run in runs}
    (row,) = (
        row
        for row in table(reproduced / "out/smoke", "sorted")
        if (row["data_set"], row["of"]) == ("FPascal", "FedProto")
    )
    assert float(row["difference"]) == pytest.approx(miou["sorted"] - miou["dirichlet"])


def test_fairness_with_toleration_is_always_shown(reproduced):
    for name in ("accuracy", "margins", "ablation"):
        rows = table(reproduced / "out/smoke", name)
        for case in {row["data_set"] for row in rows}:
            labels = {row["row"] for row in rows if row["data_set"] == case}
            assert "Fairness + toleration" in labels, (name, case)


def test_the_ablation_has_its_ten_rows_at_every_delta(reproduced):
    rows = table(reproduced / "out/smoke", "ablation")
    for data_set in ("Synthetic", "MNIST"):
        of = [row for row in rows if row["data_set"] == data_set]
        for at in ("δ = 0 %", "δ = 50 %", "δ = 80 %", "mean over δ"):
            labels = [row["row"] for row in of if row["quantity"].endswith(at)]
            labels.remove("FedAvg by size")  # ours, for Fairness to be compared with
            assert labels == list(paper()["ablation"]), at


def test_models_are_compared_with_the_centralised_run_of_their_data(reproduced):
    for run in find_runs([reproduced / "runs/smoke/femnist"]):
        if run.config.measure.takes("mmd"):
            (reference,) = find_runs([Path(run.config.measure.reference)])
            assert reference.config.strategy.pooled
            assert reference.config.data == run.config.data
            assert "mmd" in run.records[-1].metrics
    rows = table(reproduced / "out/smoke", "mmd")
    assert {row["method"] for row in rows} >= {"FedAvg", "FedProto", "Fairness + toleration"}


def test_runs_are_shared_and_a_second_call_trains_nothing(reproduced, tmp_path):
    runs = find_runs([reproduced / "runs"])
    assert len({settings_digest(run.config) for run in runs}) == len(runs)
    before = {path: path.stat().st_mtime_ns for path in reproduced.rglob("rounds.jsonl")}
    code, said = call("accuracy", "curves", f"--runs={reproduced / 'runs'}", f"--out={tmp_path}")
    assert code == 0
    assert "64 runs exist, 0 are to be trained" in said
    assert {path: path.stat().st_mtime_ns for path in reproduced.rglob("rounds.jsonl")} == before
    for name in ("accuracy.csv", "accuracy.png", "curves.csv", "curves.pdf"):
        again = (tmp_path / "smoke" / name).read_bytes()
        assert again == (reproduced / "out/smoke" / name).read_bytes(), name


def test_records_alone_are_enough_for_tables(reproduced, tmp_path):
    """Runs copied from another machine, without checkpoints and under other names."""
    for place, run in enumerate(find_runs([reproduced / "runs/smoke/synthetic"])):
        shutil.copytree(
            run.path, tmp_path / f"copied/{place}", ignore=shutil.ignore_patterns("checkpoints")
        )
    code, said = call(
        "accuracy", "curves", "amm", "mmd", "attention", "--only=synthetic", "--existing",
        f"--runs={tmp_path / 'copied'}", f"--out={tmp_path}",
    )  # fmt: skip
    assert code == 0
    assert "0 are missing" in said
    ours = [row for row in table(tmp_path / "smoke/synthetic", "accuracy") if row["ours"]]
    expected = table(reproduced / "out/smoke", "accuracy")
    assert ours == [row for row in expected if row["data_set"] == "Synthetic"]
    origin = json.loads((tmp_path / "smoke/synthetic/attention.json").read_text())
    assert "--scale smoke --existing --only synthetic" in origin["command"]


def test_what_cannot_be_shown_is_said(tmp_path):
    nowhere = [f"--runs={tmp_path / 'none'}", f"--out={tmp_path}"]
    code, said = call(*SYNTHETIC, "--existing", *nowhere)
    assert code == 0
    assert "0 runs exist, 16 are missing" in said
    assert "none of its 16 runs exists with all it needs" in said
    assert not list(tmp_path.rglob("*.csv"))


def test_data_that_are_not_there_are_left_out_at_paper_scale(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path / "no data"))
    code, said = call(
        "accuracy", "--only=mnist", "--scale=paper", "--dry-run", f"--runs={tmp_path}"
    )
    assert code == 0
    assert "mnist is left out" in said
    assert "to train" not in said


def test_a_dry_run_lists_the_runs_and_trains_none(tmp_path):
    code, said = call(*SYNTHETIC, "--dry-run", f"--runs={tmp_path / 'runs'}", f"--out={tmp_path}")
    assert code == 0
    assert said.count("to train") == 16
    assert "fedproto-delta0.8-seed0" in said
    assert list(tmp_path.iterdir()) == []


class Interrupting(Callback):
    """Stands for a user who presses Ctrl-C after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def on_round(self, config, record) -> None:
        del config, record
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_what_was_interrupted_goes_on(reproduced, tmp_path, monkeypatch):
    arguments = [
        *SYNTHETIC, "--set=store.checkpoint_every=1", f"--runs={tmp_path / 'runs'}",
        f"--out={tmp_path}",
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(
            "paper.command.progress_for",
            lambda *_: nullcontext(Interrupting(20)),
        )
        code, said = call(*arguments)
    assert code == 130
    assert "the same command continues" in said
    stopped = {run.path: len(run.records) for run in find_runs([tmp_path / "runs"])}
    assert 0 < sum(stopped.values()) < 16 * 4

    code, said = call(*arguments)
    assert code == 0
    assert "1 runs exist, 15 are to be trained" in said
    finished = find_runs([tmp_path / "runs"])
    assert {run.path for run in finished} == stopped.keys()
    ours, theirs = (
        table(folder, "accuracy")
        for folder in (tmp_path / "smoke/synthetic", reproduced / "out/smoke")
    )
    # The engine suits the work, of which there was more in the whole reproduction; a deviation is
    # as exact as the losses that it is taken of.
    for one, other in zip(
        ours, (row for row in theirs if row["data_set"] == "Synthetic"), strict=True
    ):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-6, abs=1e-6)


def numbers(row: dict[str, str]) -> list[float]:
    names = ("ours", "std_over_deltas", "runs", "difference")
    return [float(row[name] or "nan") for name in names if row[name]]


def test_a_finished_run_is_never_trained_over(reproduced, tmp_path):
    """It may lack its checkpoint, and so what a picture needs; its records still count."""
    shutil.copytree(
        reproduced / "runs/smoke/fpascal", tmp_path / "smoke/fpascal",
        ignore=shutil.ignore_patterns("checkpoints", "analysis"),
    )  # fmt: skip
    library = Library(tmp_path)
    plan = reproduction.make_plan(["maps"], Scope(), library)
    assert plan.missing
    for request in plan.missing:
        place = library.place_for(request.config, "smoke/fpascal")
        assert not place.exists()
        assert place.name.endswith("-2")
    assert not reproduction.make_plan(["segmentation"], Scope(only=("fpascal",)), library).missing


def test_a_damaged_directory_is_left_out_with_a_notice(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/run.json").write_text("{")
    said: list[str] = []
    Library(tmp_path, said.append)
    assert "is left out" in said[0]
    assert "damaged" in said[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name what to reproduce"),
        (["acuracy"], "did you mean 'accuracy'?"),
        (["accuracy", "--only=mnits"], "did you mean 'mnist'?"),
        (["ablation", "--only=celeba"], "ablation is about synthetic, mnist"),
        (["accuracy", "--recipe=mnist"], "DATASET=RECIPE"),
        (["accuracy", "--recipe=mnits=mnist"], "did you mean 'mnist'?"),
        (["accuracy", "--set=schedule.delta=0.5"], "the recipe sweeps over schedule.delta"),
    ],
)
def test_mistakes_are_explained_in_a_line(tmp_path, arguments, message):
    code, said = call(*arguments, f"--runs={tmp_path}")
    assert code == 2
    assert message in said
    assert said.count("\n") == 1


def test_the_list_names_every_experiment():
    code, said = call("--list")
    assert code == 0
    for name in EXPERIMENTS.names():
        assert name in said
        assert EXPERIMENTS.get(name).title in said


def test_an_embedding_that_was_kept_makes_weights_unnecessary(reproduced, tmp_path):
    shutil.copytree(
        reproduced / "runs/smoke/fpascal", tmp_path, dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("checkpoints"),
    )  # fmt: skip
    library = Library(tmp_path)
    assert not reproduction.make_plan(["tsne"], Scope(only=("fpascal",)), library).missing
    assert reproduction.make_plan(["maps"], Scope(), library).missing


def test_a_run_that_was_not_measured_will_do_where_nothing_is_trained(reproduced):
    library = Library(reproduced / "runs")
    case = Scope().case("mnist")
    plain = next(c for c in case.runs(recipe="mnist-ablation") if c.title == "Fairness")
    request = Request("mnist", plain, wishes=frozenset({"dissimilarity"}))
    assert library.find(request) is None
    assert library.find(request, modest=True) is not None
    needy = Request("mnist", plain, needs=frozenset({"dissimilarity"}))
    assert library.find(needy, modest=True) is None


def test_a_longer_run_answers_for_the_rounds_it_begins_with(reproduced, tmp_path):
    """Even one that was stopped; its weights are those of a later round and answer nothing."""
    source = find_runs([reproduced / "runs/smoke/synthetic"])[0]
    copied = tmp_path / "stopped"
    shutil.copytree(source.path, copied)
    lines = (copied / "rounds.jsonl").read_text().splitlines(keepends=True)
    (copied / "rounds.jsonl").write_text("".join(lines[:3]))
    library = Library(tmp_path)

    def asking(rounds: int, *, checkpoint: bool = False) -> Request:
        schedule = replace(source.config.schedule, rounds=rounds)
        config = replace(source.config, schedule=schedule)
        return Request("synthetic", config, checkpoint=checkpoint)

    for rounds in (2, 3):
        found = library.find(asking(rounds))
        assert found is not None
        assert found.records == source.records[:rounds]
        assert found.config == asking(rounds).config
    assert library.find(asking(4)) is None
    assert library.find(asking(3, checkpoint=True)) is None
    assert library.place_for(source.config, "smoke/synthetic") == copied
    cut = Library(tmp_path, first=2).find(asking(len(source.records)))
    assert cut is not None
    assert cut.records == source.records[:2]
    assert Library(tmp_path, first=4).find(asking(len(source.records))) is None


def test_how_often_to_measure_is_the_users_choice():
    usual = Scope(scale="paper").case("mnist").runs()
    asked = Scope(scale="paper", settings=("measure.every=50",)).case("mnist").runs()
    assert {config.measure.every for config in usual} == {10}
    assert {config.measure.every for config in asked} == {50}


def test_a_setting_may_be_for_one_data_set_alone():
    scope = Scope(scale="paper", settings=("mnist:schedule.rounds=200", "train.lr=0.5"))
    by_case = {name: scope.case(name).runs() for name in ("mnist", "femnist")}
    assert {config.schedule.rounds for config in by_case["mnist"]} == {200}
    assert {config.schedule.rounds for config in by_case["femnist"]} == {440}
    assert {config.train.lr for runs in by_case.values() for config in runs} == {0.5}
    assert split_setting("data.folder=a:b") == (None, "data.folder=a:b")
    code, said = call("accuracy", "--set", "mnits:schedule.rounds=200")
    assert code == 2
    assert "--set: unknown data set 'mnits'; did you mean 'mnist'?" in said
