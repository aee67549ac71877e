"""Properties of the equations that hold for any input."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto import equations as eq
from fedproto.types import Prototypes

seeds = st.integers(0, 2**31 - 1)
counts = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=6)
kinds = st.sampled_from(["random", "zero", "constant", "identical"])


def cohort_of(counts: list[list[int]], kind: str, seed: int) -> Prototypes:
    generator = torch.Generator().manual_seed(seed)
    count = torch.tensor(counts)
    mean = torch.randn(*count.shape, 5, generator=generator, dtype=torch.float64)
    if kind == "zero":
        mean = torch.zeros_like(mean)
    elif kind == "constant":
        mean = mean[..., :1].expand_as(mean)
    elif kind == "identical":
        mean = mean[:1, :1].expand_as(mean)
    return Prototypes(mean * count.unsqueeze(-1), count)


def attention_of(cohort: Prototypes, aggregate: Prototypes, before: Prototypes) -> torch.Tensor:
    apm = eq.aggregate_margin(cohort, aggregate)
    lpm = eq.local_margin(before, cohort)
    return eq.federated_attention(
        eq.normalize_attention(eq.client_deviation(apm)),
        eq.normalize_attention(eq.client_deviation(lpm)),
    )


@given(counts, kinds, kinds, seeds)
def test_attention_is_a_distribution_for_any_count_pattern(counts, kind, other, seed):
    cohort, before = cohort_of(counts, kind, seed), cohort_of(counts, other, seed + 1)
    aggregate = eq.aggregate_prototypes(before)
    attention = attention_of(cohort, aggregate, before)
    assert torch.isfinite(attention).all()
    assert (attention >= 0).all()
    torch.testing.assert_close(attention.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert torch.isfinite(eq.aggregate_mean_margin(cohort.merged()))


@given(counts, kinds, seeds)
def test_margins_stay_in_their_range(counts, kind, seed):
    cohort, before = cohort_of(counts, kind, seed), cohort_of(counts, "random", seed + 1)
    margin = eq.local_margin(before, cohort)
    assert ((margin >= -1) & (margin <= 1)).all()
    assert (margin[~(cohort.seen & before.seen)] == 0).all()


@given(counts, kinds, seeds, st.randoms())
def test_the_order_of_clients_is_irrelevant(counts, kind, seed, random):
    cohort, before = cohort_of(counts, kind, seed), cohort_of(counts, "random", seed + 1)
    order = list(range(len(counts)))
    random.shuffle(order)
    shuffled = Prototypes(cohort.sum[order], cohort.count[order])
    before_shuffled = Prototypes(before.sum[order], before.count[order])
    aggregate, again = eq.aggregate_prototypes(cohort), eq.aggregate_prototypes(shuffled)
    torch.testing.assert_close(aggregate.mean, again.mean)
    torch.testing.assert_close(
        attention_of(cohort, aggregate, before)[order],
        attention_of(shuffled, aggregate, before_shuffled),
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), seeds)
def test_merged_prototypes_equal_those_of_the_pooled_data(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    features = [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in sizes]
    labels = [torch.randint(0, 3, (n,), generator=generator) for n in sizes]
    parts = [eq.class_prototypes(e, y, 3) for e, y in zip(features, labels, strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    pooled = eq.class_prototypes(torch.cat(features), torch.cat(labels), 3)
    torch.testing.assert_close(total.sum, pooled.sum)
    torch.testing.assert_close(Prototypes.stack(parts).merged().mean, pooled.mean)
    assert torch.equal(total.count, pooled.count)


@given(st.integers(1, 6), seeds)
def test_the_weighted_average_lies_in_the_clients_hull(number, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = eq.normalize_attention(torch.rand(number, generator=generator, dtype=torch.float64))
    clients = [torch.randn(8, generator=generator) for _ in range(number)]
    average, stacked = eq.weighted_average(clients, weights), torch.stack(clients)
    assert (average >= stacked.amin(dim=0) - 1e-6).all()
    assert (average <= stacked.amax(dim=0) + 1e-6).all()


@given(seeds)
def test_normalising_twice_changes_nothing(seed):
    p = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    once = eq.minmax_normalize(p)
    assert torch.equal(eq.minmax_normalize(once), once)
    assert (once.amin(dim=-1) == 0).all()
    assert (once.amax(dim=-1) == 1).all()
