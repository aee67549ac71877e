"""A table of runs: one row per group, with scores, cost, and a verdict beside the baseline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from fedproto.data.federation import cautions
from fedproto.data.tasks import is_share, loss_beside, lower_is_better
from fedproto.errors import ConfigError, unknown_name
from fedproto.measures.scores import CLIENT_SCORES, PERSONAL_SCORES
from fedproto.report.arrangement import Arrangement
from fedproto.report.results import StoredRun
from fedproto.report.statistics import (
    FEWEST_PAIRS,
    MARGIN,
    Difference,
    Word,
    difference,
    judge,
    rounds_to_target,
    sample_deviation,
)


@dataclass(frozen=True)
class Against:
    """A group against the baseline's under the same condition, seed by seed.

    Attributes:
        corrected_p: The p-value after Holm's correction; None for fewer than three pairs.
        comparisons: Number of tests of the table, which it is corrected for.
        margin: Differences within ± this are equivalent; None where no margin is given.
        at_round: The last round that all compared runs have, if some are unfinished; else None.
    """

    baseline: str
    difference: Difference
    corrected_p: float | None
    comparisons: int
    verdict: Word
    margin: float | None
    at_round: int | None


@dataclass(frozen=True)
class Summary:
    """One row of a comparison.

    Attributes:
        condition: What it was run under; empty where all runs share one.
        seeds: What the figures are the mean over.
        rounds: Rounds that all its runs have, of those planned.
        values: Mean and sample standard deviation over seeds per figure; None as the deviation for
            one seed. A figure that some run does not have is left out.
        against: The comparison with the baseline; None for the baseline itself, where that was not
            run, and for pooled training beside several conditions.
        cautions: What to know about the test samples of its data.
    """

    title: str
    method: str
    condition: str
    seeds: list[int]
    rounds: int
    planned: int
    values: dict[str, tuple[float, float | None]]
    against: Against | None
    directories: list[str]
    cautions: list[str] = field(default_factory=list)


def default_margin(metric: str) -> float | None:
    """One point for scores between 0 and 1; none for losses and the like, which have no scale."""
    return MARGIN if is_share(metric) else None


def summarize(
    arrangement: Arrangement,
    metric: str,
    target: float | None = None,
    baseline: str | None = None,
    margin: float | None = None,
) -> list[Summary]:
    """One row per group."""
    margin = default_margin(metric) if margin is None else margin
    against = _against(arrangement, metric, baseline, margin)
    rows = []
    for group, verdict in zip(arrangement.groups, against, strict=True):
        figures = [figures_of(run, metric, target) for run in group.runs]
        shared = [name for name in figures[0] if all(name in one for one in figures)]
        values = {name: [one[name] for one in figures] for name in shared}
        titles = [arrangement.conditions[number].title for number in group.conditions]
        rows.append(
            Summary(
                title=group.title,
                method=arrangement.methods[group.method].title,
                condition="; ".join(filter(None, titles)),
                seeds=group.seeds,
                rounds=min(len(run.records) for run in group.runs),
                planned=group.runs[0].config.schedule.rounds,
                values={
                    name: (float(np.mean(found)), sample_deviation(found))
                    for name, found in values.items()
                },
                against=verdict,
                directories=[str(run.path) for run in group.runs],
                cautions=cautions(group.runs[0].about_data()),
            )
        )
    return rows


def _against(
    arrangement: Arrangement, metric: str, baseline: str | None, margin: float | None
) -> list[Against | None]:
    titles = [method.title for method in arrangement.methods]
    if baseline is not None and baseline not in titles:
        raise ConfigError(f"baseline: {unknown_name('method', baseline, titles)}")
    chosen = arrangement.baselines()
    bases = [baseline or chosen[condition.family] for condition in arrangement.conditions]
    theirs: dict[int, list[StoredRun]] = defaultdict(list)
    for group in arrangement.groups:
        for condition in group.conditions:
            if titles[group.method] == bases[condition]:
                theirs[condition] += group.runs
    pairs = [
        paired(group.runs, theirs[group.conditions[0]], metric)
        if len(group.conditions) == 1 and titles[group.method] != bases[group.conditions[0]]
        else (None, None)
        for group in arrangement.groups
    ]
    verdicts = judge([found for found, _ in pairs], lower=lower_is_better(metric), margin=margin)
    return [
        verdict and Against(bases[group.conditions[0]], *verdict, margin, at_round)
        for group, verdict, (_, at_round) in zip(arrangement.groups, verdicts, pairs, strict=True)
    ]


def paired(
    ours: Iterable[StoredRun], theirs: Iterable[StoredRun], metric: str
) -> tuple[Difference | None, int | None]:
    """The difference of the runs that share a seed, and the round if not all of them are finished.

    Finished pairs alone decide where there are enough of them. Otherwise all pairs are compared at
    the last round that all of them have.
    """
    known = {run.config.seed: run for run in theirs}
    pairs = [(run, known[run.config.seed]) for run in ours if run.config.seed in known]
    pairs = [pair for pair in pairs if all(len(run.curve(metric)[0]) for run in pair)]
    finished = [pair for pair in pairs if pair[0].finished and pair[1].finished]
    at_round = None
    if len(finished) >= min(len(pairs), FEWEST_PAIRS):
        pairs = finished
    else:
        at_round = min(int(run.curve(metric)[0][-1]) for pair in pairs for run in pair)
    scores = [[run.final(metric, at_round) for run in pair] for pair in pairs]
    found = [one - other for one, other in scores if one is not None and other is not None]
    return (difference(found), at_round) if found else (None, None)


def figures_of(run: StoredRun, metric: str, target: float | None = None) -> dict[str, float]:
    """The figures of one run in a table."""
    figures: dict[str, float] = {}
    named = {metric: metric, "loss": loss_beside(metric)}
    clients = CLIENT_SCORES | PERSONAL_SCORES
    named |= {title: prefix + metric for prefix, title in clients.items()}
    for title, name in named.items():
        value = run.final(name)
        if value is not None:
            figures[title] = value
    rounds, values = run.curve(metric)
    if len(values):
        options = run.config.evaluate
        # Tests of all the last rounds would make these count more than the others.
        even = rounds % options.every == 0 if options.last > 1 else rounds > 0
        figures["mean over rounds"] = float(values[even if even.any() else rounds > 0].mean())
        if target is not None:
            reached = rounds_to_target(rounds, values, target, lower=lower_is_better(metric))
            if reached is not None:
                figures["rounds to target"] = float(reached)
    figures["bytes up"] = float(sum(record.bytes_up for record in run.records))
    figures["bytes down"] = float(sum(record.bytes_down for record in run.records))
    figures["seconds"] = sum(record.seconds for record in run.records)
    return figures
