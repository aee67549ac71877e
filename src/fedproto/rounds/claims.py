"""Claims: amounts and statistics that clients report, bounded by those of their cohort.

Nothing checks what a client says of its data. So its number of samples, its class counts, its
feature statistics and its batch-norm statistics count only as far as the cohort makes them
plausible: one client of several can take none of them further than an honest client could.

Shapes: K clients, C classes, D feature channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedproto.rng import Indices
from fedproto.strategies.aggregation import AggregateOptions, cap_shares, equal_shares, median
from fedproto.strategies.serve import packed, unpacked
from fedproto.strategies.values import Declarations
from fedproto.types import ClientUpdate, Tensors, Updates

Names: TypeAlias = tuple[str, str, str | None]
"""Names of sums, counts and products (or None) in a payload that belong together."""

FEWEST = 3
"""Clients that a comparison needs: of two that differ, either could be wrong."""

FARTHEST = 2.0
"""Class means are clipped to this multiple of the cohort's median distance; scatter likewise.
A client with most class means beyond the square of it is rejected."""


END = 0.1
"""Share of the cohort at each end of a buffer's range that does not count."""

DRAWN, TESTED = 25.0, 5.0
"""Claims of training and of test samples of a federation count up to these multiples of `max_claim`
times the median. The draw decides what is learnt at all: the accuracy on data of which few honest
clients hold most falls with a lower cap, and a liar in every cohort is bounded by its weight."""


def believed_sizes(sizes: Indices, max_claim: float | None, times: float) -> Indices:
    """Sizes that clients of a federation claim, each at most a multiple of the median."""
    if max_claim is None:
        return sizes
    return np.minimum(sizes, max(1, int(times * max_claim * median_low(sizes.tolist()))))


def implausible(updates: Updates, declared: Declarations) -> dict[int, str]:
    """Reasons to reject updates for their feature statistics, by client.

    A client that lies in one part of its update is not believed in the others.
    """
    if len(updates) < FEWEST:
        return {}
    return {
        updates[k].client: f"its statistics '{names[0]}' are implausible in most classes it shares"
        for names in _statistics(declared)
        for k in _odd(_Statistics.of(updates, names)).nonzero().flatten().tolist()
    }


def bound_claims(
    options: AggregateOptions, updates: Updates, declared: Declarations
) -> list[ClientUpdate]:
    """Updates with samples, buffers and statistics bounded by the cohort.

    Without a bound on claims and with the plain mean, the updates as they are.
    """
    if not options.distrusts or len(updates) < FEWEST:
        return list(updates)
    cap = math.inf
    if options.max_claim is not None:
        cap = options.max_claim * median_low([one.num_examples for one in updates])
    bounded = [
        replace(update, num_examples=int(min(update.num_examples, max(1, cap))), buffers=buffers)
        for update, buffers in zip(
            updates, _bound_buffers([one.buffers for one in updates]), strict=True
        )
    ]
    for names in _statistics(declared):
        bounded = _bound_statistics(options, bounded, names)
    return bounded


def bound_steps(options: AggregateOptions, updates: Updates) -> Updates:
    """Updates for a strategy that weighs clients by their steps: at most a multiple of the median.

    Who claims many samples is asked for as many steps, and in an app of one's own steps are claims.
    """
    if options.max_claim is None or len(updates) < FEWEST:
        return updates
    most = max(1, int(options.max_claim * median_low([one.steps for one in updates])))
    return [replace(update, steps=min(update.steps, most)) for update in updates]


def _statistics(declared: Declarations) -> Iterator[Names]:
    """Statistics of features among the tensors of a payload."""
    for name, one in declared.items():
        if one.counted_by is not None:
            products = [key for key, it in declared.items() if it.squares_of == name]
            yield from ((name, one.counted_by, key) for key in products or (None,))


def merge_by_rule(
    options: AggregateOptions, updates: Updates, declared: Declarations
) -> list[ClientUpdate]:
    """Statistics as the server keeps them: class means and scatter that the rule gives."""
    if options.rule == "mean" or len(updates) < FEWEST:
        return list(updates)
    merged = list(updates)
    for names in _statistics(declared):
        known = _Statistics.of(merged, names)
        clients, classes = known.count.nonzero(as_tuple=True)
        known.mean[clients, classes] = _class_centres(known.mean[clients, classes], classes)
        if known.scatter is not None:
            known.scatter[:] = _positive(median(known.scatter, equal_shares(len(updates))))
        merged = known.into(merged)
    return merged


