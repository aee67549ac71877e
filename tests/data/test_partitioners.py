"""What holds for every partitioner, and what each is for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedproto.data.federation import hold_out, split_clients
from fedproto.data.partition import (
    by_classes,
    by_classes_and_sizes,
    by_dirichlet,
    by_dirichlet_of_equal_sizes,
    by_dirichlet_per_class,
    by_key,
    by_quantity,
    iid,
    sort_and_partition,
    within_groups,
)
from fedproto.errors import DataError

PARTITIONERS = {
    "classes": lambda labels, rng, clients: by_classes(
        labels, rng, clients=clients, classes_per_client=2, minimum=1
    ),
    "class-sizes": lambda labels, rng, clients: by_classes_and_sizes(
        labels, rng, clients=clients, classes_per_client=2, mean_size=10, sigma=1.0
    ),
    "dirichlet": lambda labels, rng, clients: by_dirichlet(labels, rng, clients=clients, alpha=0.1),
    "dirichlet-equal": lambda labels, rng, clients: by_dirichlet_of_equal_sizes(
        labels, rng, clients=clients, alpha=0.1
    ),
    "dirichlet-class": lambda labels, rng, clients: by_dirichlet_per_class(
        labels, rng, clients=clients, alpha=0.5, min_size=1
    ),
    "quantity": lambda labels, rng, clients: by_quantity(
        labels, rng, clients=clients, alpha=1.0, min_size=1
    ),
    "groups": lambda labels, rng, clients: within_groups(labels, rng, clients=clients),
    "iid": lambda labels, rng, clients: iid(labels, rng, clients=clients),
    "sorted": lambda labels, rng, clients: sort_and_partition(
        labels, rng, clients=clients, shards_per_client=2
    ),
}
COVERING = tuple(name for name in PARTITIONERS if name != "class-sizes")


@st.composite
def problems(draw):
    """Labels in which each of two to five classes has enough samples for all clients."""
    clients = draw(st.integers(5, 12))
    counts = draw(st.lists(st.integers(2 * clients, 60), min_size=2, max_size=5))
    order = np.random.RandomState(draw(st.integers(0, 1000)))
    return order.permutation(np.repeat(np.arange(len(counts)), counts)), clients


@pytest.mark.parametrize("name", PARTITIONERS)
@given(problem=problems(), seed=st.integers(0, 2**31))
def test_every_sample_at_most_once_no_empty_client_and_deterministic(name, problem, seed):
    labels, clients = problem
    parts = PARTITIONERS[name](labels, np.random.RandomState(seed), clients)
    again = PARTITIONERS[name](labels, np.random.RandomState(seed), clients)
    together = np.concatenate(parts)

    assert len(parts) == clients
    assert all(len(part) > 0 for part in parts)
    assert len(np.unique(together)) == len(together)
    assert together.min() >= 0
    assert together.max() < len(labels)
    if name in COVERING:
        assert len(together) == len(labels)
    for part, other in zip(parts, again, strict=True):
        np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize("name", PARTITIONERS)
def test_another_seed_shares_out_otherwise(name):
    labels = np.repeat(np.arange(5), 40)
    one = PARTITIONERS[name](labels, np.random.RandomState(0), 8)
    other = PARTITIONERS[name](labels, np.random.RandomState(1), 8)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    clients=st.integers(1, 20),
    alpha=st.sampled_from([1e-8, 0.01, 0.1, 1.0, 1e6]),
    seed=st.integers(0, 2**31),
)
def test_equal_dirichlet_sizes_differ_by_at_most_one(counts, clients, alpha, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    assume(clients <= len(labels))
    parts = by_dirichlet_of_equal_sizes(
        labels, np.random.RandomState(seed), clients=clients, alpha=alpha
    )
    sizes = [len(part) for part in parts]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))


def test_equal_dirichlet_takes_turns_as_the_rule_says():
    """Against the rule in words, turn by turn: draw again while the class is used up.

    Both are random, so what is compared is how often a client's largest class is how large.
    """
    labels, clients, alpha = np.repeat(np.arange(5), 40), 10, 0.3

    def by_turns(rng):
        mixes = rng.dirichlet([alpha] * 5, size=clients)
        left, taken = np.full(5, 40), np.zeros((clients, 5), dtype=int)
        for client in rng.permutation(np.repeat(np.arange(clients), 20)):
            mix = np.where(left > 0, mixes[client], 0) + 1e-300 * (left > 0)
            label = rng.choice(5, p=mix / mix.sum())
            left[label] -= 1
            taken[client, label] += 1
        return taken

    def ours(rng):
        parts = by_dirichlet_of_equal_sizes(labels, rng, clients=clients, alpha=alpha)
        return np.array([np.bincount(labels[part], minlength=5) for part in parts])

    def largest(method):
        draws = [method(np.random.RandomState(seed)) for seed in range(150)]
        return np.mean([np.sort(counts, axis=1) for counts in draws], axis=(0, 1))

    np.testing.assert_allclose(largest(ours), largest(by_turns), atol=0.6)


def test_per_class_dirichlet_leaves_out_clients_that_have_their_even_share():
    """With α near 0 a class goes to one client, and the next class to another one."""
    labels = np.repeat(np.arange(4), 25)
    parts = by_dirichlet_per_class(
        labels, np.random.RandomState(0), clients=4, alpha=1e-6, min_size=1
    )
    assert [len(np.unique(labels[part])) for part in parts] == [1] * 4
    assert [len(part) for part in parts] == [25] * 4


def test_per_class_dirichlet_has_unequal_sizes_above_the_minimum():
    labels = np.repeat(np.arange(10), 500)
    parts = by_dirichlet_per_class(
        labels, np.random.RandomState(0), clients=20, alpha=0.3, min_size=30
    )
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 30
    assert sizes.std() > 50


def test_quantity_skew_keeps_the_mix_of_classes():
    labels = np.repeat(np.arange(4), 5000)
    parts = by_quantity(labels, np.random.RandomState(0), clients=5, alpha=0.5, min_size=200)
    sizes = np.array([len(part) for part in parts])
    assert sizes.min() >= 200
    assert sizes.max() > 2 * sizes.min()
    for part in parts:
        assert np.abs(np.bincount(labels[part]) / len(part) - 0.25).max() < 0.1


def test_clients_of_a_group_share_it_evenly():
    """Two of three groups have two of five clients, by hand: sizes 5+5, 4+3 and 6."""
    groups = np.repeat([7, 8, 9], [10, 7, 6])
    parts = within_groups(groups, np.random.RandomState(0), clients=5)
    assert [np.unique(groups[part]).tolist() for part in parts] == [[7], [8], [9], [7], [8]]
    assert [len(part) for part in parts] == [5, 4, 6, 5, 3]


@given(keys=st.lists(st.integers(0, 6), min_size=1, max_size=60), minimum=st.integers(1, 4))
def test_by_key_gives_a_client_to_each_key_with_enough_samples(keys, minimum):
    wanted = {key: keys.count(key) for key in keys if keys.count(key) >= minimum}
    if not wanted:
        with pytest.raises(DataError, match="lower the minimum"):
            by_key(np.array(keys), minimum=minimum)
        return
    parts = by_key(np.array(keys), minimum=minimum)
    assert [len(part) for part in parts] == [wanted[key] for key in sorted(wanted)]
    for key, part in zip(sorted(wanted), parts, strict=True):
        assert {keys[place] for place in part} == {key}


def test_sizes_of_dirichlet_do_not_depend_on_the_concentration_or_the_classes():
    labels = np.repeat(np.arange(6), 50)
    sizes = [
        [len(part) for part in by_dirichlet(kept, np.random.RandomState(3), clients=20, alpha=a)]
        for a, kept in ((0.01, labels), (1000.0, labels), (0.1, labels // 3))
    ]
    assert sizes[0] == sizes[1] == sizes[2]


def test_a_low_concentration_gives_few_classes_and_a_high_one_all():
    labels = np.repeat(np.arange(10), 200)

    def mean_classes(alpha):
        parts = by_dirichlet(labels, np.random.RandomState(0), clients=20, alpha=alpha)
        return np.mean([len(np.unique(labels[part])) for part in parts])

    assert mean_classes(0.01) < 3
    assert mean_classes(1000.0) > 9.9


@pytest.mark.parametrize("alpha", [1e-8, 1e-3, 1e6])
def test_extreme_concentrations_still_share_everything_out(alpha):
    labels = np.repeat(np.arange(4), [1, 10, 100, 1000])
    parts = by_dirichlet(labels, np.random.RandomState(0), clients=30, alpha=alpha)
    assert sorted(np.concatenate(parts)) == list(range(1111))


def test_the_last_clients_are_as_mixed_as_the_first():
    labels = np.repeat(np.arange(10), 200)
    parts = by_dirichlet(labels, np.random.RandomState(0), clients=20, alpha=1000.0)
    assert all(len(np.unique(labels[part])) == 10 for part in parts[-3:])


def test_a_class_that_runs_short_is_shared_in_proportion_and_nothing_takes_its_place():
    labels = np.array([0] * 1000 + [1] * 10)
    plenty = np.array([0] * 1000 + [1] * 1000)
    options = {"clients": 4, "classes_per_client": 2, "mean_size": 60.0, "sigma": 0.5}
    short = by_classes_and_sizes(labels, np.random.RandomState(0), **options)
    full = by_classes_and_sizes(plenty, np.random.RandomState(0), **options)

    for part, wanted in zip(short, full, strict=True):
        assert (labels[part] == 0).sum() == (plenty[wanted] == 0).sum()
        assert 1 <= (labels[part] == 1).sum() < (plenty[wanted] == 1).sum()
    assert sum((labels[part] == 1).sum() for part in short) == 10


def test_sort_and_partition_with_one_shard_gives_one_class_where_classes_divide_evenly():
    labels = np.random.RandomState(0).permutation(np.repeat(np.arange(5), 20))
    parts = sort_and_partition(labels, np.random.RandomState(1), clients=10)
    assert [len(np.unique(labels[part])) for part in parts] == [1] * 10


def test_iid_sizes_differ_by_at_most_one():
    sizes = [
        len(part) for part in iid(np.zeros(103, dtype=int), np.random.RandomState(0), clients=10)
    ]
    assert sorted(sizes) == [10] * 7 + [11] * 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda y, r: by_classes(y, r, clients=3, classes_per_client=4),
            "classes_per_client must be between 1 and the 3 classes, not 4",
        ),
        (
            lambda y, r: by_classes_and_sizes(
                y, r, clients=3, classes_per_client=4, mean_size=3, sigma=1
            ),
            "classes_per_client must be between 1 and the 3 classes, not 4",
        ),
        (
            lambda y, r: by_dirichlet_of_equal_sizes(y, r, clients=31, alpha=1.0),
            "clients must be between 1 and the 30 samples",
        ),
        (
            lambda y, r: by_dirichlet_per_class(y, r, clients=10, alpha=0.01, min_size=3),
            "raise alpha, or lower clients or min_size",
        ),
        (
            lambda y, r: by_quantity(y, r, clients=10, alpha=0.01, min_size=3),
            "fewer than 3 samples in each of 1000 draws",
        ),
        (lambda y, r: within_groups(y, r, clients=2), "clients must be at least 3"),
        (lambda y, r: iid(y, r, clients=31), "clients must be between 1 and the 30 samples"),
        (
            lambda y, r: sort_and_partition(y, r, clients=10, shards_per_client=4),
            "shards_per_client must be between 1 and 3",
        ),
        (
            lambda y, r: by_classes(y, r, clients=3, classes_per_client=2, sigma=1e4),
            "sizes that differ so much cannot be drawn; lower sigma",
        ),
        (lambda y, r: by_dirichlet(y, r, clients=3, alpha=1.0, gamma=1e-3), "raise gamma"),
    ],
)
def test_impossible_numbers_are_named(call, message):
    labels = np.repeat(np.arange(3), 10)
    with pytest.raises(DataError, match=message):
        call(labels, np.random.RandomState(0))


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=10), seed=st.integers(0, 1000))
def test_holding_out_and_splitting_lose_and_repeat_nothing(sizes, seed):
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    kept, taken, _ = hold_out(parts, seed, 0.1)
    clients = split_clients(kept, seed)

    everything = np.concatenate([taken, *[np.concatenate([c.train, c.test]) for c in clients]])
    np.testing.assert_array_equal(np.sort(everything), np.arange(sum(sizes)))
    for size, rest, client in zip(sizes, kept, clients, strict=True):
        assert len(rest) == max(1, size * 9 // 10)
        assert len(client.train) == max(1, len(rest) * 8 // 10)


def test_holding_out_nothing_changes_nothing():
    parts = [np.arange(3), np.arange(3, 9)]
    kept, taken, _ = hold_out(parts, 0, 0.0)
    assert len(taken) == 0
    assert [part.tolist() for part in kept] == [part.tolist() for part in parts]
