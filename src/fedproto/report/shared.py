"""Runs made comparable: each metric at the rounds that all of them have.

Runs of a comparison share their cohorts, and scores jump with the cohort. A mean over all rounds of
one run beside a mean over every other round of another would compare cohorts, not methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fedproto.report.results import StoredRun
from fedproto.types import RoundRecord


def comparable(runs: Iterable[StoredRun]) -> list[StoredRun]:
    """All runs in their order; federated ones on the same data at the rounds they share.

    Centralised training has no cohort, and so nothing to share.
    """
    found = list(runs)
    places: dict[Any, list[int]] = {}
    for place, run in enumerate(found):
        if not run.config.strategy.pooled:
            places.setdefault(run.config.data, []).append(place)
    for together in places.values():
        aligned = at_shared_rounds([found[place] for place in together])
        for place, run in zip(together, aligned, strict=True):
            found[place] = run
    return found


def at_shared_rounds(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The same runs, without the values of a metric at rounds that another of them left out.

    A run that never took a metric, or has not come that far, takes nothing away from the others;
    nor do runs that share no round at all.
    """
    taken: dict[str, list[set[int]]] = {}
    for run in runs:
        for metric in {name for record in run.records for name in record.metrics}:
            rounds = {record.round for record in run.records if metric in record.metrics}
            taken.setdefault(metric, []).append(rounds)
    shared = {metric: _shared(sets) for metric, sets in taken.items()}

    def thinned(record: RoundRecord) -> RoundRecord:
        kept = {
            metric: value
            for metric, value in record.metrics.items()
            if record.round in shared[metric]
        }
        return record if len(kept) == len(record.metrics) else replace(record, metrics=kept)

    return [replace(run, records=[thinned(record) for record in run.records]) for run in runs]


def _shared(sets: Sequence[set[int]]) -> set[int]:
    """Rounds that no set leaves out before its own end; all of them where no two sets meet."""
    everything = set.union(*sets)
    shared = {
        round_
        for round_ in everything
        if all(round_ in rounds or round_ > max(rounds) for rounds in sets)
    }
    together = any(sum(round_ in rounds for rounds in sets) == len(sets) for round_ in shared)
    return shared if together else everything
