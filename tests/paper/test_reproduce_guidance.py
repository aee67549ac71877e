"""The study of guidance: what its tables say of runs whose figures are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from fedproto.data.digits import Digits
from fedproto.data.federation import class_counts
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, Workload
from fedproto.engines.reference import read_state
from fedproto.measures import MeasureOptions, Meter
from fedproto.measures.scores import PER_CLASS
from fedproto.report.results import StoredRun
from fedproto.report.statistics import difference, holm
from fedproto.types import RoundRecord, ServerState
from paper.base import EXPERIMENTS, FoundRun, FoundRuns
from paper.cases import FAIR_AND_TOLERANT, Scope, configs_of
from paper.experiments.guidance import GuidanceStudy
from paper.forgetting import GUIDED, changes_by_holders, row_spread, show_forgetting
from paper.library import Request
from paper.measures import MEASURE, ROW_NORM
from paper.pairs import FINAL, OVER_ROUNDS, show_pairs
from paper.panels import Panel, show_panels


def record(round_, accuracy, *, attention=(0, 1), tables=None, up=3_000_000, down=1_000_000):
    return RoundRecord(
        round=round_,
        cohort=list(attention),
        stragglers=[],
        dropped=[],
        epochs={},
        attention=dict.fromkeys(attention, 0.5),
        metrics={"accuracy": accuracy, "loss": 1.0},
        bytes_down=down,
        bytes_up=up,
        seconds=2.0,
        tables=tables or {},
    )


def results_of(case, finals):
    """Ten rounds of every method and seed; the last decides, as the smoothing is one round wide."""
    (config, *_) = configs_of("guidance-digits")
    found = []
    for label, scores in finals.items():
        for seed, last in enumerate(scores):
            own = replace(
                config, label=label, seed=seed, schedule=replace(config.schedule, rounds=10)
            )
            records = [record(round_, last * (round_ + 1) / 10) for round_ in range(10)]
            found.append(FoundRun(Request(case.name, own), StoredRun(Path(), own, records)))
    return found


class Shown:
    """Keeps what would be printed and written."""

    def __init__(self):
        self.tables, self.printed = {}, {}

    def csv(self, name, columns, rows):
        frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
        self.tables[name] = frame.to_dict("records")
        return frame

    def pairs(self, minus, quantity=FINAL):
        """Methods' differences from another."""
        chosen = {"minus": minus, "quantity": quantity}
        return {
            row["method"]: row for row in self.tables["name-pairs"] if chosen.items() <= row.items()
        }

    def figure(self, name, figure):
        assert name
        self.panels = figure.axes

    def table(self, title, frame):
        self.printed[title] = frame


def test_the_table_says_who_is_ahead_and_by_how_much():
    case = Scope("smoke").case("mnist")
    finals = {
        GUIDED: [0.81, 0.82, 0.83],
        FAIR_AND_TOLERANT: [0.70, 0.73, 0.73],
        "FedAvgM": [0.81, 0.80, 0.83],
    }
    shown = Shown()
    show_pairs(shown, "name", "title", [(case, results_of(case, finals))], [GUIDED])
    guided, fair, _ = shown.tables["name"]
    assert guided["score"] == pytest.approx(82)
    assert guided["std"] == pytest.approx(1)
    # scores grow in a straight line: from a tenth of the last one, 55 % of it on average
    assert guided["mean_over_rounds"] == pytest.approx(0.55 * 82)
    pairs = difference([11.0, 9.0, 10.0]), difference([11.0, 7.0, 10.0])
    ahead = shown.pairs(FAIR_AND_TOLERANT)
    assert ahead.keys() == {GUIDED, "FedAvgM"}
    assert ahead[GUIDED]["difference"] == pytest.approx(10)
    assert ahead[GUIDED]["low"] == pytest.approx(pairs[0].low)
    assert ahead[GUIDED]["corrected_p"] == pytest.approx(holm([one.p for one in pairs])[0])
    assert (ahead[GUIDED]["wins"], ahead[GUIDED]["losses"]) == (3, 0)
    on_the_way = shown.pairs(FAIR_AND_TOLERANT, OVER_ROUNDS)[GUIDED]
    assert on_the_way["difference"] == pytest.approx(5.5)
    assert on_the_way["high"] == pytest.approx(0.55 * pairs[0].high)
    behind = shown.pairs(GUIDED)
    assert behind.keys() == {FAIR_AND_TOLERANT, "FedAvgM"}
    assert behind[FAIR_AND_TOLERANT]["difference"] == pytest.approx(-10)
    assert behind["FedAvgM"]["difference"] == pytest.approx(-(0 + 2 + 0) / 3)
    assert set(shown.printed[f"Difference from {GUIDED}"]["method"]) == behind.keys()
    # the target is where fairness + toleration ends on average, 72 %: Guided is there in round 9
    assert (guided["rounds_to_target"], guided["reached_target"]) == (9, 3)
    # of fairness + toleration the two better seeds get there, at their ends
    assert (fair["rounds_to_target"], fair["reached_target"]) == (10, 2)
    assert guided["megabytes_up_a_round"] == pytest.approx(3)
    assert guided["seconds_a_round"] == pytest.approx(2)
    (panel,) = shown.panels
    assert [label.get_text() for label in panel.get_yticklabels()] == list(finals)[1:]


