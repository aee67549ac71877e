"""The figures by which runs are compared, on curves made by hand."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from torch import nn

import fedproto
from fedproto import FedAvg, Federation, FedProx
from fedproto.api.table import comparison
from fedproto.data.synthetic import Synthetic
from fedproto.errors import ConfigError
from fedproto.report.arrangement import Arrangement, arrange
from fedproto.report.figures import FigureWidth, curves, save_figures
from fedproto.report.results import StoredRun, comparable, find_runs
from fedproto.report.style import line_styles
from fedproto.report.summary import summarize
from fedproto.strategies.fedavg import Centralized
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


def summarized(runs, metric="accuracy", target=None, baseline=None):
    return summarize(arrange(runs), metric, target, baseline)


def on(data, run):
    return replace(run, config=replace(run.config, data=data))


def titles_of(arrangement: Arrangement) -> list[str]:
    return [group.title for group in arrangement.groups]


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
    (row,) = summarized([stored([0.2, 0.4, 0.6, 0.8])], target=0.5)
    assert row.values["accuracy"] == (0.8, None)
    assert row.values["loss"][0] == pytest.approx(0.2)
    assert row.values["mean over rounds"][0] == pytest.approx(0.5)
    assert row.values["rounds to target"][0] == 3
    assert row.values["bytes up"][0] == 40
    assert row.values["bytes down"][0] == 400


def test_the_mean_over_rounds_is_the_plain_mean_of_all_tests():
    """Not that of a moving average, whose first values count the first tests several times."""
    values = [0.0] + [1.0] * 39
    (row,) = summarized([stored(values)])
    assert row.values["mean over rounds"][0] == pytest.approx(39 / 40)
    (row,) = summarized([stored([0.1, 0.9, 0.1, 0.1, 0.9, 0.9], rounds=20)], target=0.9)
    assert row.values["rounds to target"][0] == 2, "the first test that reaches it"
    assert row.values["mean over rounds"][0] == pytest.approx(3.0 / 6)


def test_losses_and_measures_are_means_over_the_same_window_as_scores():
    run = stored([0.5] * 38 + [0.2, 0.8])
    assert run.final("accuracy") == pytest.approx((0.5 + 0.5 + 0.2 + 0.8) / 4)
    assert run.final("loss") == pytest.approx(1 - run.final("accuracy"))
    (row,) = summarized([run])
    assert row.values["loss"][0] == pytest.approx(1 - row.values["accuracy"][0])


def test_unfinished_runs_are_compared_at_the_last_round_both_have_and_marked():
    runs = [stored([0.1, 0.2, 0.3, 0.4], seed=seed) for seed in range(3)]
    ahead = [
        stored([0.1, 0.3 + seed / 100], seed=seed, strategy=FedProx(), rounds=4)
        for seed in range(3)
    ]
    _, row = summarized([*runs, *ahead])
    assert row.against.at_round == 2
    assert row.against.difference.mean == pytest.approx(0.11), "0.31 after round 2, not 0.4"
    assert (row.rounds, row.planned) == (2, 4)
    done = [stored([0.1, 0.2, 0.3, 0.5], seed=seed, strategy=FedProx()) for seed in range(3)]
    begun = stored([0.9], seed=3, strategy=FedProx(), rounds=4)
    _, row = summarized([*runs, stored([0.1] * 4, seed=3), *done, begun])
    assert (row.against.at_round, row.against.difference.pairs) == (None, 3)
    assert row.against.difference.mean == pytest.approx(0.1), "three finished pairs are enough"


def test_words_follow_p_values_corrected_for_all_comparisons_of_the_table():
    base = [0.50, 0.60, 0.55, 0.52]
    gains = {"A": (0.01, 0.02, 0.032, 0.009), "B": (0.1, -0.1, 0.05, 0.0), "C": (0, 0, 0, 1e-4)}
    runs = [stored([v], seed=seed) for seed, v in enumerate(base)]
    runs += [
        stored([v + gain], seed=seed, strategy=FedProx(), label=label)
        for label, added in gains.items()
        for seed, (v, gain) in enumerate(zip(base, added, strict=True))
    ]
    rows = {row.title: row.against for row in summarized(runs)}
    assert rows["A"].difference.low > 0
    assert rows["A"].corrected_p == pytest.approx(3 * rows["A"].difference.p)
    words = {title: against.verdict for title, against in rows.items() if against}
    assert words == {"A": "unclear", "B": "unclear", "C": "equivalent"}
    assert {against.comparisons for against in rows.values() if against} == {3}
    assert rows["C"].margin == 0.01
    assert summarized(runs, "loss")[1].against.margin is None


def test_the_baseline_is_fedavg_or_the_method_with_most_pairs():
    def of(label, *seeds):
        return [stored([0.5], seed=seed, strategy=FedProx(), label=label) for seed in seeds]

    runs = [*of("A", 0), *of("B", 0, 1, 2), *of("C", 1, 2)]
    assert set(arrange(runs).baselines().values()) == {"B"}
    averaging = stored([0.5], label="FedAvg")
    assert set(arrange([*runs, averaging]).baselines().values()) == {"FedAvg"}
    pooled = stored([0.5], strategy=Centralized(), label="Centralized")
    assert set(arrange([pooled, *of("A", 0)]).baselines().values()) == {"A"}
    assert [row.against and row.against.baseline for row in summarized(runs)] == ["B", None, "B"]


def test_a_loss_reaches_its_target_from_above():
    (row,) = summarized([stored([0.2, 0.4, 0.6, 0.8])], "loss", target=0.5)
    assert row.values["rounds to target"][0] == 3


def test_a_target_that_one_seed_misses_is_not_averaged():
    group = [stored([0.2, 0.6]), stored([0.2, 0.3], seed=1)]
    (row,) = summarized(group, target=0.5)
    assert "rounds to target" not in row.values
    assert row.values["accuracy"] == pytest.approx((0.45, 0.15 * 2**0.5))


def every_so_often(interval, run):
    evaluate = replace(run.config.evaluate, every=interval)
    return replace(run, config=replace(run.config, evaluate=evaluate))


def test_runs_tested_at_different_rounds_are_compared_at_those_they_share():
    """Scores jump with the cohort: here every second round is a bad one for everybody."""
    often = every_so_often(1, on(Synthetic(), stored([0.1, 0.9] * 10, label="often")))
    seldom = every_so_often(2, on(Synthetic(), stored([None, 0.9] * 10, label="seldom")))
    assert often.smoothed("accuracy")[1][-1] == pytest.approx(0.5)
    rows = summarized([often, seldom])
    assert [row.values["accuracy"][0] for row in rows] == [pytest.approx(0.9)] * 2
    assert [row.rounds for row in rows] == [20, 20]


def test_rounds_are_shared_that_are_multiples_of_all_intervals():
    scores = [number / 10 for number in range(1, 8)]
    runs = [every_so_often(number, on(Synthetic(), stored(scores))) for number in (1, 2, 3)]
    assert [run.curve("accuracy")[0].tolist() for run in comparable(runs)] == [[6]] * 3
    begun = every_so_often(1, on(Synthetic(), stored([0.1], rounds=4)))
    assert comparable([begun, *runs])[0] == begun, "what has none of them keeps what it has"


def test_other_data_and_centralised_training_are_left_as_they_are():
    often, seldom = stored([0.1, 0.2]), every_so_often(2, stored([None, 0.2]))
    pooled = on(Synthetic(), stored([None, 0.2], strategy=Centralized()))
    others = [pooled, on(Synthetic(seed=1), seldom), on(None, seldom), on(None, often)]
    assert comparable([on(Synthetic(), often), *others]) == [on(Synthetic(), often), *others]
    first, *_ = comparable([on(Synthetic(), often), pooled, on(Synthetic(), seldom)])
    assert first.curve("accuracy")[0].tolist() == [2]


def test_runs_that_differ_only_in_the_seed_share_a_row():
    runs = [stored([0.1], seed=s, strategy=st) for st in (FedAvg(), FedProx()) for s in (0, 1)]
    assert [group.seeds for group in arrange(runs).groups] == [[0, 1], [0, 1]]


def test_equal_labels_are_told_apart_by_what_differs():
    runs = [stored([0.1], strategy=FedProx(mu=mu)) for mu in (0.1, 1.0)]
    assert titles_of(arrange(runs)) == ["fedprox (mu=0.1)", "fedprox (mu=1.0)"]
    named = [stored([0.1], label="A"), stored([0.1], label="B", strategy=FedProx())]
    assert titles_of(arrange(named)) == ["A", "B"]


def test_bookkeeping_splits_no_group():
    def changed(seed, **sections):
        run = stored([0.1, 0.2], seed=seed)
        parts = {
            name: replace(getattr(run.config, name), **options)
            for name, options in sections.items()
        }
        return replace(run, config=replace(run.config, **parts))

    runs = [
        changed(0),
        changed(1, engine={"name": "processes", "workers": 3}),
        changed(2, store={"checkpoint_every": 7}),
        changed(3, evaluate={"every": 2}),
        changed(4, measure={"every": 5, "reference": "elsewhere"}),
    ]
    (group,) = arrange(runs).groups
    assert group.seeds == [0, 1, 2, 3, 4]


def test_conditions_are_found_from_what_varies_and_named_by_little():
    def under(delta, data, strategy, **training):
        run = on(data, stored([0.1], strategy=strategy))
        schedule = replace(run.config.schedule, delta=delta)
        train = replace(run.config.train, **training)
        return replace(run, config=replace(run.config, schedule=schedule, train=train))

    few, many = Synthetic(clients=5), Synthetic(clients=9)
    runs = [
        under(delta, data, strategy, lr=0.1 if data is few else 0.2)
        for strategy in (FedAvg(), FedProx())
        for data in (few, many)
        for delta in (0.0, 0.5)
    ]
    found = arrange(runs)
    # The learning rate goes with the data and says nothing more.
    assert [condition.title for condition in found.conditions] == [
        "δ 0.0 · clients 5", "δ 0.0 · clients 9", "δ 0.5 · clients 5", "δ 0.5 · clients 9",
    ]  # fmt: skip
    assert [method.title for method in found.methods] == ["fedavg", "fedprox"]
    assert len(found.groups) == 8
    # A rate that was chosen per method belongs to the method.
    tuned = [
        under(0.0, few, FedAvg(), lr=0.1),
        under(0.0, few, FedProx(), lr=0.3),
    ]
    assert titles_of(arrange(tuned)) == ["fedavg", "fedprox"]
    assert len(arrange(tuned).conditions) == 1


def test_pooled_training_stands_beside_the_conditions_on_its_data():
    def with_delta(run, delta):
        schedule = replace(run.config.schedule, delta=delta)
        return replace(run, config=replace(run.config, schedule=schedule))

    runs = [with_delta(on(Synthetic(), stored([0.1])), delta) for delta in (0.0, 0.5)]
    runs.append(on(Synthetic(), stored([0.2], strategy=Centralized())))
    runs.append(on(Synthetic(seed=3), stored([0.2], strategy=Centralized())))
    groups = {group.title: group.conditions for group in arrange(runs).groups}
    assert groups["centralized"] == (0, 1)
    assert groups["fedavg · δ 0.0"] == (0,)
    assert len(groups) == 4


def test_verdicts_are_of_pairs_under_the_same_condition():
    base = [0.50, 0.60, 0.55]
    better = [value + gain for value, gain in zip(base, (0.10, 0.11, 0.09), strict=True)]
    runs = [stored([v], seed=seed) for seed, v in enumerate(base)]
    runs += [stored([v], seed=seed, strategy=FedProx()) for seed, v in enumerate(better)]
    runs.append(stored([0.9], seed=7, label="lonely"))
    first, second, third = summarized(runs)
    assert first.against is None
    assert second.against.baseline == "fedavg"
    assert second.against.verdict == "better"
    assert second.against.difference.mean == pytest.approx(0.1)
    assert second.against.corrected_p == second.against.difference.p
    assert third.against is None, "no seed in common"
    again = summarized(runs, "loss", baseline="fedprox")
    assert [row.against and row.against.verdict for row in again] == ["worse", None, None]
    with pytest.raises(ConfigError, match="did you mean 'fedprox'"):
        summarized(runs, baseline="fedprux")


def test_single_runs_are_compared_with_the_baseline_on_their_seed():
    runs = [stored([0.5 + seed / 10], seed=seed) for seed in range(3)]
    runs += [stored([0.6 + seed / 10], seed=seed, strategy=FedProx()) for seed in range(3)]
    rows = summarize(arrange(runs).split(), "accuracy")
    found = [row.against.difference.mean for row in rows if row.against]
    assert found == pytest.approx([0.1] * 3)
    assert {row.against.verdict for row in rows if row.against} == {"unclear"}
    assert {row.against.comparisons for row in rows if row.against} == {0}


def test_of_a_seed_that_is_stored_twice_the_longest_run_counts_and_it_is_said():
    long, short = stored([0.2, 0.4]), stored([0.9], rounds=2)
    found = arrange([short, long, stored([0.1, 0.5], seed=1)])
    assert [group.seeds for group in found.groups] == [[0, 1]]
    assert found.groups[0].runs[0] == long
    (notice,) = found.notices
    assert "seed 0 is stored 2 times (2 and 1 rounds)" in notice
    (row,) = summarize(found, "accuracy")
    assert row.values["accuracy"][0] == pytest.approx(0.45)
    assert arrange([long, long]).notices == (), "copies say nothing new"


def test_runs_of_different_length_are_not_the_same_condition():
    """The first rounds of a longer run, whose rate falls more slowly, are no shorter run."""
    runs = [stored([0.1, 0.2]), stored([0.1, 0.2, 0.3, 0.4])]
    assert [len(group.runs) for group in arrange(runs).groups] == [1, 1]
    assert [row.against for row in summarized(runs)] == [None, None]


def test_well_known_methods_keep_their_colours():
    alone, beside = line_styles(["FedProto"]), line_styles(["A", "B", "fedproto", "FedAvg"])
    assert alone[0].color == beside[2].color
    many = line_styles([f"method {place}" for place in range(32)])
    assert len(set(many)) == 32
    grown = line_styles(["A", "B", "fedproto", "FedAvg", "C"])
    assert grown[:4] == beside


def test_every_bundled_strategy_has_a_colour_and_dashes_of_its_own():
    from fedproto.strategies.base import STRATEGIES

    names = [*STRATEGIES.names(), "FedAvgM", "FedAdam", "Fairness + toleration"]
    looks = [line_styles(["X", "Y", "Z", name])[3] for name in names]
    assert len(set(looks)) == len(names)
    assert looks == [line_styles([name])[0] for name in names]


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize(
    ("kind", "start"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_figures_for_any_number_of_runs(tmp_path, count, kind, start):
    found = arrange([stored([0.1, 0.5, 0.7], label=f"run {place}") for place in range(count)])
    rows = summarize(found, "accuracy")
    for width in get_args(FigureWidth):
        written = save_figures(found, "accuracy", tmp_path, kind, width, rows)
        names = ["accuracy", "loss", *(["differences"] if count > 1 else [])]
        assert [path.stem for path in written] == names
        assert all(path.read_bytes().startswith(start) for path in written)


def test_figures_are_as_wide_as_a_column(tmp_path):
    from xml.etree import ElementTree

    found = arrange([stored([0.1, 0.5, 0.7], label=label) for label in "AB"])
    for width, points in (("column", 241.2), ("page", 496.8)):
        path, *_ = save_figures(found, "accuracy", tmp_path, "svg", width)
        root = ElementTree.fromstring(path.read_bytes())
        assert root.get("width") == f"{points:g}pt"


def test_equal_options_on_different_data_or_models_are_different_conditions(monkeypatch):
    """A folder of images changes, and arrays or modules of a program have no options at all."""

    def compared(prints, data=None):
        runs = [
            on(data, stored([0.1], strategy=FedProx() if place % 2 else None, seed=place // 2))
            for place in range(len(prints))
        ]
        known = dict(zip((id(run.config) for run in runs), prints, strict=True))
        monkeypatch.setattr(StoredRun, "fingerprint", lambda run: known[id(run.config)])
        return arrange(runs)

    for data in (None, Synthetic()):
        row, other = summarize(compared(["a"] * 4, data), "accuracy")
        assert (row.condition, other.against.difference.pairs) == ("", 2)
        found = compared(["a", "b"] * 2, data)
        assert [one.title for one in found.conditions] == ["fingerprint a", "fingerprint b"]
        assert [row.against for row in summarize(found, "accuracy")] == [None, None]
        assert len(compared(["a", "a", "b", "b"], data).conditions) == 1, "data may follow seeds"
        assert len(compared(["a", "", "a", ""], data).conditions) == 1, "of older runs none is kept"


@pytest.mark.parametrize("what", ["data", "model"])
def test_what_a_program_brought_has_a_fingerprint(what, tmp_path):
    """Arrays with other numbers, and modules with other layers, have no options to differ in."""
    prints = []
    for place in (0, 1):
        rng = np.random.RandomState(place if what == "data" else 0)
        shares = [(rng.randn(9, 5), np.arange(9) % 3) for _ in range(2)]
        width = 4 + place if what == "model" else 4
        net = nn.Sequential(nn.Linear(5, width), nn.Linear(width, 3))
        options = {"rounds": 1, "cohort": 2, "epochs": 1, "out": tmp_path / str(place)}
        fedproto.run(Federation.from_clients(shares), net, "fedavg", **options)
        (run,) = find_runs([tmp_path / str(place)])
        prints.append(run.fingerprint())
    assert prints[0] != prints[1]
    assert {len(one) for one in prints} == {12}


def test_exports_have_fractions_bytes_and_seconds_and_name_no_other_unit():
    """Scores as percentages and traffic in megabytes are for reading alone."""
    table = comparison(summarized([stored([0.2, 0.4, 0.6, 0.8])]), "accuracy")
    (row,) = csv.DictReader(table.to_csv().splitlines())
    expected = {"accuracy": 0.8, "mean over rounds": 0.5, "bytes up": 40, "bytes down": 400}
    assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
    assert float(row["seconds"]) == pytest.approx(4 * 0.5)
    assert not [name for name in row if "%" in name or "MB" in name]
    (shown,) = [dict(zip(*table.cells(), strict=True))]
    assert (shown["accuracy %"], shown["MB"]) == ("80.0", "0.0")


def test_a_figure_has_a_panel_for_each_condition_with_the_metric():
    runs = [on(Synthetic(seed=seed), stored([0.1, 0.2])) for seed in (0, 1)]
    runs.append(on(Synthetic(seed=2), stored([None, None])))
    titles = [axes.get_title() for axes in curves(arrange(runs), "accuracy").axes]
    assert titles == ["data seed 0", "data seed 1"]
