"""Every equation with numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import tensor

from fedproto import equations as eq
from fedproto.types import Prototypes

YES = tensor([True, True])


def close(actual, expected):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
    )


def prototypes(means, counts) -> Prototypes:
    counts = tensor(counts)
    return Prototypes(tensor(means, dtype=torch.float64) * counts.unsqueeze(-1), counts)


def test_sample_shares():
    close(eq.sample_shares(tensor([10, 30, 60])), [0.1, 0.3, 0.6])


def test_class_prototypes_are_means_per_class():
    features = tensor([[1.0, 0.0], [3.0, 4.0], [5.0, 5.0]])
    result = eq.class_prototypes(features, tensor([0, 0, 2]), 3)
    close(result.mean, [[2.0, 2.0], [0.0, 0.0], [5.0, 5.0]])
    assert result.count.tolist() == [2, 0, 1]
    assert result.seen.tolist() == [True, False, True]


def test_class_prototypes_ignore_void_labels():
    result = eq.class_prototypes(torch.ones(3, 2), tensor([1, 255, -1]), 2)
    assert result.count.tolist() == [0, 1]
    close(result.sum, [[0, 0], [1, 1]])


def test_merging_adds_sums_and_counts():
    merged = prototypes([[2.0]], [1]) + prototypes([[5.0]], [2])
    close(merged.mean, [[4.0]])
    assert merged.count.tolist() == [3]


def test_minmax_normalize():
    close(
        eq.minmax_normalize(tensor([[2.0, 4.0, 3.0], [-1.0, 1.0, 0.0], [7.0, 7.0, 7.0]])),
        [[0, 1, 0.5], [0, 1, 0.5], [0, 0, 0]],
    )


def test_distances_and_margin_of_two_classes():
    # p_i[0]=(0,0), p_i[1]=(3,4); p_j[0]=(0,1), p_j[1]=(3,0)
    p_i, p_j = tensor([[0.0, 0.0], [3.0, 4.0]]), tensor([[0.0, 1.0], [3.0, 0.0]])
    close(eq.same_class_distance(p_i, p_j, YES, YES), [1, 4])
    # d^-[0] = |(0,0)-(3,0)| = 3; d^-[1] = |(3,4)-(0,1)| = sqrt(18)
    close(eq.other_class_distance(p_i, p_j, YES, YES), [3, math.sqrt(18)])
    close(
        eq.semantic_margin(p_i, p_j, YES, YES),
        [(3 - 1) / (3 + 1), (math.sqrt(18) - 4) / (math.sqrt(18) + 4)],
    )


def test_other_class_distance_is_a_mean_over_shared_classes_only():
    p = tensor([[0.0], [2.0], [6.0], [100.0]])
    seen_i, seen_j = tensor([True, True, True, True]), tensor([True, True, True, False])
    # class 0: (2 + 6) / 2; class 1: (2 + 4) / 2; class 2: (6 + 4) / 2; class 3 is not shared
    close(eq.other_class_distance(p, p, seen_i, seen_j), [4, 3, 5, 0])
    close(eq.same_class_distance(p, p + 1, seen_i, seen_j), [1, 1, 1, 0])
    close(eq.semantic_margin(p, p + 1, seen_i, seen_j)[3], 0)


@pytest.mark.parametrize(
    ("seen_i", "seen_j"),
    [
        ([False, False], [False, False]),
        ([True, False], [True, False]),
        ([True, False], [False, True]),
        ([True, True], [False, True]),
    ],
    ids=["no class", "one class", "none shared", "one shared"],
)
def test_margin_is_neutral_where_nothing_can_be_compared(seen_i, seen_j):
    p_i, p_j = torch.rand(2, 3), torch.rand(2, 3)
    assert eq.semantic_margin(p_i, p_j, tensor(seen_i), tensor(seen_j)).tolist() == [0, 0]


def test_margin_of_identical_prototypes_is_neutral():
    same = torch.ones(2, 3)
    assert eq.semantic_margin(same, same, YES, YES).tolist() == [0, 0]


def test_margin_is_one_when_nothing_moved_and_minus_one_when_classes_swapped():
    p = tensor([[0.0, 1.0], [1.0, 0.0]])
    assert eq.semantic_margin(p, p, YES, YES).tolist() == [1, 1]
    assert eq.semantic_margin(p, p.flip(0), YES, YES).tolist() == [-1, -1]


def test_margin_ignores_what_stands_for_unseen_classes():
    p = tensor([[0.0, 1.0], [1.0, 0.0], [math.nan, math.nan]])
    seen = tensor([True, True, False])
    assert eq.semantic_margin(p, p, seen, seen).tolist() == [1, 1, 0]


def test_local_margin_compares_normalised_prototypes():
    before = prototypes([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]], [3, 1])
    after = prototypes([[0.0, 1.0, 1.0], [9.0, 0.0, 0.0]], [3, 1])
    # normalised: (0,1,.5), (1,0,0) before; (0,1,1), (1,0,0) after
    # class 0: d+ = .5, d- = |(0,1,.5)-(1,0,0)| = 1.5; class 1: d+ = 0, d- = |(1,0,0)-(0,1,1)|
    close(eq.local_margin(before, after), [(1.5 - 0.5) / (1.5 + 0.5), 1.0])


def test_aggregate_prototypes_weigh_normalised_ones_by_count():
    one = prototypes([[0.0, 10.0], [4.0, 0.0]], [1, 2])
    two = prototypes([[2.0, 0.0], [0.0, 0.0]], [3, 0])
    result = eq.aggregate_prototypes([one, two])
    # class 0: 1/4·(0,1) + 3/4·(1,0); class 1: only the first client holds it
    close(result.mean, [[0.75, 0.25], [1.0, 0.0]])
    assert result.count.tolist() == [4, 2]
    close(eq.aggregate_prototypes(Prototypes.stack([one, two])).mean, result.mean)


def test_aggregate_of_a_class_that_nobody_held_is_unseen():
    result = eq.aggregate_prototypes([prototypes([[1.0, 0.0], [0.0, 0.0]], [2, 0])])
    assert result.seen.tolist() == [True, False]


def test_aggregate_margin_does_not_normalise_the_aggregate_again():
    local = prototypes([[0.0, 3.0], [2.0, 0.0]], [1, 1])
    aggregate = prototypes([[0.0, 0.5], [0.5, 0.0]], [4, 4])
    # p̂ = (0,1), (1,0); d+ = .5; d-[0] = |(0,1)-(.5,0)| = sqrt(1.25)
    expected = (math.sqrt(1.25) - 0.5) / (math.sqrt(1.25) + 0.5)
    close(eq.aggregate_margin(local, aggregate), [expected, expected])


def test_client_deviation_is_the_sigmoid_of_the_summed_margins():
    close(
        eq.client_deviation(tensor([[0.0, 0.0], [0.5, 0.5], [-1.0, 0.0]])),
        [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))],
    )


def test_normalize_attention():
    close(eq.normalize_attention(tensor([0.2, 0.6])), [0.25, 0.75])


def test_attention_of_vanishing_deviations_is_uniform():
    close(eq.normalize_attention(torch.zeros(4)), [0.25] * 4)


def test_federated_attention_is_the_mean_of_both():
    close(eq.federated_attention(tensor([0.2, 0.8]), tensor([0.6, 0.4])), [0.4, 0.6])


def test_weighted_average():
    w = [tensor([1.0, 2.0]), tensor([3.0, 6.0])]
    close(eq.weighted_average(w, tensor([0.25, 0.75])), [2.5, 5.0])


def test_weighted_average_of_one_client_is_that_client():
    w = torch.randn(7)
    assert torch.equal(eq.weighted_average([w], tensor([1.0], dtype=torch.float64)), w)


def test_aggregate_mean_margin_is_the_mean_distance_to_other_classes():
    # distances: 0-1: 5, 0-2: 10, 1-2: 5; per class 7.5, 5, 7.5
    result = eq.aggregate_mean_margin(prototypes([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]], [1, 9, 2]))
    close(result, (7.5 + 5 + 7.5) / 3)


def test_aggregate_mean_margin_leaves_unseen_classes_out():
    result = eq.aggregate_mean_margin(prototypes([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]], [1, 1, 0]))
    close(result, 5)


def test_aggregate_mean_margin_of_one_class_is_zero():
    close(eq.aggregate_mean_margin(prototypes([[3.0, 4.0], [0.0, 0.0]], [1, 0])), 0)


def test_leading_dimensions_are_independent_of_each_other():
    torch.manual_seed(0)
    features, labels = torch.rand(2, 3, 20, 4), torch.randint(0, 5, (2, 3, 20))
    batched = eq.class_prototypes(features, labels, 5)
    margins = eq.local_margin(batched, Prototypes(batched.sum.flip(-1), batched.count))
    aggregated = eq.aggregate_prototypes(batched)
    apm = eq.aggregate_margin(
        batched, Prototypes(aggregated.sum[:, None], aggregated.count[:, None])
    )
    attention = eq.normalize_attention(eq.client_deviation(apm))
    amm = eq.aggregate_mean_margin(batched.merged())
    for run in range(2):
        cohort = [
            eq.class_prototypes(features[run, client], labels[run, client], 5)
            for client in range(3)
        ]
        alone = eq.aggregate_prototypes(cohort)
        torch.testing.assert_close(aggregated.sum[run], alone.sum)
        torch.testing.assert_close(
            amm[run], eq.aggregate_mean_margin(Prototypes.stack(cohort).merged())
        )
        rows = torch.stack([eq.aggregate_margin(client, alone) for client in cohort])
        torch.testing.assert_close(
            attention[run], eq.normalize_attention(eq.client_deviation(rows))
        )
        for client in range(3):
            flipped = Prototypes(cohort[client].sum.flip(-1), cohort[client].count)
            torch.testing.assert_close(
                margins[run, client], eq.local_margin(cohort[client], flipped)
            )
