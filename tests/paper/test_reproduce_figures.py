"""The paper's figures as they are kept, and what is computed beside them, by hand."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fedproto import FedAvg
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.base import DATASETS
from fedproto.engines.base import EngineOptions
from fedproto.measures import MeasureOptions
from fedproto.report.results import StoredRun
from fedproto.report.statistics import difference
from fedproto.report.style import add_legend, new_figure
from fedproto.types import RoundRecord
from paper.base import FoundRun
from paper.cases import CLASSIFICATION, SCALES, SEGMENTATION, Case, Scope, configs_of
from paper.comparison import Comparison
from paper.curves import (
    Averaged,
    band,
    final_value,
    nominal_curve,
    nominal_rounds,
    spread,
    spread_of,
)
from paper.experiments.claims import Claim, claims, judge, mean_per_seed, measured
from paper.experiments.margins import discrepancy
from paper.library import Library, Request, begins_as_run_of, merged, settings_digest
from paper.panels import METHODS, line_of
from paper.printed import Printed, paper, printed, printed_at_delta


def result(values, *, delta=0.0, seed=0, rounds=None, metric="accuracy") -> FoundRun:
    schedule = ScheduleOptions(rounds=rounds or len(values), cohort=2, delta=delta)
    config = RunConfig(FedAvg(), seed=seed, schedule=schedule)
    records = [
        RoundRecord(t, [], [], [], {}, {}, {} if v is None else {metric: v}, 0, 0, 0.0)
        for t, v in enumerate(values)
    ]
    return FoundRun(Request("mnist", config), StoredRun(Path("run"), config, records))


def test_spot_values_of_the_paper():
    assert printed("accuracy", "synthetic", "FedProto") == Printed(78.7, 0.2)
    assert printed("accuracy", "femnist", "FedAtt") == Printed(75.5, 7.5)
    assert printed("loss", "mnist", "FedAvg") == Printed(0.39, 0.17)
    assert printed("accuracy", "celeba", "Centralized") == Printed(92.6)
    assert printed("margin", "mnist", "Centralized") == Printed(8.68)
    assert printed("ffd", "synthetic", "FedProto") == Printed(64.5)
    assert printed_at_delta("FedProto (no toleration)", 0.8) == Printed(88.1)
    assert printed("accuracy", "mnist", "Fairness + toleration") is None
    assert printed_at_delta("FedAvg", 0.3) is None


def test_the_ablations_means_and_deviations_are_those_of_its_deltas():
    """So the paper's ± is the sample standard deviation over δ."""
    for label, row in paper()["ablation"].items():
        assert statistics.mean(row["deltas"]) == pytest.approx(row["mean"], abs=0.051), label
        assert statistics.stdev(row["deltas"]) == pytest.approx(row["std"], abs=0.051), label
    for label in ("FedAvg", "FedProto"):
        row = paper()["ablation"][label]
        assert printed("accuracy", "mnist", label) == Printed(row["mean"], row["std"])


def test_table_1_agrees_with_the_recipes():
    for name, row in paper()["data"].items():
        for config in configs_of(name):
            train = config.train
            assert (train.epochs, train.batch_size) == (row["epochs"], row["batch_size"]), name
            assert (train.lr, train.optimizer) == (row["lr"], row["optimizer"]), name
            assert nominal_rounds(config.schedule.rounds) == row["rounds"], name


def test_the_moving_average_over_nominal_rounds_by_hand():
    """22 rounds are 20 nominal ones; round 1 is the mean of the rounds 2 and 3."""
    one = result([float(t) for t in range(1, 23)]).run
    rounds, values = nominal_curve(one, "accuracy")
    assert rounds.tolist() == list(range(1, 21))
    assert values.tolist() == pytest.approx([t + 1.5 for t in range(1, 21)])
    assert final_value(one, "accuracy") == pytest.approx((21 + 22) / 2)
    assert final_value(one, "mmd") is None


@pytest.mark.parametrize(("round_", "found"), [(22, 0.25), (20, None)])
def test_what_was_not_measured_in_training_comes_from_the_analysis_of_the_final_model(
    tmp_path, round_, found
):
    one = replace(result([float(t) for t in range(1, 23)]).run, path=tmp_path)
    (tmp_path / "analysis").mkdir()
    measures = {"round": round_, "mmd": 0.25, "accuracy": 0.0}
    (tmp_path / "analysis/measures.json").write_text(json.dumps(measures))
    assert final_value(one, "mmd") == found
    assert final_value(one, "accuracy") == pytest.approx((21 + 22) / 2)


