"""Tuning with one budget for every method: successive halving on the validation part.

Every method gets as many configurations of its space, trained for as many rounds. After each rung
the best of them get more rounds, until a few have all rounds and the best of these is chosen.
Test samples are not read.

A rung goes by the records up to its own round, so a stopped tuning that is started again chooses
as if it had never stopped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedproto.callback import Callback
from fedproto.config import RunConfig, read_config
from fedproto.config.recipe import axes_of, directory_name, set_option, variants_of
from fedproto.data.base import DataSource
from fedproto.data.federation import Federation
from fedproto.data.tasks import headline, lower_is_better
from fedproto.errors import ConfigError, DataError
from fedproto.measures import MeasureOptions
from fedproto.options import Options, option, read_options
from fedproto.report.results import StoredRun
from fedproto.rng import Purpose, stream
from fedproto.rounds import runs_from, train
from fedproto.store import RunStore, is_run, open_or_create
from fedproto.store.sweeps import extend, inside


@dataclass(frozen=True)
class TuneOptions(Options):
    """How hyperparameters are chosen."""

    trials: int = option(9, "configurations per method", at_least=2)
    factor: int = option(
        3, "successive halving: one in this number of configurations continues", at_least=2
    )
    metric: str | None = option(
        None, "validation score to choose by; default: the task's main score"
    )


@dataclass(frozen=True)
class Trial:
    """One configuration of a method: the options tried, and the run that tries them."""

    method: str
    name: str
    chosen: Mapping[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class Tuning:
    """The configurations to try.

    Attributes:
        rungs: Configurations per method, and rounds that each of them has when they are compared.
    """

    options: TuneOptions
    trials: Sequence[Trial]
    rungs: Sequence[tuple[int, int]] = field(default_factory=list)

    @property
    def methods(self) -> list[str]:
        """The tuned methods, by title."""
        return list(dict.fromkeys(trial.method for trial in self.trials))

    @property
    def rounds_per_method(self) -> int:
        """The budget: the same for every method."""
        before = [0, *(rounds for _, rounds in self.rungs)]
        return sum(n * (r - past) for (n, r), past in zip(self.rungs, before, strict=False))


def planned(recipe: Mapping[str, Any]) -> Tuning:
    """Reads a recipe's section ``[tune]``.

    ``[tune.space]`` lists values by dotted option names for all methods, ``[variants.tune.space]``
    more for one. Methods with the same space try the same configurations.

    Raises:
        ConfigError: If there is no space, a method has too few configurations, or an option is
            invalid.
    """
    found: list[Trial] = []
    options = TuneOptions()
    for tables in variants_of(recipe, tuned=True):
        section = dict(tables.pop("tune", {}))
        axes = axes_of(section.pop("space", {}), "tune.space")
        options = read_options(TuneOptions, section, "tune")
        config = read_config(tables)
        points = list(itertools.product(*axes.values()))
        if not axes or len(points) < options.trials:
            raise ConfigError(
                f"{config.title} has {len(points) if axes else 0} configurations to try, fewer than"
                f' {options.trials} trials; list more values, such as [tune.space] "train.lr" ='
                " [0.01, 0.1], or set tune.trials"
            )
        if config.train.lr_schedule != "constant":
            raise ConfigError(
                "train.lr_schedule must be 'constant' for tuning: runs that do well get more rounds"
            )
        drawn = stream(config.seed, Purpose.TUNING).permutation(len(points))[: options.trials]
        for number in sorted(drawn.tolist()):
            chosen = dict(zip(axes, points[number], strict=True))
            changed = dict(tables)
            for key, value in chosen.items():
                set_option(changed, key, value)
            name, tried = directory_name(f"{config.title}-{number}"), read_config(changed)
            # Evaluated on validation data alone, without measures.
            evaluate = replace(tried.evaluate, validation=True, test=False)
            tried = replace(tried, evaluate=evaluate, measure=MeasureOptions()).located()
            found.append(Trial(config.title, name, chosen, tried))
    if len({trial.name for trial in found}) < len(found):
        raise ConfigError("two variants have the same label; give each its own")
    rounds = {trial.config.schedule.rounds for trial in found}
    if len(rounds) > 1:
        raise ConfigError("schedule.rounds must be the same for all methods that are tuned")
    return Tuning(options, found, _rungs(options, rounds.pop()))


def _rungs(options: TuneOptions, rounds: int) -> list[tuple[int, int]]:
    """Configurations and rounds of each rung; the last has all rounds."""
    sizes = [options.trials]
    while sizes[-1] > options.factor:
        sizes.append(math.ceil(sizes[-1] / options.factor))
    ends = [max(1, rounds // options.factor**left) for left in reversed(range(len(sizes)))]
    return list(zip(sizes, ends, strict=True))


def tune(
    tuning: Tuning,
    out: Path,
    federations: Mapping[DataSource, Federation],
    callbacks: Sequence[Callback] = (),
) -> list[tuple[Trial, float]]:
    """Trains what is missing, and gives the best configuration of every method, with its score.

    Raises:
        DataError: If there is no validation data.
        StoreError: If the folder holds another tuning.
    """
    if not all(len(federation.validation) for federation in federations.values()):
        raise DataError(
            "tuning needs validation data: set data.validation to the share of every client that"
            " the server keeps, such as 0.1"
        )
    left = list(tuning.trials)
    scores: dict[str, float] = {}
    for place, (_, rounds) in enumerate(tuning.rungs):
        runs = [_opened(inside(out, trial.name), trial, rounds) for trial in left]
        train(runs_from(runs, federations), callbacks)
        scores = {
            trial.name: _score(run, rounds, tuning.options.metric)
            for trial, run in zip(left, runs, strict=True)
        }
        keep = tuning.rungs[place + 1][0] if place + 1 < len(tuning.rungs) else 1
        left = [
            trial
            for method in tuning.methods
            for trial in _best([each for each in left if each.method == method], scores, keep)
        ]
    return [(trial, abs(scores[trial.name])) for trial in left]


def _opened(path: Path, trial: Trial, rounds: int) -> RunStore:
    """A trial's run, with at least this number of rounds to do."""
    planned = RunStore.open(path).config.schedule.rounds if is_run(path) else rounds
    open_or_create(path, trial.config.of_rounds(planned))
    if planned < rounds:
        extend(path, rounds)
    return RunStore.open(path)


