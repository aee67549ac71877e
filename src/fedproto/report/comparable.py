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

    Centralised training has no cohort, and so nothing to share; of data that a program brought
    nobody knows whether it is the same.
    """
    found = list(runs)
    indices: dict[Any, list[int]] = {}
    for index, run in enumerate(found):
        if not run.config.strategy.pooled and run.config.data is not None:
            indices.setdefault(run.config.data, []).append(index)
    for together in indices.values():
        aligned = at_shared_rounds([found[index] for index in together])
        for index, run in zip(together, aligned, strict=True):
            found[index] = run
    return found


def at_shared_rounds(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The same runs, without the values of a metric at rounds that another of them left out.

    A run that never took a metric, or has not come that far, takes nothing away from the others;
    nor does one that would have nothing left.
    """
    thinned = list(runs)
    for metric in {name for run in runs for record in run.records for name in record.metrics}:
        taken = {
            index: {record.round for record in run.records if metric in record.metrics}
            for index, run in enumerate(runs)
        }
        for index, kept in _shared({k: rounds for k, rounds in taken.items() if rounds}).items():
            if len(kept) < len(taken[index]):
                thinned[index] = _only_at(thinned[index], metric, kept)
    return thinned


def _shared(taken: dict[int, set[int]]) -> dict[int, set[int]]:
    """What is left of some sets of rounds when none has what another leaves out before its end."""
    inside = dict(taken)
    while True:
        shared = {
            round_
            for round_ in set().union(*inside.values())
            if all(round_ in rounds or round_ > max(rounds) for rounds in inside.values())
        }
        met = {index: rounds for index, rounds in inside.items() if rounds & shared}
        if len(met) == len(inside):
            return {
                index: rounds & shared if index in met else rounds
                for index, rounds in taken.items()
            }
        inside = met


def _only_at(run: StoredRun, metric: str, rounds: set[int]) -> StoredRun:
    def without(record: RoundRecord) -> RoundRecord:
        if record.round in rounds or metric not in record.metrics:
            return record
        rest = {name: value for name, value in record.metrics.items() if name != metric}
        return replace(record, metrics=rest)

    return replace(run, records=[without(record) for record in run.records])
