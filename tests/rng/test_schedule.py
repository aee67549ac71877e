"""Cohorts, stragglers, epochs and batch orders are functions of seed, round and client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.rng import Purpose, schedule, seeded, stream, torch_seed

SIZES = np.array([10, 20, 30, 40, 500, 60, 70, 80, 90, 100])


def test_streams_are_the_ones_that_results_were_made_with():
    # The numbers are pinned: if they change, no published run can be repeated.
    assert stream(0, Purpose.COHORT, 0).randint(0, 1000, 4).tolist() == [444, 693, 246, 218]
    assert torch_seed(1, Purpose.MODEL) == 1810265581
    assert schedule.cohort(0, 0, SIZES, 4, "size") == [1, 4, 8, 9]


@given(st.integers(0, 1000), st.integers(0, 50), st.integers(1, 10))
def test_a_cohort_is_distinct_sorted_and_repeatable(seed, round_, number):
    for sampling in ("size", "uniform"):
        cohort = schedule.cohort(seed, round_, SIZES, number, sampling)
        assert cohort == sorted(set(cohort))
        assert len(cohort) == number
        assert cohort == schedule.cohort(seed, round_, SIZES, number, sampling)


def test_cohorts_differ_between_rounds_and_seeds():
    cohorts = {
        tuple(schedule.cohort(seed, round_, SIZES, 3, "uniform"))
        for seed in range(3)
        for round_ in range(20)
    }
    assert len(cohorts) > 20


def test_sampling_by_size_and_uniformly():
    draws = 4000
    for sampling, weight in (("size", SIZES / SIZES.sum()), ("uniform", np.full(10, 0.1))):
        counts = np.zeros(10)
        for round_ in range(draws):
            counts[schedule.cohort(3, round_, SIZES, 1, sampling)] += 1
        # five standard deviations of a binomial count
        assert (abs(counts / draws - weight) < 5 * np.sqrt(weight * (1 - weight) / draws)).all()


@given(st.integers(0, 1000), st.integers(1, 20), st.floats(0, 1))
def test_the_number_of_stragglers(seed, number, delta):
    cohort = list(range(0, 2 * number, 2))
    slow = schedule.stragglers(seed, 0, cohort, delta)
    assert len(slow) == round(delta * number)
    assert set(slow) <= set(cohort)


def test_stragglers_at_a_smaller_delta_are_among_those_at_a_larger():
    cohort = list(range(10))
    for round_ in range(20):
        some = schedule.stragglers(0, round_, cohort, 0.5)
        most = schedule.stragglers(0, round_, cohort, 0.8)
        assert set(some) < set(most)


def test_partial_epochs_are_uniform_and_never_complete():
    drawn = [schedule.partial_epochs(0, round_, 7, 4) for round_ in range(4000)]
    counts = np.bincount(drawn)
    assert len(counts) == 4
    assert (abs(counts - 1000) < 150).all()


def test_a_straggler_with_one_epoch_does_nothing():
    assert {schedule.partial_epochs(seed, 0, 0, 1) for seed in range(20)} == {0}


def test_stragglers_may_do_an_epoch_at_least_as_in_fedproxs_code():
    drawn = [schedule.partial_epochs(0, round_, 7, 4, least=1) for round_ in range(400)]
    assert set(drawn) == {1, 2, 3}
    assert {schedule.partial_epochs(seed, 0, 0, 1, least=1) for seed in range(20)} == {0}


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 4))
def test_each_epoch_visits_every_sample_once(num_examples, batch_size, epochs):
    order = schedule.BatchOrder(0, 1, 2, num_examples, batch_size, epochs)
    visited = list(order)
    assert len(visited) == epochs
    for batches in visited:
        assert sorted(np.concatenate(batches).tolist()) == list(range(num_examples))
        assert all(len(batch) == batch_size for batch in batches[:-1])
    assert sum(len(batches) for batches in visited) == order.steps


def test_partial_work_is_a_prefix_of_the_whole():
    whole = list(schedule.BatchOrder(0, 1, 2, 25, 10, 5))
    part = list(schedule.BatchOrder(0, 1, 2, 25, 10, 3))
    for ours, theirs in zip(part, whole, strict=False):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_orders_differ_between_epochs_rounds_and_clients():
    base = schedule.BatchOrder(0, 1, 2, 50, 10, 2)
    others = [
        base.epoch(1),
        schedule.BatchOrder(0, 2, 2, 50, 10, 2).epoch(0),
        schedule.BatchOrder(0, 1, 3, 50, 10, 2).epoch(0),
        schedule.BatchOrder(1, 1, 2, 50, 10, 2).epoch(0),
    ]
    assert not any(np.array_equal(base.epoch(0), other) for other in others)


@pytest.mark.parametrize("max_steps", [1, 3, 5, 6])
def test_a_step_budget_cuts_inside_an_epoch(max_steps):
    order = schedule.BatchOrder(0, 0, -1, 30, 10, 2, max_steps)
    assert sum(len(batches) for batches in order) == order.steps == max_steps


@given(st.integers(0, 50), st.integers(1, 30), st.integers(0, 9))
def test_a_cohort_is_that_of_a_full_sort(number, clients, seed):
    sizes = np.arange(1, clients + 1)
    arrival = stream(seed, Purpose.COHORT, 0).exponential(size=clients) / sizes
    expected = sorted(np.argsort(arrival, kind="stable")[:number].tolist())
    assert schedule.cohort(seed, 0, sizes, number, "size") == expected


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_a_cpu_draws_the_same_without_a_look_for_other_devices(monkeypatch, device):
    before = torch.get_rng_state()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.set_rng_state(before)
    monkeypatch.delattr(torch, "manual_seed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with seeded(7, device):
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), before)
