"""Every statistic against SciPy's on random data, and against numbers worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedproto.report.statistics import (
    difference,
    holm,
    judge,
    moving_average,
    rounds_to_target,
    sample_deviation,
    score_at,
    t_quantile,
    t_within,
    window_width,
)

stats = pytest.importorskip("scipy.stats")

VALUES = st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=12)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 8, 13, 30, 101, 500])
def test_students_t_is_scipys(freedom):
    for sure in (0.5, 0.9, 0.95, 0.999):
        expected = stats.t.ppf((1 + sure) / 2, freedom)
        assert t_quantile(freedom, sure) == pytest.approx(expected, rel=1e-10)
    for t in (0.0, 0.1, 1.0, 2.5, 7.0):
        assert t_within(t, freedom) == pytest.approx(1 - 2 * stats.t.sf(t, freedom), abs=1e-13)


def test_students_t_with_two_degrees_of_freedom_by_hand():
    # P(|T| < t) = t / sqrt(2 + t²), so the quantile of 0.95 is sqrt(2 · 0.95² / (1 − 0.95²)).
    assert t_quantile(2) == pytest.approx((2 * 0.9025 / 0.0975) ** 0.5)


@given(VALUES)
def test_differences_are_scipys_paired_test(values):
    if sample_deviation(values) < 1e-6:
        return
    assert sample_deviation(values) == pytest.approx(stats.tstd(values), abs=1e-9)
    found, expected = difference(values), stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-7)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holms_correction_controls_as_scipys_step_down_would(values):
    # SciPy has no Holm; by definition it is the running maximum of (m − rank) · p.
    order = np.argsort(values, kind="stable")
    steps = (len(values) - np.arange(len(values))) * np.asarray(values)[order]
    expected = np.minimum(1, np.maximum.accumulate(steps))
    assert np.asarray(holm(values))[order] == pytest.approx(expected)
    # Holm is never weaker than Bonferroni and never below Benjamini and Hochberg's.
    corrected = np.asarray(holm(values))
    assert (corrected <= np.minimum(1, len(values) * np.asarray(values)) + 1e-12).all()
    assert (corrected >= stats.false_discovery_control(values) - 1e-12).all()


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_paired_differences_by_hand():
    found = difference([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)  # Student's t, two degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    assert (found.wins, found.losses) == (3, 0)


def words(*lists, **options) -> list[str]:
    return [verdict.word for verdict in judge([difference(values) for values in lists], **options)]


def test_few_or_equal_pairs():
    one = difference([2.0])
    assert (one.pairs, one.mean, one.low, one.p) == (1, 2.0, None, None)
    assert words([2.0], [2.0, 2.1]) == ["unclear", "unclear"], "too few seeds"
    (verdict,) = judge([difference([2.0, 2.1])])
    assert (verdict.p, verdict.comparisons) == (None, 0)
    alike = difference([0.0, 0.0, 0.0])
    assert alike.p == 1.0
    assert words([0.0] * 3) == ["unclear"]
    assert words([0.0] * 3, margin=0.01) == ["equivalent"]
    constant = difference([1.0, 1.0, 1.0])
    assert (constant.low, constant.high, constant.p) == (1.0, 1.0, 0.0)
    assert words([1.0] * 3) == ["better"]


@pytest.mark.parametrize(
    ("values", "score", "loss"),
    [
        ([1.0, 1.1, 0.9], "better", "worse"),
        ([-1.0, -1.1, -0.9], "worse", "better"),
        ([1.0, -1.1, 0.9], "unclear", "unclear"),
    ],
)
def test_a_word_depends_on_whether_low_values_are_good(values, score, loss):
    assert words(values) == [score]
    assert words(values, lower=True) == [loss]


def test_a_wide_interval_is_unclear_and_a_narrow_one_equivalent():
    wide, narrow = [-0.5, 0.4, -0.3], [0.001, -0.002, 0.0015]
    assert words(wide, narrow, margin=0.01) == ["unclear", "equivalent"]
    assert words(narrow) == ["unclear"], "without a margin nothing is equivalent"


def test_the_word_follows_the_corrected_p_value():
    """An interval without zero is no difference when many comparisons are made."""
    hardly = [1.0, 2.0, 3.2, 0.9]
    found = difference(hardly)
    assert found.low > 0
    assert words(hardly) == ["better"]
    others = [[0.3, -0.2, 0.1, -0.1]] * 4
    assert words(hardly, *others)[0] == "unclear"
    verdicts = judge([found, *map(difference, others), None, difference([1.0])])
    assert [verdict and verdict.comparisons for verdict in verdicts] == [5, 5, 5, 5, 5, None, 5]
    assert verdicts[0].p == pytest.approx(5 * found.p)


@pytest.mark.parametrize(("rounds", "width"), [(5, 1), (14, 1), (15, 2), (25, 3), (200, 20)])
def test_halves_of_a_window_are_rounded_up(rounds, width):
    assert window_width(rounds) == width


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 12))
def test_a_moving_average_is_that_of_a_convolution(values, width):
    rounds, values = np.arange(1, len(values) + 1), np.array(values)
    sums = np.convolve(values, np.ones(width))[: len(values)]
    counts = np.convolve(np.ones(len(values)), np.ones(width))[: len(values)]
    assert moving_average(rounds, values, width) == pytest.approx(sums / counts)


def test_scores_at_a_round_and_rounds_to_a_target_by_hand():
    rounds, values = np.array([2, 4, 6, 8]), np.array([0.1, 0.5, 0.3, 0.7])
    assert score_at(rounds, values, 4) == pytest.approx(0.5)
    assert score_at(rounds, values, 4, until=7) == pytest.approx(0.4)
    assert score_at(rounds, values, 4, until=1) is None
    assert rounds_to_target(rounds, values, 0.5, lower=False) == 4
    assert rounds_to_target(rounds, values, 0.9, lower=False) is None
    assert rounds_to_target(rounds, values, 0.1, lower=True) == 2