@dataclass
class _Statistics:
    """Counts, class means and scatter of a cohort, in double precision.

    Attributes:
        count: Feature vectors per client and class, ``[K, C]``.
        mean: Their means, ``[K, C, D]``; 0 where there are none.
        scatter: Mean products of a client's features about its own class means, ``[K, D, D]``.
    """

    names: Names
    count: Tensor
    mean: Tensor
    scatter: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [self.count, self.mean, *(() if self.scatter is None else (self.scatter,))]

    @staticmethod
    def of(updates: Updates, names: Names) -> _Statistics:
        """The statistics in the clients' payloads."""
        sums, counts, products = names
        count_kc = torch.stack([one.payload[counts] for one in updates]).double().cpu()
        sum_kcd = torch.stack([one.payload[sums] for one in updates]).double().cpu()
        mean_kcd = sum_kcd / count_kc.clamp(min=1).unsqueeze(-1)
        if products is None:
            return _Statistics(names, count_kc, mean_kcd)
        numbers_k = [one.payload[products].double().cpu() for one in updates]
        product_kdd = torch.stack([unpacked(one, sum_kcd.shape[-1]) for one in numbers_k])
        between_kdd = torch.einsum("kci,kcj->kij", sum_kcd, mean_kcd)
        total_k = count_kc.sum(dim=1).clamp(min=1).view(-1, 1, 1)
        scatter_kdd = (product_kdd - between_kdd) / total_k
        if len(numbers_k[0]) == sum_kcd.shape[-1]:  # squares alone
            scatter_kdd = scatter_kdd * torch.eye(sum_kcd.shape[-1])
        return _Statistics(names, count_kc, mean_kcd, scatter_kdd)

    def into(self, updates: Updates) -> list[ClientUpdate]:
        """The updates with these statistics in place of their own."""
        sums, counts, products = self.names
        sum_kcd = self.mean * self.count.unsqueeze(-1)
        new: dict[str, Tensor] = {sums: sum_kcd, counts: self.count}
        if products is not None and self.scatter is not None:
            total_k = self.count.sum(dim=1).view(-1, 1, 1)
            square = self.scatter * total_k + torch.einsum("kci,kcj->kij", sum_kcd, self.mean)
            alone = len(updates[0].payload[products]) == square.shape[-1]
            new[products] = square.diagonal(dim1=1, dim2=2) if alone else packed(square)
        return [
            replace(
                update,
                payload={
                    **update.payload,
                    **{name: one[k].to(update.payload[name]) for name, one in new.items()},
                },
            )
            for k, update in enumerate(updates)
        ]


def _bound_statistics(
    options: AggregateOptions, updates: Updates, names: Names
) -> list[ClientUpdate]:
    """Counts, class means and scatter of every client, bounded by those of the others."""
    reported = _Statistics.of(updates, names)
    known = replace(reported, count=_bound_counts(options, reported.count))
    _bound_means(known)
    if known.scatter is not None:
        scatter_kdd = torch.stack([_positive(one) for one in known.scatter])
        trace_k = scatter_kdd.diagonal(dim1=1, dim2=2).sum(dim=1)
        largest = FARTHEST * trace_k[known.count.sum(dim=1) > 0].median()
        factor_k = (largest / trace_k.clamp(min=1e-300)).clamp(max=1)
        known.scatter = scatter_kdd * factor_k.view(-1, 1, 1)
    # Honest statistics keep their bits.
    pairs = zip(known.tensors(), reported.tensors(), strict=True)
    return list(updates) if all(torch.equal(*pair) for pair in pairs) else known.into(updates)


def _bound_counts(options: AggregateOptions, count_kc: Tensor) -> Tensor:
    """Class counts: in all a multiple of the median, and within a class a multiple of equal shares.

    The sum over a class stays, so that classes of which one client holds most keep their frequency.
    """
    total_k = count_kc.sum(dim=1)
    if options.max_claim is not None and bool((total_k > 0).any()):
        cap = options.max_claim * total_k[total_k > 0].median()
        count_kc = count_kc * (cap / total_k.clamp(min=1)).clamp(max=1).unsqueeze(1)
    if options.max_share is not None:
        count_kc = cap_shares(count_kc, options.max_share)
    return torch.where(count_kc > 0, (count_kc + 1e-6).floor().clamp(min=1), 0)


def _bound_means(known: _Statistics) -> None:
    """Clips class means towards the centre of the cohort, then of their class."""
    clients, classes = known.count.nonzero(as_tuple=True)
    if not len(clients):
        return
    mean_hd, vote_h = _near_cohort(known, clients, classes)
    shared_h = (known.count > 0).sum(dim=0)[classes] >= FEWEST
    if bool(shared_h.any()):
        centre_hd = _class_centres(mean_hd, classes)[shared_h]
        mean_hd[shared_h], _ = _clip_about(mean_hd[shared_h], centre_hd, vote_h[shared_h])
    known.mean = known.mean.clone()
    known.mean[clients, classes] = mean_hd