def test_p_values_are_corrected_within_the_part_of_the_study():
    case = Scope("smoke").case("mnist")
    finals = {
        FAIR_AND_TOLERANT: [0.70, 0.73, 0.73],
        "Deciding": [0.81, 0.82, 0.83],
        "Field": [0.71, 0.75, 0.74],
    }
    found = [(case, results_of(case, finals))]
    alone = [difference([11.0, 9.0, 10.0]).p, difference([1.0, 2.0, 1.0]).p]
    for part_of, expected in (
        (lambda *_: None, holm(alone)),
        (lambda _, label: label == "Field", alone),
    ):
        shown = Shown()
        show_pairs(shown, "name", "title", found, part_of=part_of)
        rows = shown.pairs(FAIR_AND_TOLERANT)
        corrected = [rows[label]["corrected_p"] for label in ("Deciding", "Field")]
        assert corrected == pytest.approx(expected)


def test_a_study_without_a_subject_compares_with_fairness_and_toleration_alone():
    case = Scope("smoke").case("mnist")
    shown = Shown()
    finals = {FAIR_AND_TOLERANT: [0.70, 0.73], "Other": [0.71, 0.73]}
    show_pairs(shown, "name", "title", [(case, results_of(case, finals))])
    assert shown.pairs(FAIR_AND_TOLERANT)["Other"]["difference"] == pytest.approx(0.5)
    assert {row["minus"] for row in shown.tables["name-pairs"]} == {FAIR_AND_TOLERANT}


def test_methods_that_are_not_the_papers_have_lines_of_their_own():
    case = Scope("smoke").case("mnist")
    labels = ("ProtoHead", GUIDED, "FedAvgM", FAIR_AND_TOLERANT)
    runs = results_of(case, {label: [0.8, 0.9] for label in labels})
    lines = {label: [run for run in runs if run.label == label] for label in labels}
    shown = Shown()
    show_panels(shown, "name", [[Panel(case, "accuracy", "title", "%", lines, 100.0)]])
    (panel,) = shown.panels
    looks = {(line.get_color(), line.get_linestyle()) for line in panel.get_lines()}
    assert len(looks) == len(labels)
    last = [row for row in shown.tables["name"] if row["round"] == 9]
    # the value at nominal round t is that of the round on top of it
    assert [row["mean"] for row in last] == pytest.approx([85] * len(labels))


def test_a_class_is_followed_by_how_many_hold_it():
    federation = Digits(clients=2, partition="sorted").load(Path())
    holds = class_counts(federation) > 0
    only_first = next(place for place in range(10) if holds[0, place] and not holds[1, place])
    name = federation.class_name(only_first)
    scores = [{name: 0.5}, {name: 0.6}, {name: 0.4}]
    cohorts = [(0, 1), (0,), (1,)]
    records = [
        record(
            place,
            0.5,
            attention=cohorts[place],
            tables={PER_CLASS: scores[place], ROW_NORM: {"0": 1.0, "1": 3.0}},
        )
        for place in range(3)
    ]
    (config, *_) = configs_of("guidance-digits")
    run = StoredRun(Path(), config, records)
    changes = changes_by_holders(run, federation)
    assert changes[["holders", "times"]].to_numpy().tolist() == [[0, 1], [1, 1]]
    assert changes["change"].tolist() == pytest.approx([-20, 10])
    assert row_spread(run) == ([1, 2, 3], [0.5, 0.5, 0.5])


