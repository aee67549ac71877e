"""The paper's data sets as recipes, at three scales (``scales.toml``).

A *case* is one of them at one scale: the runs of its recipe, with the overrides of the scale, for
every seed asked for. Where the files of a data set are not there a small scale uses another data
set in its place, and the case says so.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from fedproto.config import RunConfig
from fedproto.config.recipe import read_recipe
from fedproto.data.base import DATASETS, DataSource, data_root
from fedproto.errors import ConfigError, unknown_name
from paper.library import settings_digest

ScaleName = Literal["smoke", "quick", "paper"]
SCALES: tuple[ScaleName, ...] = get_args(ScaleName)

CLASSIFICATION = ("synthetic", "mnist", "femnist", "celeba")
SEGMENTATION = ("fpascal-macro", "fpascal")
CENTRALIZED = "Centralized"
FAIR_AND_TOLERANT = "Fairness + toleration"
MEASURED = ("loss", "dissimilarity", "margin", "mmd")
"""What is measured of the models; the centralised run, to which MMD is taken, has no MMD."""


@functools.cache
def configs_of(recipe: str, overrides: tuple[str, ...] = ()) -> tuple[RunConfig, ...]:
    """The runs of a recipe: one of ``paper/recipes`` or of fedproto by name, or a file."""
    own = Path(__file__).parent / "recipes" / f"{recipe}.toml"
    return tuple(read_recipe(str(own) if own.is_file() else recipe, overrides).values())


@functools.cache
def case_table() -> dict[str, dict[str, Any]]:
    """What ``scales.toml`` says of each data set."""
    text = (Path(__file__).parent / "scales.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Case:
    """A data set of the paper at a scale.

    Attributes:
        fallback: The recipe of the centralised run where `recipe` has none; empty for none.
        stands_in: The name of the data set that is used in its place; empty for none.
        measure_every: Rounds between measurements of its models, unless the recipe or the user
            sets them; 0 for never.
    """

    name: str
    title: str
    recipe: str
    overrides: tuple[str, ...] = ()
    seeds: int = 1
    fallback: str = ""
    stands_in: str = ""
    measure_every: int = 0

    @property
    def full_title(self) -> str:
        """The data set's name, and what it was trained on where that is another, below it."""
        return self.title + (f"\n(on {self.stands_in})" if self.stands_in else "")

    def runs(
        self,
        keep: Callable[[RunConfig], bool] | None = None,
        *,
        recipe: str | None = None,
        own_seeds: bool = False,
    ) -> list[RunConfig]:
        """The federated runs of a recipe, for every seed.

        Of those of another recipe, such as the ablation's, the case's own are the same, and
        measured.
        """
        own = {settings_digest(replace(config, seed=0)) for config in self._read(self.recipe)}
        configs = [
            self._measured(config) if settings_digest(replace(config, seed=0)) in own else config
            for config in self._read(recipe or self.recipe)
            if not config.strategy.pooled and (keep is None or keep(config))
        ]
        if own_seeds:
            return configs
        seeded = (replace(config, seed=seed) for config in configs for seed in range(self.seeds))
        return list(dict.fromkeys(seeded))

    def centralized(self) -> list[RunConfig]:
        """The centralised run, for every seed; none where no recipe describes it.

        Stragglers do not touch it and the clients' class mix hardly does, so that of the largest α
        without stragglers is the only one.
        """
        configs = [config for config in self._read(self.recipe) if config.strategy.pooled]
        if not configs and self.fallback:
            configs = self._read(self.fallback)
        return [
            replace(
                self._measured(config),
                seed=seed,
                label=CENTRALIZED,
                schedule=replace(config.schedule, delta=0.0),
            )
            for config in configs[-1:]
            for seed in range(self.seeds)
        ]

    def sources(self) -> list[DataSource]:
        """The data of its runs, one per α where the recipe has several."""
        configs = self._read(self.recipe)
        return list(dict.fromkeys(config.data for config in configs if config.data is not None))

    def _measured(self, config: RunConfig) -> RunConfig:
        every = config.measure.every or self.measure_every
        options = replace(config.measure, every=every, what=MEASURED)
        config = replace(config, measure=options)
        return without_mmd(config) if config.strategy.pooled else config

    def _read(self, recipe: str) -> list[RunConfig]:
        try:
            return list(configs_of(recipe, self.overrides))
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None


@dataclass(frozen=True)
class Scope:
    """What was asked for.

    Attributes:
        seeds: Seeds per configuration; None for as many as a recipe says, or one.
        recipes: Recipes to use in place of the usual ones, by data set.
        settings: ``key=value`` texts that change options of all runs; ``dataset:key=value`` changes
            those of one data set.
    """

    scale: ScaleName = "smoke"
    seeds: int | None = None
    only: tuple[str, ...] = ()
    recipes: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        set_for = [name for name, _ in map(split_setting, self.settings) if name is not None]
        for what, names in (("--only", self.only), ("--recipe", self.recipes), ("--set", set_for)):
            for name in names:
                if name not in case_table():
                    raise ConfigError(f"{what}: {unknown_name('data set', name, case_table())}")

    def cases(self, names: tuple[str, ...]) -> list[Case]:
        """Those of the named data sets that were asked for."""
        return [self.case(name) for name in names if not self.only or name in self.only]

    def case(self, name: str) -> Case:
        """One data set at this scale."""
        entry = case_table()[name]
        recipe = self.recipes.get(name, entry["recipe"])
        own = {config.data for config in configs_of(recipe)}
        stand_in = self.scale in entry.get("stand_in_at", ["smoke"]) or (
            self.scale == "quick" and not all(is_present(source) for source in own)
        )
        overrides: list[str] = []
        if stand_in:
            overrides += entry.get("stand_in", [])
        elif name == "celeba":
            overrides.append("data.allow_missing=true")
        if self.scale == "quick" and not stand_in:
            overrides += entry.get("quick_data", [])
        overrides += entry.get(self.scale, [])
        about = map(split_setting, self.settings)
        settings = [setting for whose, setting in about if whose in (None, name)]
        case = Case(
            name=name,
            title=entry["title"],
            recipe=recipe,
            overrides=(*overrides, *settings),
            seeds=self.seeds or 1,
            fallback=entry.get("centralized", "") if self.scale == "paper" else "",
            measure_every=entry.get("measure", {}).get(self.scale, 0),
        )
        used = {DATASETS.name_of(type(source)) for source in case.sources()}
        return replace(case, stands_in=", ".join(sorted(used - {entry.get("data", name)})))


def split_setting(text: str) -> tuple[str | None, str]:
    """The data set that ``dataset:key=value`` is about, None for all, and the ``key=value``."""
    name, colon, rest = text.partition(":")
    # A value may hold a colon as well; a data set's name stands before any key.
    return (name, rest) if colon and "=" not in name else (None, text)


def without_mmd(config: RunConfig) -> RunConfig:
    """The same run, not compared with the centralised one."""
    what = tuple(name for name in config.measure.what if name != "mmd")
    return replace(config, measure=replace(config.measure, what=what))


def is_present(source: DataSource | None) -> bool:
    """Whether the files of a data set are there, as far as a look at its folder tells."""
    return source is None or source.is_present(data_root())