def test_the_margin_of_a_cohort_is_not_taken_for_that_of_all_clients():
    own = result([1.0] * 22, metric="aggregate_mean_margin").run
    assert final_value(own, "aggregate_mean_margin") is None
    measured = replace(own, config=replace(own.config, measure=MeasureOptions(every=1)))
    assert final_value(measured, "aggregate_mean_margin") == 1.0


def test_rounds_without_a_test_are_left_out():
    sparse = [None if t % 2 else float(t) for t in range(22)]
    rounds, values = nominal_curve(result(sparse, rounds=22).run, "accuracy")
    assert rounds.tolist() == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert values.tolist() == pytest.approx([t + 1.0 for t in rounds])


def test_spread_over_deltas_and_seeds_by_hand():
    found = spread_of([[1.0, 3.0], [4.0, 8.0]])
    assert found.mean == 4.0
    assert found.over_deltas == pytest.approx(math.sqrt(8))
    assert found.over_seeds == pytest.approx(math.sqrt((2 + 8) / 2))
    assert found.runs == 4
    assert spread_of([[2.0]]) == Averaged(2.0, None, None, 1)
    assert spread_of([]) is None
    runs = [result([0.5], delta=0.0), result([0.7], delta=0.5), result([0.9], delta=0.8)]
    assert spread(runs, "accuracy").over_deltas == pytest.approx(0.2)


def test_a_band_is_mean_and_spread_at_common_rounds():
    curve = band([result([0.0, 1.0, 2.0]), result([2.0, None, 6.0], seed=1)], "accuracy")
    assert curve["round"].tolist() == [1, 3]
    assert curve["mean"].tolist() == [1.0, 4.0]
    assert curve["std"].tolist() == [1.0, 2.0]
    assert band([result([0.0])], "mmd") is None


@pytest.mark.parametrize(
    ("how", "values", "verdict"),
    [
        ("above", [0.1, 0.12, 0.11], "holds"),
        ("below", [0.1, 0.12, 0.11], "contradicted"),
        ("above", [0.1, 0.2, 0.3], "unclear"),  # all on one side, but 0.2 ± 0.25
        ("above", [0.5], "unclear"),
        ("above", [0.1, 0.1001], "unclear"),
        ("below", [-0.1, -0.12, -0.11], "holds"),
        ("level", [0.002, -0.002, 0.001], "holds"),
        ("level", [0.0], "unclear"),
        ("level", [0.2, 0.21, 0.2], "contradicted"),
        ("level", [0.2, -0.3, 0.1], "unclear"),
        ("steadier", [0.5, 0.6, 0.4], "contradicted"),
        ("steadier", [-0.09, -0.08, -0.09], "holds"),
    ],
)
def test_claims_are_judged_over_seeds(how, values, verdict):
    """Every value is a seed's difference; the baseline has 0.4, 0.5 and 0.6 at three δ."""
    deltas = {0.0: -0.1, 0.5: 0.0, 0.8: 0.1}
    than = [
        result([0.5 + side], delta=delta, seed=seed)
        for seed in range(len(values))
        for delta, side in deltas.items()
    ]
    of = [
        result(
            [0.5 + side * (1 + 10 * value) if how == "steadier" else 0.5 + side + value],
            delta=delta,
            seed=seed,
        )
        for seed, value in enumerate(values)
        for delta, side in deltas.items()
    ]
    claim = Claim("so it is", "accuracy", "A", "B", how, within=1.0, factor=100)
    found = measured(claim, of, than)
    ((_, word),) = judge(claim, [found])
    assert word == verdict
    assert found.pairs == len(values)
    assert found.mean == pytest.approx(100 * statistics.mean(values))
    assert measured(claim, of, []) is None


def test_a_claim_on_all_rounds_is_about_the_plain_mean_of_the_tests():
    """A moving average counts the first tests several times."""
    claim = Claim("it is faster", "accuracy", "A", "B", "above", over="rounds")
    slow = [0.0] + [1.0] * 39
    found = measured(claim, [result([1.0] * 40)], [result(slow)])
    assert found.mean == pytest.approx(1 / 40)


