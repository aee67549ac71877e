"""Intervals, tests and verdicts against SciPy's and against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedproto.report.evidence import (
    difference,
    holm,
    sample_deviation,
    sign_test,
    t_quantile,
    t_within,
)

stats = pytest.importorskip("scipy.stats")


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


@given(st.lists(st.floats(-100, 100, allow_nan=False), min_size=2, max_size=12))
def test_differences_are_scipys_paired_test(values):
    if sample_deviation(values) < 1e-6:
        return
    found, expected = difference(values), stats.ttest_1samp(values, 0)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-7)
    if found.wins + found.losses:
        exact = stats.binomtest(found.wins, found.wins + found.losses).pvalue
        assert found.sign_p == pytest.approx(exact)


def test_paired_differences_by_hand():
    found = difference([1.0, 2.0, 3.0])
    half = 4.302652729911275 / math.sqrt(3)  # Student's t, two degrees of freedom
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - half, 2 + half))
    assert (found.wins, found.losses, found.sign_p) == (3, 0, pytest.approx(0.25))


def test_what_few_or_equal_pairs_say():
    one = difference([2.0])
    assert (one.pairs, one.mean, one.low, one.p) == (1, 2.0, None, None)
    assert one.verdict() == "too few seeds"
    assert difference([2.0, 2.1]).low is not None
    assert difference([2.0, 2.1]).verdict() == "too few seeds"
    alike = difference([0.0, 0.0, 0.0])
    assert (alike.verdict(), alike.p, alike.sign_p) == ("level", 1.0, None)
    constant = difference([1.0, 1.0, 1.0])
    assert (constant.low, constant.high, constant.p) == (1.0, 1.0, 0.0)
    assert constant.verdict() == "better"


@pytest.mark.parametrize(
    ("values", "score", "loss"),
    [
        ([1.0, 1.1, 0.9], "better", "worse"),
        ([-1.0, -1.1, -0.9], "worse", "better"),
        ([1.0, -1.1, 0.9], "level", "level"),
    ],
)
def test_a_verdict_knows_which_way_is_good(values, score, loss):
    assert difference(values).verdict() == score
    assert difference(values).verdict(lower_is_better=True) == loss


def test_the_sign_test_by_hand():
    assert sign_test(3, 0) == pytest.approx(0.25)
    assert sign_test(2, 2) == 1
    assert sign_test(0, 0) is None


def test_holms_correction_by_hand():
    assert holm([0.01, 0.04, None, 0.03]) == pytest.approx([0.03, 0.06, None, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
