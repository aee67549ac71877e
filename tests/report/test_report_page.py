"""The report page without a browser: what goes into it, how it is written, and how it is served."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from fedproto.cli import main
from fedproto.report import html as content_module
from fedproto.report.html import page_content, render
from fedproto.report.panels import mean_shares, page_run
from fedproto.report.results import find_runs
from fedproto.store import RunStore
from fedproto.types import POOLED
from report_runs import (
    NASTY,
    append_records,
    make_record,
    write_analysis,
    write_run,
    write_sweep,
)


class Scripts(HTMLParser):
    """The texts of a page's script elements, and every address the page names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self.texts.append("")
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self.lasttag == "script":
            self.texts[-1] += data


def contents(*paths) -> dict:
    return page_content(find_runs(paths))


def weights(round_, attention):
    record = make_record(round_)
    record.attention.clear()
    record.attention.update(attention)
    return record


def test_the_page_holds_its_data_unharmed_and_asks_for_nothing(tmp_path):
    write_sweep(tmp_path)
    page = render(contents(tmp_path), NASTY)
    scripts = Scripts(page)
    data, _ = scripts.texts
    assert json.loads(data)["groups"][1]["title"] == NASTY
    assert json.loads(data)["title"] == NASTY
    assert scripts.addresses == ["#main"]
    assert "default-src 'none'" in page


def test_groups_hold_the_figures_of_the_tables(tmp_path):
    write_sweep(tmp_path)
    shown = contents(tmp_path)
    averaging, proto = shown["groups"]
    assert averaging["seeds"] == [0, 1]
    (run,) = find_runs([tmp_path / "proto"])
    assert proto["figures"]["accuracy"] == [pytest.approx(run.smoothed("accuracy")[1][-1])]
    assert proto["figures"]["train_loss"] == [pytest.approx(run.smoothed("train_loss")[1][-1])]
    assert proto["figures"]["bytes up"] == [30 * 1000]
    assert len(averaging["figures"]["accuracy"]) == 2
    assert (shown["baselines"], shown["quantiles"]) == (
        {"synthetic": "Averaging"},
        [0, pytest.approx(12.706, abs=1e-3)],
    )
    assert [metric["name"] for metric in shown["metrics"]] == ["accuracy", "loss", "train_loss"]


def test_fairness_by_hand(tmp_path):
    write_run(tmp_path / "run")
    write_analysis(tmp_path / "run")
    file = tmp_path / "run" / "analysis" / "measures.json"
    measures = json.loads(file.read_text())
    measures["tables"]["client"] = {str(i): (19 - i) / 20 for i in range(20)} | {"20": None}
    file.write_text(json.dumps(measures))
    (group,) = contents(tmp_path)["groups"]
    fairness = group["fairness"]
    assert fairness["clients"] == 20
    assert fairness["worst"] == pytest.approx((0 + 1 / 20) / 2)
    assert fairness["mean"] == pytest.approx(0.475)
    assert fairness["zero"] == pytest.approx(1 / 20)
    quantiles = fairness["quantiles"]
    assert (quantiles[0], quantiles[50], quantiles[100]) == pytest.approx((0, 0.475, 0.95))
    assert group["classes"] == {"cat": 0.8, "dog": 0.5, "bird": 0.9}


def test_scores_recorded_in_training_make_the_sections(tmp_path):
    write_run(tmp_path / "run", rounds=0, planned=4)
    records = [make_record(round_) for round_ in range(4)]
    for round_ in (1, 3):
        share = round_ / 10
        tables = {"client": {"0": 0.0, "1": share, "2": 2 * share}, "class": {"cat": share}}
        records[round_] = replace(records[round_], tables=tables)
    append_records(tmp_path / "run", records)
    shown = contents(tmp_path)
    (group,) = shown["groups"]
    assert group["fairness"]["round"] == 4
    assert group["fairness"]["mean"] == pytest.approx(0.3)
    assert group["fairness"]["zero"] == pytest.approx(1 / 3)
    assert group["classes"] == {"cat": pytest.approx(0.3)}
    write_analysis(tmp_path / "run")  # of round 30, which is later
    (group,) = contents(tmp_path)["groups"]
    assert group["fairness"]["clients"] == 12


def test_segmentation_has_classes_without_an_analysis(tmp_path):
    write_run(tmp_path / "run", rounds=0, planned=2)
    records = [make_record(round_) for round_ in range(2)]
    for record in records:
        record.metrics.update({"iou_cat": 0.25, "iou_background": 0.75})
    append_records(tmp_path / "run", records)
    (group,) = contents(tmp_path)["groups"]
    assert group["classes"] == {"cat": 0.25, "background": 0.75}