def test_conditions_of_one_seed_are_no_repetitions():
    """Three δ of one seed used to pass for three pairs."""
    than = [result([0.5], delta=delta) for delta in (0.0, 0.5, 0.8)]
    of = [result([0.6], delta=delta) for delta in (0.0, 0.5, 0.8)]
    claim = Claim("so it is", "accuracy", "A", "B", "above", factor=100)
    found = measured(claim, of, than)
    assert (found.pairs, found.low) == (1, None)
    assert judge(claim, [found]) == [(None, "unclear")]


def test_verdicts_are_corrected_for_the_data_sets_of_a_claim():
    claim = Claim("so it is", "accuracy", "A", "B", "above")
    found = [difference([0.1, 0.2, 0.15]), difference([0.1, 0.2, 0.15]), None]
    assert judge(claim, found[:1])[0][1] == "holds"
    assert [one and one[1] for one in judge(claim, found)] == ["unclear", "unclear", None]


def test_the_distance_is_in_the_papers_own_spread():
    ours = Averaged(90.0, None, None, 1)
    assert Comparison(None, "", "", ours, Printed(88.0, 4.0)).distance == pytest.approx(0.5)
    assert Comparison(None, "", "", ours, Printed(88.0)).distance is None
    assert Comparison(None, "", "", ours, Printed(88.0, 0.0)).distance is None


def test_a_difference_needs_both_figures():
    ours, theirs = Averaged(90.0, None, None, 1), Printed(88.8, 3.8)
    assert Comparison(None, "", "", ours, theirs).difference == pytest.approx(1.2)
    assert Comparison(None, "", "", ours, None).difference is None
    assert Comparison(None, "", "", None, theirs).difference is None


def test_the_fingerprint_is_about_results_alone():
    first, *_ = Case("mnist", "MNIST", "mnist").runs()
    same = replace(first, label="other", engine=EngineOptions(device="cpu", tf32=True))
    same = replace(same, evaluate=replace(first.evaluate, every=7))
    assert settings_digest(same) == settings_digest(first)
    assert settings_digest(replace(first, seed=1)) != settings_digest(first)
    changed = replace(first, train=replace(first.train, lr=0.5))
    assert settings_digest(changed) != settings_digest(first)


def test_centralised_training_has_no_stragglers_to_tell_runs_apart_by():
    (central,) = Case("mnist", "MNIST", "mnist").centralized()
    late = replace(central, schedule=replace(central.schedule, delta=0.8))
    assert settings_digest(late) == settings_digest(central)


def test_requests_for_one_run_become_one():
    first, *_ = Case("mnist", "MNIST", "mnist").runs()
    measured = replace(first, measure=replace(first.measure, every=5))
    one = Request("mnist", first, frozenset({"mmd"}))
    other = Request("mnist", measured, wishes=frozenset({"margin"}), checkpoint=True)
    (both,) = merged([one, other])
    assert both.config.measure.every == 5
    assert (both.needs, both.wishes, both.checkpoint) == ({"mmd"}, {"margin"}, True)
    assert not both.config.evaluate.validation
    judged = Request("mnist", first, validated=True)
    for asked, every in (([both, judged], 5), ([judged], first.measure.every)):
        (one,) = merged(asked)
        assert one.validated
        assert (one.config.evaluate.validation, one.config.measure.every) == (True, every)


def test_a_run_that_two_experiments_measure_is_measured_for_both():
    first, *_ = Scope("smoke").case("mnist").runs()
    options = replace(first.measure, every=1, what=("head", "loss"))
    other = replace(first, measure=options)
    (one,) = merged([Request("mnist", first), Request("mnist", other, needs=frozenset({"head"}))])
    assert one.config.measure.every == 1
    assert set(one.config.measure.what) == {*first.measure.what, "head"}


@pytest.mark.parametrize("name", ["synthetic", "mnist"])
def test_the_ablation_shares_runs_with_the_accuracy_table(name):
    case = Scope("paper").case(name)
    shared = {settings_digest(config): config for config in case.runs()}
    rows = case.runs(recipe=f"{name}-ablation")
    assert len(rows) == 33
    common = [config for config in rows if settings_digest(config) in shared]
    assert {config.title for config in common} == {"FedAvg", "FedProto", "Fairness + toleration"}
    assert all(config.measure.takes("mmd") for config in common)
    assert not any(config.measure.every for config in rows if config not in common)