def _odd(known: _Statistics) -> Tensor:
    """Clients with implausible means in most classes that others hold as well, ``[K]``.

    Of two that contradict each other in a class with no third holder, the one that contradicts
    others in more of its classes is not believed; neither where that is level.
    """
    holds_kc = known.count > 0
    clients, classes = holds_kc.nonzero(as_tuple=True)
    shared_h = holds_kc.sum(dim=0)[classes] >= 2
    if not bool(shared_h.any()):
        return torch.zeros(len(holds_kc), dtype=torch.bool)
    mean_hd, vote_h = _near_cohort(known, clients, classes)
    centre_hd = _class_centres(mean_hd, classes)
    _, excess_h = _clip_about(mean_hd[shared_h], centre_hd[shared_h], vote_h[shared_h])
    odd_kc = torch.zeros_like(holds_kc)
    odd_kc[clients[shared_h], classes[shared_h]] = excess_h > FARTHEST
    judged_k = torch.bincount(clients[shared_h], minlength=len(holds_kc)).clamp(min=1)
    part_k = odd_kc.sum(dim=1) / judged_k
    for c in (holds_kc.sum(dim=0) == 2).nonzero().flatten().tolist():
        first, second = holds_kc[:, c].nonzero().flatten().tolist()
        odd_kc[first, c] &= part_k[first] > part_k[second]
        odd_kc[second, c] &= part_k[second] > part_k[first]
    return odd_kc.sum(dim=1) > judged_k / 2


def _near_cohort(known: _Statistics, clients: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Class means clipped towards the centre of all, and their votes: one per client."""
    mean_hd = known.mean[clients, classes]
    vote_h = 1 / (known.count > 0).sum(dim=1)[clients].double()
    centre_d = median(mean_hd, vote_h / vote_h.sum())
    return _clip_about(mean_hd, centre_d.expand_as(mean_hd), vote_h)[0], vote_h


def _class_centres(mean_hd: Tensor, classes: Tensor) -> Tensor:
    """The median of the class means of each one's class; between two, the middle."""
    centre_hd = torch.empty_like(mean_hd)
    for c in classes.unique().tolist():
        of_class = classes == c
        centre_hd[of_class] = median(mean_hd[of_class], equal_shares(int(of_class.sum())))
    return centre_hd


def _clip_about(value_hd: Tensor, centre_hd: Tensor, vote_h: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors within `FARTHEST` times the median distance from centres, and by how much beyond."""
    away_h = (value_hd - centre_hd).norm(dim=1)
    excess_h = away_h / (FARTHEST * median(away_h, vote_h / vote_h.sum())).clamp(min=1e-300)
    clipped_hd = centre_hd + (value_hd - centre_hd) / excess_h.clamp(min=1).unsqueeze(1)
    return torch.where(excess_h.unsqueeze(1) > 1, clipped_hd, value_hd), excess_h


def _positive(matrix_dd: Tensor) -> Tensor:
    """A symmetric matrix without negative eigenvalues, which no scatter has beyond rounding."""
    value_d, vector_dd = torch.linalg.eigh(matrix_dd)
    if bool(value_d[0] >= -1e-3 * value_d[-1]):
        return matrix_dd
    positive_dd: Tensor = (vector_dd * value_d.clamp(min=0)) @ vector_dd.t()
    return positive_dd


def _bound_buffers(buffers_k: Sequence[Tensors]) -> list[Tensors]:
    """Buffers, number by number within twice the range of the cohort without its ends.

    A running variance stays at least 0, where half of the range below the cohort would be negative.
    """
    cut = min(max(1, math.ceil(END * len(buffers_k))), (len(buffers_k) - 1) // 2)
    bounded: list[dict[str, Tensor]] = [{} for _ in buffers_k]
    for name in buffers_k[0]:
        value_k = torch.stack([one[name] for one in buffers_k])
        if not value_k.is_floating_point():
            value_k = value_k.long()  # booleans have no difference, and bytes none below 0
        ordered_k = value_k.sort(dim=0).values
        low, high = ordered_k[cut], ordered_k[-1 - cut]
        margin = ((high - low) / 2).to(low.dtype)
        lowest = low - margin
        if name.endswith("running_var"):
            lowest = lowest.clamp(min=0)
        for own, value in zip(bounded, value_k.clamp(lowest, high + margin), strict=True):
            own[name] = value.to(buffers_k[0][name].dtype)
    return list(bounded)
