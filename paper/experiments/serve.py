"""Beyond the paper: served averages and the recommended method against tuned opponents.

Parameters come from ``serve-grid``: from its runs where they are at hand, and otherwise from what
it wrote into ``results/serve/*/choice.json``. Nothing here is chosen on test data: the average that
is shown beside a method's newest model is the one with the best validation score, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedproto.config.recipe import combine, set_option
from fedproto.measures.scores import PER_CLASS
from fedproto.report.figures import label_of
from fedproto.report.results import main_score
from fedproto.report.style import COLORS, DASHES, new_figure
from fedproto.strategies.serve import ServeOptions
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import Case, Scope
from paper.experiments.serve_grid import (
    CASES,
    Choice,
    choice_of,
    methods_for,
    read_choices,
    shown_cases,
    tables_of,
)
from paper.halving import TRAINED, without_head, written
from paper.library import Library, Request
from paper.output import Output
from paper.pairs import show_pairs
from paper.panels import Panel, show_panels

STEADY, PLAIN = "Steady", "FedAvg"
CHOICES = Path(__file__).parents[2] / "results/serve"
FOLLOWED = (STEADY, f"{STEADY}, newest model", "FedACG", PLAIN)
"""Whose curves are drawn."""

FIRST = 4
"""Opponents that are trained before the others: those with the best validation scores."""

MEASURE = "clients"
SHOWN = 0.25
"""Share of the rounds, the last ones, in the figure of class accuracies."""

OSCILLATION = ("data_set", "trained_on", "method", "model", "class", "mean_change")


@EXPERIMENTS.register("serve")
class ServeStudy(Experiment):
    """Served averages, the recommended method, and the field's methods with equal tuning."""

    title = "Study: the served model (not in the paper)"
    cases = CASES

    def more(self, scope: Scope, library: Library) -> list[Request]:
        """Every method with its chosen parameters, five fresh seeds."""
        choices = _choices(scope, library)
        return [
            request
            for case in scope.cases(shown_cases(self.cases, scope))
            if case.name in choices
            for request in _requests(case, scope, choices[case.name])
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Scores, paired differences, and the figure of class accuracies from round to round."""
        choices = _choices(scope, results.library)
        found = []
        for case in scope.cases(shown_cases(self.cases, scope)):
            served = choices[case.name].served if case.name in choices else {}
            runs = results.select(case.name)
            found.append((case, [one for run in runs for one in _as_tested(run, served)]))
            for method, text in served.items():
                output.say(f"{case.title}, {method}: {text}, chosen on validation data")
        show_pairs(output, "serve", self.title, found, (STEADY,))
        panels = [_curves(case, runs) for case, runs in found if runs]
        if panels:
            show_panels(output, "serve-rounds", [panels])
        for case in scope.cases(shown_cases(self.cases, scope)):
            for run in results.select(case.name):
                if run.run.config.measure.takes(MEASURE):
                    show_oscillation(output, case, run, choices[case.name].served[run.label])
                    return


def _curves(case: Case, runs: Sequence[FoundRun]) -> Panel:
    """Scores over the rounds, of the methods that tell what an average and momentum add."""
    metric = main_score(one.run for one in runs)
    lines = {label: [one for one in runs if one.label == label] for label in FOLLOWED}
    shown = {label: own for label, own in lines.items() if own}
    return Panel(case, metric, case.full_title, f"{label_of(metric)} (%)", shown, 100.0)


def _choices(scope: Scope, library: Library) -> dict[str, Choice]:
    """By data set; from the grid's runs where all are there."""
    known = read_choices(CHOICES) if scope.scale == "paper" else {}
    for case in scope.cases(shown_cases(CASES, scope)):
        choice = choice_of(case, scope, library)
        if choice is not None:
            known[case.name] = choice
    return known


def _requests(case: Case, scope: Scope, choice: Choice) -> list[Request]:
    """The final runs of a data set: first those of the methods that are likely to decide."""
    tables = tables_of(case, scope, "final")
    seeds = tables.pop("sweep")["seed"][: scope.seeds]
    opponents = sorted(choice.scores, key=lambda name: -choice.scores[name])
    first = {STEADY, PLAIN, *[name for name in opponents if name != STEADY][:FIRST]}
    found = []
    for method in methods_for(case, scope):
        if method not in choice.values:
            continue
        own = written(tables, method, _tested(choice.served[method]))
        for name, value in choice.values[method].items():
            set_option(own, name, value)
        for config in combine([own], {"seed": seeds}).values():
            order = 1 if method in first else 2  # after the grid, which may choose another head
            if (case.name, method, config.seed) in _followed(scope, seeds):
                measure = replace(config.measure, every=1, what=(MEASURE,))
                looked = replace(config, measure=measure)
                found.append(Request(case.name, looked, wishes=frozenset({MEASURE}), order=order))
            else:
                found.append(Request(case.name, config, order=order))
    return found


def _followed(scope: Scope, seeds: Sequence[int]) -> set[tuple[str, str, int]]:
    """Data set, method and seed of the run that is analysed after every round."""
    return {("synthetic" if scope.scale == "smoke" else "cifar10", PLAIN, seeds[0])}


def _tested(served: str) -> list[str]:
    """The models that a final run tests beside the newest one: what is served, also headless."""
    return list(dict.fromkeys((served, without_head(served))))


def _as_tested(found: FoundRun, served: Mapping[str, str]) -> list[FoundRun]:
    """A run as its newest model shows it, and as the served model does."""
    method = found.label
    text = served.get(method, TRAINED)
    average = without_head(text)
    names = {TRAINED: method}
    if method == STEADY:
        names = {TRAINED: FOLLOWED[1], average: f"{STEADY}, average alone"}
        names[text] = STEADY
    elif text != TRAINED:
        names[text] = f"{method} + average"
    return [
        FoundRun(
            replace(found.request, config=replace(found.request.config, label=label)),
            found.run.tested_as(ServeOptions.parse(one)),
        )
        for one, label in names.items()
    ]


@dataclass(frozen=True)
class _Classes:
    """Accuracies of all classes, round by round, ``[T, C]``."""

    names: list[str]
    rounds: list[int]
    values: Any


def _classes(found: FoundRun, served: str) -> _Classes:
    run = found.run.tested_as(ServeOptions.parse(served))
    tables = {record.round + 1: record.tables.get(PER_CLASS) for record in run.records}
    rows = {round_: table for round_, table in tables.items() if table}
    names = list(next(iter(rows.values())))
    return _Classes(
        names,
        list(rows),
        np.array([[row.get(name, np.nan) for name in names] for row in rows.values()]),
    )


def show_oscillation(output: Output, case: Case, found: FoundRun, average: str) -> None:
    """Class accuracies of the newest and of the averaged model over the last rounds."""
    shown = {"newest model": _classes(found, TRAINED), "average": _classes(found, average)}
    figure = new_figure(7.4, 3.0)
    lines = []
    for axes, (title, one) in zip(figure.subplots(1, 2, sharey=True), shown.items(), strict=True):
        begin = one.rounds[-1] * (1 - SHOWN)
        recent = np.array(one.rounds) > begin
        for index, name in enumerate(one.names):
            axes.plot(
                np.array(one.rounds)[recent],
                100 * one.values[recent, index],
                color=COLORS[index % len(COLORS)],
                ls=(0, DASHES[index // len(COLORS) % len(DASHES)] or (1, 0)),
                lw=1,
            )
            change = 100 * np.abs(np.diff(one.values[:, index])).mean()
            lines.append((case.title, case.stands_in, found.label, title, name, change))
        axes.set_title(f"{found.label}: {title}", fontsize="medium")
        axes.set_xlabel("round")
        axes.grid(alpha=0.3)
    figure.supylabel("accuracy of each class (%)", fontsize="medium")
    frame = output.csv("serve-oscillation", OSCILLATION, lines)
    for title in shown:
        mean = frame.loc[frame["model"] == title, "mean_change"].astype(float).mean()
        output.say(f"{title}: a class's accuracy changes by {mean:.1f} points a round on average")
    output.figure("serve-oscillation", figure)