def test_rows_of_claims_have_the_same_cohorts():
    """What a claim compares differs in how clients are drawn in no case."""
    for name in ("synthetic", "mnist"):
        runs = Scope("paper").case(name).runs(recipe=f"{name}-ablation")
        sampling = {config.title: config.schedule.sampling for config in runs}
        for claim in claims():
            if {claim.of, claim.than} <= set(sampling):
                assert sampling[claim.of] == sampling[claim.than], claim.claim


def test_a_measure_of_single_models_is_averaged_over_the_last_third():
    """The last one alone, 9.0 here, says more of the moment than of the method."""
    values = [None, 100.0, None, None, None, None, 3.0, None, 6.0, None, None, 9.0]
    assert final_value(result(values, metric="mmd").run, "mmd") == pytest.approx((6.0 + 9.0) / 2)
    scores = result([place / 12 for place in range(1, 13)]).run
    assert final_value(scores, "accuracy") == 1.0, "scores: the rounds on top of the nominal ones"


def test_the_first_rounds_of_a_run_whose_rate_falls_are_no_shorter_run():
    constant = result([0.1, 0.2, 0.3, 0.4]).run
    train = replace(constant.config.train, lr_schedule="polynomial")
    falling = replace(constant, config=replace(constant.config, train=train))
    assert [begins_as_run_of(constant, rounds) for rounds in (2, 4, 5)] == [True, True, False]
    assert [begins_as_run_of(falling, rounds) for rounds in (2, 4, 5)] == [False, True, False]


def test_conditions_of_a_seed_are_averaged_and_do_not_count_as_repetitions():
    under = {0.0: {0: 0.50, 1: 0.60}, 0.5: {0: 0.40, 1: 0.50}, 0.8: {0: 0.3, 1: 0.1, 2: 0.9}}
    ours = mean_per_seed(under.values())
    assert ours == pytest.approx({0: 0.4, 1: 0.4}), "seed 2 was not run under all conditions"
    assert difference([value - 0.3 for value in ours.values()]).pairs == 2, "no six pairs"


def test_a_library_of_nothing(tmp_path):
    first, *_ = Case("mnist", "MNIST", "mnist").runs()
    assert Library(tmp_path / "none").find(Request("mnist", first)) is None


def test_ffd_is_taken_within_delta_and_seed():
    def of(values):
        return [
            result([value], delta=delta, seed=seed, metric="mmd")
            for (delta, seed), value in values.items()
        ]

    ours = of({(0.0, 0): 0.25, (0.5, 0): 0.81, (0.5, 1): 0.2, (0.8, 0): 1.0})
    baseline = of({(0.0, 0): 1.0, (0.5, 0): 1.0, (0.5, 1): 0.0})
    found = discrepancy(ours, baseline)
    assert found.mean == pytest.approx((50 + 10) / 2)
    assert found.runs == 2
    farther, nearest = of({(0.0, 0): 2.25}), of({(0.0, 0): -0.01})
    assert discrepancy(farther, baseline).mean == pytest.approx(-50)
    assert discrepancy(nearest, baseline).mean == 100, "nearer than can be told"


@pytest.mark.parametrize("width", [3.4, 6.4, 12.4])
def test_a_legend_fits_the_picture(width):
    figure = new_figure(width, 4)
    axes = figure.subplots()
    names = (*METHODS, "Centralized (validation)")
    handles = {name: axes.plot([0, 1], **line_of(name))[0] for name in names}
    add_legend(figure, handles)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    shown, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= shown.x0 < shown.x1 <= whole.x1
    assert axes.get_tightbbox().y1 <= shown.y0


@pytest.mark.parametrize("files", [False, True], ids=["without files", "with files"])
@pytest.mark.parametrize("scale", SCALES)
def test_every_data_set_has_runs_at_every_scale(scale, files, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDPROTO_DATA", str(tmp_path))
    names = (*CLASSIFICATION, *SEGMENTATION)
    for name in names:
        folder = tmp_path / (DATASETS.get(name).folder or name)
        if files and not folder.exists():
            folder.mkdir()
            (folder / "something").touch()
    for name in names:
        case = Scope(scale).case(name)
        runs = case.runs()
        assert {config.title for config in runs} >= {"FedAvg", "FedProto", "Fairness + toleration"}
        assert len(case.centralized()) == 1
        real = scale == "paper" or name == "synthetic" or (
            scale == "quick" and files and name in CLASSIFICATION
        )  # fmt: skip
        assert bool(case.stands_in) != real, name
        rounds = runs[0].schedule.rounds
        assert rounds > nominal_rounds(rounds) or rounds < 6