def test_forgetting_is_drawn_for_runs_that_were_looked_into():
    case = Scope("smoke").case("mnist")
    results = []
    for result in results_of(case, {GUIDED: [0.8], FAIR_AND_TOLERANT: [0.7]}):
        config = result.request.config
        looked = replace(config, measure=replace(config.measure, every=1, what=(MEASURE,)))
        tables = {PER_CLASS: {"0": 0.5, "1": 0.6}, ROW_NORM: {"0": 1.0, "1": 3.0}}
        records = [replace(one, tables=tables) for one in result.run.records]
        results.append(FoundRun(Request(case.name, looked), StoredRun(Path(), looked, records)))
    shown = Shown()
    show_forgetting(shown, [(case, results)])
    (rows,) = shown.tables.values()
    assert {row["method"] for row in rows} == {GUIDED, FAIR_AND_TOLERANT}
    assert all(row["change"] == 0 for row in rows), "nothing changed"
    assert len(shown.panels) == 2
    nothing = Shown()
    show_forgetting(nothing, [(case, results_of(case, {GUIDED: [0.8]}))])
    assert not nothing.tables


def test_what_is_asked_for_at_each_scale():
    study = EXPERIMENTS.get("guidance")()
    assert isinstance(study, GuidanceStudy)
    smoke = study.requests(Scope("smoke"))
    assert {request.case for request in smoke} == set(GuidanceStudy.cases)
    assert len(smoke) < 80
    paper = study.requests(Scope("paper", only=("mnist",)))
    seeds = {request.config.seed for request in paper if request.config.title == FAIR_AND_TOLERANT}
    assert seeds == {0, 1, 2, 3, 4}
    looked = [request for request in paper if MEASURE in request.wishes]
    assert {request.config.title for request in looked} == {GUIDED, FAIR_AND_TOLERANT, "FedAvgM"}
    assert all(request.config.measure.takes(MEASURE) for request in looked)


def test_what_was_tested_on_the_test_part_alone_is_not_in_the_grid():
    (config, *_) = configs_of("guidance-grid-digits")
    config = replace(config, label="Method: λ 1", schedule=replace(config.schedule, rounds=10))
    tested = [record(place, 0.9) for place in range(10)]
    judged = [
        replace(one, metrics={**one.metrics, "validation_accuracy": 0.05 * place})
        for place, one in enumerate(tested)
    ]
    request = Request("mnist", config, validated=True)
    answers = [StoredRun(Path(), config, records) for records in (tested, judged)]
    assert [request.is_answered_by(run) for run in answers] == [False, True]
    longer = replace(config, schedule=replace(config.schedule, rounds=20))
    late = StoredRun(Path(), longer, [*tested, *judged])
    assert not request.is_answered_by(late)
    shown, scope = Shown(), Scope("smoke", only=("mnist",))
    given = iter(answers)
    library = SimpleNamespace(find=lambda *_, **__: next(given))
    results = FoundRuns([request] * len(answers), library)
    EXPERIMENTS.get("guidance-grid")().render(scope, results, shown)
    (row,) = shown.tables["guidance-grid"]
    assert (row["method"], row["parameter"], row["best"]) == ("Method", "λ 1", True)
    assert row["validation_score"] == pytest.approx(45)
    assert row["validation_mean_over_rounds"] == pytest.approx(22.5)


@pytest.mark.parametrize("kind", ["guidance", "guidance-field", "guidance-grid"])
def test_all_data_sets_have_their_recipes(kind):
    digits = [config.title for config in configs_of(f"{kind}-digits")]
    for name in ("synthetic", "mnist", "femnist", "celeba"):
        configs = configs_of(f"{kind}-{name}")
        assert {config.title for config in configs} >= {digits[0]}
        assert all(config.data.validation > 0 for config in configs), "nothing to choose on"


def test_rows_of_the_head_and_classes_are_followed(small_federation, small_model):
    task = task_named(small_federation.task)
    meter = Meter(Workload(small_federation, small_model, task, EngineOptions(device="cpu")))
    state = ServerState(1, *read_state(small_model))
    found, scores = (
        meter.take(MeasureOptions(what=(name,)), 0, state).tables for name in (MEASURE, "clients")
    )
    (name,) = [name for name in state.params if name.endswith("classifier.weight")]
    norms = state.params[name].norm(dim=1)
    assert list(found[ROW_NORM].values()) == pytest.approx(norms.tolist(), abs=1e-4)
    assert found[PER_CLASS] == scores[PER_CLASS]
