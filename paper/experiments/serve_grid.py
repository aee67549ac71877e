"""The grid of the study of served models: how every method got its parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedproto.config import RunConfig, flatten
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import CLASSIFICATION, Case, Scope
from paper.halving import TRAINED, Halving, methods, recipe_tables
from paper.library import Library, Request
from paper.output import Output

CASES = ("cifar10", "cifar10-alpha03", "cifar100", "cifar100-alpha03", *CLASSIFICATION)
COLUMNS = ("data_set", "trained_on", "method", "candidate", "rounds", "validation_score", "chosen")
GAINS = ("data_set", "trained_on", "method", "average", "validation_score", "gain")
SMOKE = ("FedAvg", "FedAvgM", "Steady")
EQUAL = "Equal weights"


@dataclass(frozen=True)
class Choice:
    """What was chosen for a data set, on validation data alone.

    Attributes:
        values: Options that were chosen, by method and dotted name.
        scores: The validation score of each method's chosen run.
        served: The model of each method's run that is shown beside the newest one.
    """

    values: dict[str, dict[str, Any]]
    scores: dict[str, float]
    served: dict[str, str] = field(default_factory=dict)


def methods_for(case: Case, scope: Scope) -> list[str]:
    """The methods to compare on a data set; a few of them at smoke scale."""
    data = tables_of(case, scope, "grid").get("data", {})
    equal = data.get("partition") == "dirichlet-equal"
    left_out = {EQUAL} if equal else set()
    names = SMOKE if scope.scale == "smoke" else methods()
    return [name for name in names if name not in left_out]


def tables_of(case: Case, scope: Scope, stage: str) -> dict[str, Any]:
    """A data set's recipe for the grid or for the final runs, at the scale asked for."""
    more = ["evaluate.every=1"] if scope.scale == "smoke" else []
    more += ["data.validation=0.2"] if case.stands_in else []
    return recipe_tables(case, f"serve-{case.name}", stage, more)


def searches(case: Case, scope: Scope, library: Library) -> list[Halving]:
    """The search of every method on a data set."""
    tables, tried = tables_of(case, scope, "grid"), 3 if scope.scale == "smoke" else None
    return [Halving(case, method, tables, library, tried) for method in methods_for(case, scope)]


def choice_of(case: Case, scope: Scope, library: Library) -> Choice | None:
    """What the rule chooses from the grid's runs; None while some are missing."""
    values, scores, served = {}, {}, {}
    for search in searches(case, scope, library):
        config = search.chosen
        if config is None:
            return None
        ends = {one.digest(): score for one, _, score in search.scores()}
        scores[search.method] = ends[config.digest()]
        values[search.method] = _values(search, config)
        served[search.method] = search.served()
    return Choice(values, scores, served)


def _values(search: Halving, config: RunConfig) -> dict[str, Any]:
    options = flatten(config.to_dict())
    return {name: options[name] for name in (*search.axes, "train.lr_schedule")}


@EXPERIMENTS.register("serve-grid")
class ServeGrid(Experiment):
    """Successive halving of every method's candidates, on validation data alone."""

    title = "Study of served models: parameters and their scores on the validation part"
    cases = CASES

    def more(self, scope: Scope, library: Library) -> list[Request]:
        """The runs of all searches, as far as they are known."""
        return [
            request
            for case in scope.cases(shown_cases(self.cases, scope))
            for search in searches(case, scope, library)
            for request in search.requests()
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Every candidate with its rounds and score; and what was chosen, for the final runs."""
        library, lines, gains = results.library, [], []
        choices: dict[str, Any] = {}
        for case in scope.cases(shown_cases(self.cases, scope)):
            for search in searches(case, scope, library):
                lines += list(_lines(case, search))
                gains += list(_gains(case, search))
            choice = choice_of(case, scope, library)
            if choice is not None:
                choices[case.name] = asdict(choice)
        output.table(self.title, output.csv("serve-grid", COLUMNS, lines))
        output.table(
            "What averages over rounds and computed heads gain",
            output.csv("serve-averages", GAINS, gains),
        )
        output.json("choice", choices)


def shown_cases(cases: tuple[str, ...], scope: Scope) -> tuple[str, ...]:
    """At smoke scale data that takes seconds, unless others are asked for."""
    return cases if scope.scale != "smoke" or scope.only else ("synthetic",)


def _lines(case: Case, search: Halving) -> Iterator[tuple[Any, ...]]:
    chosen = search.chosen
    for config, rounds, score in search.scores():
        candidate = config.title.partition(": ")[2]
        best = chosen is not None and config == chosen
        yield case.title, case.stands_in, search.method, candidate, rounds, 100 * score, best


def _gains(case: Case, search: Halving) -> Iterator[tuple[Any, ...]]:
    """The validation score of every model that the chosen run tests."""
    scores = search.served_scores
    for text, score in scores.items():
        gain = 100 * (score - scores[TRAINED])
        yield case.title, case.stands_in, search.method, text, 100 * score, gain


def read_choices(folder: Path) -> dict[str, Choice]:
    """The choices that earlier calls wrote below a folder, by data set."""
    return {
        name: Choice(**one)
        for file in sorted(folder.rglob("choice.json"))
        for name, one in json.loads(file.read_text(encoding="utf-8")).items()
    }
