"""Runs made comparable: each metric at the rounds that all of them have.

Runs of a comparison share their cohorts, and scores jump with the cohort. A mean over all rounds of
one run beside a mean over every other round of another would compare cohorts, not methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedproto.report.results import StoredRun
from fedproto.types import RoundRecord


def at_shared_rounds(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The same runs, without the values of a metric at rounds where another of them has none.

    A run that never took a metric takes nothing away from the others; nor do runs that share no
    round at all.
    """
    shared: dict[str, set[int]] = {}
    for run in runs:
        for metric in {name for record in run.records for name in record.metrics}:
            rounds = {record.round for record in run.records if metric in record.metrics}
            shared[metric] = shared[metric] & rounds if metric in shared else rounds

    def thinned(record: RoundRecord) -> RoundRecord:
        kept = {
            metric: value
            for metric, value in record.metrics.items()
            if record.round in shared[metric] or not shared[metric]
        }
        return record if len(kept) == len(record.metrics) else replace(record, metrics=kept)

    return [replace(run, records=[thinned(record) for record in run.records]) for run in runs]
