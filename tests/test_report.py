"""The figures by which runs are compared, on curves made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedproto import FedAvg, FedProx
from fedproto.data.synthetic import Synthetic
from fedproto.report.figures import draw_attention, draw_curves
from fedproto.report.results import StoredRun, group_by_seed, titles
from fedproto.report.shared import at_shared_rounds, comparable
from fedproto.report.summary import summarize
from fedproto.strategies.centralized import Centralized
from fedproto.types import RoundRecord
from helpers import config_of


def stored(values, *, seed=0, strategy=None, label="", rounds=None) -> StoredRun:
    config = config_of(strategy or FedAvg(), rounds=rounds or len(values), seed=seed)
    records = [
        RoundRecord(
            t, [0, 1], [], [], {0: 1, 1: 1}, {0: 0.25, 1: 0.75},
            {} if v is None else {"accuracy": v, "loss": 1 - v}, 100, 10, 0.5,
        )
        for t, v in enumerate(values)
    ]  # fmt: skip
    return StoredRun(Path("run"), replace(config, label=label), records)


def test_the_moving_average_spans_a_tenth_of_the_rounds():
    run = stored([0.0, 0.1, 0.2, 0.3, 0.4], rounds=20)
    rounds, values = run.smoothed("accuracy")
    assert rounds.tolist() == [1, 2, 3, 4, 5]
    assert values.tolist() == pytest.approx([0.0, 0.05, 0.15, 0.25, 0.35])


def test_rounds_without_a_test_are_left_out_of_the_average():
    rounds, values = stored([None, 0.2, None, 0.4], rounds=40).smoothed("accuracy")
    assert rounds.tolist() == [2, 4]
    assert values.tolist() == pytest.approx([0.2, 0.3])


def test_a_summary_by_hand():
    (row,) = summarize([[stored([0.2, 0.4, 0.6, 0.8])]], "accuracy", target=0.5)
    assert row.values["accuracy"] == (0.8, 0)
    assert row.values["loss"][0] == pytest.approx(0.2)
    assert row.values["area"][0] == pytest.approx(0.5)
    assert row.values["rounds to target"][0] == 3
    assert row.values["bytes up"][0] == 40
    assert row.values["bytes down"][0] == 400


def test_a_loss_reaches_its_target_from_above():
    (row,) = summarize([[stored([0.2, 0.4, 0.6, 0.8])]], "loss", target=0.5)
    assert row.values["rounds to target"][0] == 3


def test_a_target_that_one_seed_misses_is_not_averaged():
    group = [stored([0.2, 0.6]), stored([0.2, 0.3], seed=1)]
    (row,) = summarize([group], "accuracy", target=0.5)
    assert "rounds to target" not in row.values
    assert row.values["accuracy"] == (pytest.approx(0.45), pytest.approx(0.15))


def test_runs_tested_at_different_rounds_are_compared_at_those_they_share():
    """Scores jump with the cohort: here every second round is a bad one for everybody."""
    often, seldom = (
        replace(run, config=replace(run.config, data=Synthetic(), label=label))
        for label, run in {
            "often": stored([0.1, 0.9] * 10),
            "seldom": stored([None, 0.9] * 10),
        }.items()
    )
    assert often.smoothed("accuracy")[1][-1] == pytest.approx(0.5)
    rows = summarize([[often], [seldom]], "accuracy", None)
    assert [row.values["accuracy"][0] for row in rows] == [pytest.approx(0.9)] * 2
    assert [row.rounds for row in rows] == [20, 20]


def test_a_run_that_is_not_so_far_takes_nothing_away_from_the_others():
    whole, begun = stored([0.1, 0.2, 0.3, 0.4]), stored([None, 0.5], rounds=4)
    first, second = at_shared_rounds([whole, begun])
    assert first.curve("accuracy")[0].tolist() == [2, 3, 4]
    assert second == begun
    untested = stored([None] * 4)
    assert at_shared_rounds([whole, untested]) == [whole, untested]
    odd, even = stored([0.1, None, 0.3, None]), stored([None, 0.2, None, 0.4])
    assert at_shared_rounds([odd, even]) == [odd, even]
    hardly = stored([0.1], rounds=4)
    first, second, third = at_shared_rounds([whole, even, hardly])
    assert first.curve("accuracy")[0].tolist() == [2, 4]
    assert [second, third] == [even, hardly]


def test_other_data_and_centralised_training_are_left_as_they_are():
    def on(data, run):
        return replace(run, config=replace(run.config, data=data))

    often, seldom = stored([0.1, 0.2]), stored([None, 0.2])
    pooled = on(Synthetic(), stored([None, 0.2], strategy=Centralized()))
    others = [pooled, on(Synthetic(seed=1), seldom), on(None, seldom), on(None, often)]
    assert comparable([on(Synthetic(), often), *others]) == [on(Synthetic(), often), *others]
    first, *_ = comparable([on(Synthetic(), often), pooled, on(Synthetic(), seldom)])
    assert first.curve("accuracy")[0].tolist() == [2]


def test_runs_that_differ_only_in_the_seed_share_a_row():
    runs = [stored([0.1], seed=s, strategy=st) for st in (FedAvg(), FedProx()) for s in (0, 1)]
    assert [len(group) for group in group_by_seed(runs)] == [2, 2]


def test_equal_labels_are_told_apart_by_what_differs():
    runs = [stored([0.1], strategy=FedProx(mu=mu)) for mu in (0.1, 1.0)]
    assert titles(group_by_seed(runs)) == ["fedprox (mu=0.1)", "fedprox (mu=1.0)"]
    named = [stored([0.1], label="A"), stored([0.1], label="B", strategy=FedProx())]
    assert titles(group_by_seed(named)) == ["A", "B"]


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_figures_for_any_number_of_runs(tmp_path, count):
    groups = [[stored([0.1, 0.5, 0.7], label=f"run {place}")] for place in range(count)]
    for draw in (lambda p: draw_curves(groups, "accuracy", p), lambda p: draw_attention(groups, p)):
        path = draw(tmp_path / "figure.png")
        assert path.read_bytes().startswith(b"\x89PNG")