def _score(run: RunStore, rounds: int, metric: str | None) -> float:
    """A run's validation score at a rung, negative for losses: larger is better."""
    records = run.records()[:rounds]
    name = metric or headline(name for record in records for name in record.metrics)
    if not name.startswith("validation_"):
        raise ConfigError(
            f"tune.metric must be a score on validation data, such as validation_accuracy, not"
            f" {name}"
        )
    found = StoredRun(run.path, run.config.of_rounds(rounds), records).final(name)
    if found is None or not math.isfinite(found):
        return -math.inf
    return -found if lower_is_better(name) else found


def _best(trials: Sequence[Trial], scores: Mapping[str, float], number: int) -> list[Trial]:
    """The best of a method's configurations, in their order; the earlier one of equal ones."""
    kept = sorted(trials, key=lambda trial: -scores[trial.name])[:number]
    return [trial for trial in trials if trial in kept]


def tuned_recipe(recipe: Mapping[str, Any], chosen: Sequence[Trial]) -> dict[str, Any]:
    """The recipe with the chosen options, without what was to be tuned."""
    result = {key: value for key, value in recipe.items() if key not in ("tune", "variants")}
    variants = []
    for variant, trial in zip(recipe.get("variants") or [{}], chosen, strict=True):
        changed = {key: value for key, value in variant.items() if key != "tune"}
        changed["label"] = trial.method
        for key, value in trial.chosen.items():
            set_option(changed, key, value)
        variants.append(changed)
    return {**result, "variants": variants}