@pytest.mark.parametrize("change", [{"colors": ["red", "url(x)", ""]}, {"prototypes": 1000}])
def test_a_damaged_analysis_is_named_and_left_out(tmp_path, change):
    write_run(tmp_path / "run")
    write_analysis(tmp_path / "run")
    folder = tmp_path / "run" / "analysis"
    embedding = json.loads((folder / "embedding.json").read_text())
    (folder / "embedding.json").write_text(json.dumps(embedding | change))
    (run,) = find_runs([tmp_path])
    shown = page_run(run)
    assert shown.embedding is None
    assert "client" in shown.tables
    kinds = [path.stem.partition("-")[2] for path in shown.maps]
    assert kinds == ["picture", "prediction", "truth"]
    (folder / "measures.json").write_text('{"round": 3')
    shown = page_run(run)
    assert shown.tables == {}
    assert [("fedproto analyse" in text) for text in shown.problems] == [True, True]
    assert contents(tmp_path)["problems"] == shown.problems


def test_long_curves_are_means_of_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(content_module, "MOST_POINTS", 10)
    write_run(tmp_path / "run", rounds=25)
    (run,) = find_runs([tmp_path])
    curve = contents(tmp_path)["runs"][0]["curves"]["accuracy"]
    values = curve["y"]
    assert curve["joined"] == 3
    assert values[:2] == pytest.approx(run.curve("accuracy")[1][:6].reshape(2, 3).mean(axis=1))
    assert values[-1] == pytest.approx(run.curve("accuracy")[1][-1])
    assert curve["x"] == [3, 6, 9, 12, 15, 18, 21, 24, 25]


def test_weights_are_told_in_multiples_of_the_uniform_share():
    records = [
        weights(0, {0: 0.5, 1: 0.5}),
        weights(1, {0: 0.25, 3: 0.75}),
        weights(2, {POOLED: 1.0}),
    ]
    assert mean_shares(records) == pytest.approx({0: (1 + 0.5) / 2, 1: 1, 3: 1.5})


def test_the_weights_of_all_seeds_are_sorted_together(tmp_path):
    write_sweep(tmp_path)
    averaging, _ = contents(tmp_path)["groups"]
    averaged = [run for run in find_runs([tmp_path]) if "avg" in run.path.name]
    weights = [weight for run in averaged for weight in mean_shares(run.records).values()]
    quantiles = averaging["attention"]["quantiles"]
    assert quantiles == sorted(quantiles)
    assert (quantiles[0], quantiles[-1]) == pytest.approx((min(weights), max(weights)), abs=1e-5)
    assert quantiles[50] == pytest.approx(np.median(weights), abs=1e-5)


def test_classes_of_label_maps_have_their_colours(tmp_path):
    write_run(tmp_path / "run")
    write_analysis(tmp_path / "run")
    names = ["background", "cat", "dog"]
    RunStore.open(tmp_path / "run").describe(data={"class_names": names, "clients": 12})
    shown = contents(tmp_path)
    assert shown["maps"][0]["classes"] == [("cat", "#800000"), ("dog", "#008000")], "as in VOC"
    assert shown["runs"][0]["data"] == "clients 12"


def test_what_was_spent_after_each_round(tmp_path):
    write_run(tmp_path / "run", rounds=4)
    (run,) = contents(tmp_path)["runs"]
    assert run["megabytes"]["spent"] == pytest.approx([0.002, 0.004, 0.006, 0.008])
    assert run["seconds"]["total"] == 1.0
    records = [replace(make_record(4), seconds=3.0), replace(make_record(5), seconds=1.0)]
    append_records(tmp_path / "run", records)
    (run,) = contents(tmp_path)["runs"]
    assert run["seconds"]["spent"] == [0.25, 0.5, 0.75, 1.0, 4.0, 5.0]


def test_what_cannot_be_written_or_found_is_named(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    write_run(tmp_path / "run", rounds=2)
    assert main(["report", str(tmp_path / "run"), "--metric", "acuracy"]) == 2
    assert "did you mean 'accuracy'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "file" / "x.html")]) == 2
    assert "choose another path" in capsys.readouterr().err


def test_a_page_before_the_first_round(tmp_path):
    write_run(tmp_path / "run", rounds=0, planned=5)
    shown = contents(tmp_path)
    assert shown["metrics"] == []
    assert shown["runs"][0]["ended"] is None
    assert page_content([])["groups"] == []


def test_a_round_that_is_still_being_written_is_left_out(tmp_path):
    write_run(tmp_path / "run", rounds=3, planned=10)
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "cohort": [1')
    (run,) = contents(tmp_path)["runs"]
    assert (run["rounds"], run["planned"], run["ended"]) == (3, 10, None)


def test_runs_that_can_be_analysed_are_though_others_cannot(tmp_path, capsys):
    recipe = ["quickstart", "--set=schedule.rounds=1", "--set=train.epochs=1", "--quiet"]
    assert main(["run", *recipe, f"--out={tmp_path / 'run'}"]) == 0
    write_run(tmp_path / "bare", rounds=2)
    assert main(["analyse", str(tmp_path), "--what=clients"]) == 2
    said = capsys.readouterr().err
    assert "bare was started from Python with a module of your own; pass it" in said
    file = tmp_path / "run" / "analysis" / "measures.json"
    assert "client" in json.loads(file.read_text())["tables"]
    groups = contents(tmp_path)["groups"]
    assert [group["fairness"] is not None for group in groups].count(True) == 1
