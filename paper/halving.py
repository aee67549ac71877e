"""How every method of a study gets its parameters: successive halving on validation data.

The rule, the same for all methods, and fixed before any test data is looked at:

1. A method has six candidates (``methods.toml``): values of its own parameter and learning rates,
   with a rate that decays by 0.998 a round. All are trained for a fifth of the rounds.
2. The best two are trained to half of the rounds.
3. The best is trained to the end, and so is the same with a rate that decays as a cosine, from the
   beginning. The better of the two is chosen.

A candidate's score is the mean of its tests on the validation part over the last tenth of the
planned rounds that it has by then; of equal ones the first counts as better. What is tested is the
newest model, as every method was published. Only the recommended method also chooses what it
serves: the best, on the same tests, of the newest model and of `AVERAGES`. The others are shown
with their own best average besides. Test data is never read (``evaluate.test = false``).

A fourth stage is about what the recommended method serves, and trains nothing else: its chosen run
is made once more, on a CPU the same to the bit, while clients also take feature statistics under
the chosen model. The best of the heads that are computed from them (`HEADS`) is served if it gains
at least `WORTH` on the same tests, since it costs bytes.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedproto.config import RunConfig
from fedproto.config.recipe import combine, read_tables, variants_of
from fedproto.options import options_to_dict
from fedproto.report.results import StoredRun
from fedproto.report.statistics import score_at, window_width
from fedproto.strategies.serve import ServeOptions
from paper.cases import Case
from paper.library import Library, Request, validation_score

SHARES, KEPT = (0.2, 0.5, 1.0), 2
"""Shares of the rounds after which candidates are compared; how many continue after the first."""

RATES = (0.3333, 1.0)
LAST_SCHEDULE: Literal["cosine"] = "cosine"
AVERAGES = ("average=ema", "average=ema decay=0.95", "average=all", "average=all growth=9.0")
"""Averages over rounds that are tested with every method."""

TRAINED = "average=none"

HEADS = tuple(f"head={head} forget={share}" for head in ("lda", "ridge") for share in (0.1, 0.03))
"""Computed heads, of statistics over about 10 and 33 rounds, under the average that is served."""

WORTH = 0.005
"""Gain on the validation score from which on a computed head is served."""


@functools.cache
def methods() -> Mapping[str, Mapping[str, Any]]:
    """The methods by name, as ``methods.toml`` writes them."""
    text = Path(__file__).with_name("methods.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def recipe_tables(case: Case, recipe: str, scale: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """A recipe of the study at the scale of the grid or of the final runs."""
    path = Path(__file__).parent / "recipes" / f"{recipe}.toml"
    return read_tables(str(path), (*case.overrides, *more), scale)


def written(
    tables: Mapping[str, Any], method: str, tested: Sequence[str] = AVERAGES
) -> dict[str, Any]:
    """A method's tables on those of a recipe; its runs test the newest model and others.

    Clients must get an average under which they take statistics: a head is what is served.
    """
    own = methods()[method]["method"]
    served = next((text for text in tested if ServeOptions.parse(text).computes_head), TRAINED)
    options = options_to_dict(ServeOptions.parse(served)) if served != TRAINED else {}
    serve = {**options, "also": [text for text in (TRAINED, *tested) if text != served]}
    with_own = variants_of({**tables, "variants": [{**own, "serve": serve}]})[0]
    return {**with_own, "label": method}


def without_head(text: str) -> str:
    """The average under which a served head is computed."""
    return replace(ServeOptions.parse(text), head="trained", forget=ServeOptions().forget).text


@dataclass(frozen=True)
class Halving:
    """The search for one method's parameters on one data set.

    Attributes:
        tables: The recipe's tables at the scale of the grid.
        tried: Number of candidates; None for all.
    """

    case: Case
    method: str
    tables: Mapping[str, Any]
    library: Library
    tried: int | None = None

    @property
    def axes(self) -> dict[str, list[Any]]:
        """The options that candidates differ in, and their values."""
        about, rate = methods()[self.method], self.tables["train"]["lr"]
        rates = [float(f"{rate * factor:.3g}") for factor in about.get("rates", RATES)]
        return {**about.get("values", {}), "train.lr": rates}

    @functools.cached_property
    def candidates(self) -> list[RunConfig]:
        """What is tried in the first stage; labels say the values."""
        found = combine([written(self.tables, self.method)], self.axes)
        return [self._labelled(config) for config in found.values()][: self.tried]

    def requests(self) -> list[Request]:
        """All runs that are wanted as far as is known by now."""
        found = [request for stage in self._stages for request in stage]
        config = self.with_heads()
        return found if config is None else [*found, self._request(config, SHARES[-1])]

    def scores(self) -> list[tuple[RunConfig, int, float]]:
        """Every candidate with the rounds that it got and its score there, in order."""
        found: dict[str, tuple[RunConfig, int, float]] = {}
        for stage in self._stages:
            for request in stage:
                score = self._score(request)
                if score is not None and request.first is not None:
                    found[request.config.digest()] = request.config, request.first, score
        return list(found.values())

    @functools.cached_property
    def chosen(self) -> RunConfig | None:
        """The configuration that the rule chooses; None while runs are missing."""
        *_, last = self._stages
        best = self._best(last) if last[-1].config.train.lr_schedule == LAST_SCHEDULE else None
        return best[0].config if best else None

    def served(self) -> str:
        """What to serve of the chosen run: its best average, or what else the method may serve."""
        scores = self.served_scores
        texts = AVERAGES if not self.serves_best else (TRAINED, *AVERAGES)
        best = max(texts, key=lambda text: scores.get(text, -1.0))
        heads = [text for text in scores if text not in (TRAINED, *AVERAGES)]
        head = max(heads, key=scores.__getitem__, default=best)
        return head if scores.get(head, -1.0) >= scores.get(best, -1.0) + WORTH else best

    @functools.cached_property
    def served_scores(self) -> dict[str, float]:
        """The validation score of every model that the chosen run tests; of heads where known."""
        scores: dict[str, float] = {}
        for config in filter(None, (self.chosen, self.with_heads())):
            run = self.result(config)
            if run is not None:
                texts = (run.config.serve.text, *run.config.serve.also)
                scores |= {one: validation_at(run, config.schedule.rounds, one) for one in texts}
        return scores

    def with_heads(self) -> RunConfig | None:
        """The chosen run with heads under its best average; None if it may have none."""
        config = self.chosen
        run = None if config is None else self.result(config)
        if config is None or run is None or not self.serves_best:
            return None
        scores = {one: validation_at(run, config.schedule.rounds, one) for one in self._texts}
        average = max(scores, key=scores.__getitem__)
        first, *others = (average.replace(TRAINED, "") + f" {head}" for head in HEADS)
        serve = replace(ServeOptions.parse(first), also=(*self._texts, *others))
        return replace(config, serve=serve, label=f"{config.label}, heads")

    def result(self, config: RunConfig) -> StoredRun | None:
        """The whole run of a configuration."""
        return self.library.find(Request(self.case.name, config, validated=True))

    @functools.cached_property
    def _stages(self) -> list[list[Request]]:
        """The stages up to the first that lacks runs."""
        configs, stages = self.candidates, []
        for share, kept in zip(SHARES, (KEPT, 1, 0), strict=True):
            if share == SHARES[-1]:
                train = replace(configs[0].train, lr_schedule=LAST_SCHEDULE)
                label = f"{configs[0].label}, {LAST_SCHEDULE}"
                configs = [configs[0], replace(configs[0], train=train, label=label)]
            stage = [self._request(config, share) for config in configs]
            stages.append(stage)
            best = self._best(stage)
            if best is None:
                break
            configs = [request.config for request in best[:kept]]
        return stages

    def _best(self, stage: list[Request]) -> list[Request] | None:
        """The candidates of a stage, best first; None while one of them is missing."""
        scores = [self._score(request) for request in stage]
        if None in scores:
            return None
        order = sorted(range(len(stage)), key=lambda index: -(scores[index] or 0.0))
        return [stage[index] for index in order]

    def _request(self, config: RunConfig, share: float) -> Request:
        first = max(1, round(share * config.schedule.rounds))
        return Request(self.case.name, config, validated=True, first=first)

    def _score(self, request: Request) -> float | None:
        run = self.library.find(request)
        if run is None:
            return None
        rounds = request.config.schedule.rounds
        return max(validation_at(run, rounds, text) for text in self._texts)

    @property
    def _texts(self) -> tuple[str, ...]:
        """The models by whose tests the method's candidates are compared."""
        return (TRAINED, *AVERAGES) if self.serves_best else (TRAINED,)

    @property
    def serves_best(self) -> bool:
        """Whether what is served is among the method's parameters."""
        return bool(methods()[self.method].get("serves_best"))

    def _labelled(self, config: RunConfig) -> RunConfig:
        """The label names the values of all axes, and is the same wherever the run is made."""
        tables, words = config.to_dict(), []
        for key in self.axes:
            section, name = key.split(".")
            words.append(f"{name} {tables[section][name]:g}")
        return replace(config, label=f"{self.method}: {', '.join(words)}")


def validation_at(run: StoredRun, planned: int, served: str) -> float:
    """The score of the rounds a run has by now: over the last tenth of the planned ones."""
    metric, shown = validation_score(run), run.tested_as(ServeOptions.parse(served))
    found = score_at(*shown.curve(metric), window_width(planned))
    return -1.0 if found is None else found
