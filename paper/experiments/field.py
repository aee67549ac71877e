"""Published results of the field beside ours, each in the setting that its authors' code has."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd

from fedproto.report.results import StoredRun
from fedproto.strategies.serve import ServeOptions
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import Case, Scope
from paper.curves import spread_of
from paper.library import Request
from paper.output import Output

COLUMNS = (
    "setting",
    "trained_on",
    "method",
    "rounds",
    "of_rounds",
    "seeds",
    "ours",
    "std_over_seeds",
    "published",
    "difference",
    "rank",
    "published_rank",
)


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Per setting the source, the figures by method, and how our setting differs from theirs.

    Also the methods to train first, where these are not all that have a figure.
    """
    text = (Path(__file__).parents[1] / "field.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@EXPERIMENTS.register("field")
class Field(Experiment):
    """Methods in the settings of published tables, also where a run is still on its way."""

    title = "Published results of the field, and ours in the same setting"
    cases = ("field-cnn", "field-cnn-all", "field-resnet", "field-heads")

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the settings' recipes, with their own seeds; the deciding ones come first."""
        found = []
        for case in scope.cases(self.cases):
            entry = published()[case.name]
            first = entry.get("first", entry["figures"])
            found += [
                Request(case.name, config, begun=True, order=int(config.title not in first))
                for config in case.runs(own_seeds=scope.seeds is None)
            ]
        return found

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A row per setting and method, and what explains the distances."""
        rows = [row for case in scope.cases(self.cases) for row in _rows(case, results)]
        output.table(self.title, output.csv("field", COLUMNS, rows), by="setting")
        for case in scope.cases(self.cases):
            if results.labels(case.name):
                entry = published()[case.name]
                output.say(f"{case.title}: published by {entry['source']}")
                output.say("".join(f"  - {text}\n" for text in entry["differences"]).rstrip())


def _rows(case: Case, results: FoundRuns) -> list[tuple[Any, ...]]:
    """A row per method; ranks are among those of which both have a figure."""
    figures = published()[case.name]["figures"]
    found = [_row(case, method, runs) for method, runs in _methods(case, results).items()]
    frame = pd.DataFrame([row for row in found if row is not None], columns=list(COLUMNS))
    frame["published"] = frame["method"].map(figures)
    frame["difference"] = frame["ours"] - frame["published"]
    both = frame.dropna(subset=["published"])
    frame["rank"] = both["ours"].rank(ascending=False)
    frame["published_rank"] = both["published"].rank(ascending=False)
    return [tuple(row) for row in frame.itertuples(index=False)]


def _methods(case: Case, results: FoundRuns) -> dict[str, list[StoredRun]]:
    """The runs of every method: by label, or by the model where one run tests several."""
    runs = [each.run for each in results.select(case.name)]
    models = published()[case.name].get("models")
    if models is None:
        return {
            label: [each.run for each in results.select(case.name, label)]
            for label in results.labels(case.name)
        }
    heads = {method: ServeOptions.parse(text) for method, text in models.items()}
    return {method: [run.tested_as(one) for run in runs] for method, one in heads.items() if runs}


def _row(case: Case, method: str, runs: list[StoredRun]) -> tuple[Any, ...] | None:
    """A method's accuracy, the mean over the last tenth of the planned rounds up to now."""
    least = min(len(run.records) for run in runs)
    scores = [run.final("accuracy", least) for run in runs]
    ours = spread_of([[100 * score for score in scores if score is not None]])
    if ours is None or not ours.runs:
        return None
    planned = runs[0].config.schedule.rounds
    done = (least, planned, ours.runs, ours.mean, ours.over_seeds)
    return (case.title, case.stands_in, method, *done, None, None, None, None)
