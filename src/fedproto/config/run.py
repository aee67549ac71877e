"""The configuration of a run: typed sections, the same in Python, recipes and run directories."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, TypedDict, get_type_hints

from torch import nn

from fedproto.callback import Callback
from fedproto.config.options import (
    EvaluateOptions,
    FlowerOptions,
    ScheduleOptions,
    StopOptions,
    StoreOptions,
    defended_method,
)
from fedproto.data.base import DATASETS, DataSource
from fedproto.data.federation import Federation
from fedproto.data.own import located
from fedproto.data.tasks import task_named
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.base import EngineOptions, Workload, check_engine_name
from fedproto.engines.setting import fitted
from fedproto.engines.training import TrainOptions
from fedproto.errors import ConfigError, unknown_name
from fedproto.measures import MEASURES, MeasureOptions
from fedproto.models.base import MODELS, ModelOptions
from fedproto.options import Options, Registry, is_unicode, options_to_dict, plain, read_options
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.sections import HeadOptions, Method, PrivacyOptions, ServerOptions
from fedproto.strategies.serve import ServeOptions
from fedproto.types import RoundRecord


@dataclass(frozen=True)
class RunConfig:
    """One strategy under one configuration and seed.

    Attributes:
        seed: Seed of initial weights, cohorts, stragglers and batch orders.
        label: Name of the run in tables; empty for the strategy's name.
        data: Data set and partition; None when the federation was given in Python.
        model: Architecture; None when the module was given in Python.
    """

    strategy: Strategy
    data: DataSource | None = None
    model: ModelOptions | None = None
    seed: int = 0
    label: str = ""
    train: TrainOptions = field(default_factory=TrainOptions)
    augment: AugmentOptions = field(default_factory=AugmentOptions)
    aggregate: AggregateOptions = field(default_factory=AggregateOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    head: HeadOptions = field(default_factory=HeadOptions)
    serve: ServeOptions = field(default_factory=ServeOptions)
    privacy: PrivacyOptions = field(default_factory=PrivacyOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    stop: StopOptions = field(default_factory=StopOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    flower: FlowerOptions = field(default_factory=FlowerOptions)

    @property
    def title(self) -> str:
        """The label, or the strategy's name."""
        return self.label or STRATEGIES.name_of(type(self.strategy))

    @cached_property
    def method(self) -> Method:
        """The strategy with the sections that combine with it."""
        server = self.server
        if server.lookahead is None and self.strategy.lookahead:
            server = dataclasses.replace(server, lookahead=self.strategy.lookahead)
        serve = self.serve.or_by_default(self.strategy.average)
        return Method(self.strategy, self.head, serve, server, self.aggregate, self.privacy)

    @property
    def partial_work(self) -> bool:
        """Whether updates of clients that finish part of their epochs are used."""
        given = self.schedule.partial_work
        return self.strategy.partial_work if given is None else given

    @cached_property
    def augmentation(self) -> AugmentOptions | None:
        """Augmentation of training images; None for none."""
        return self.augment if self.augment.active else None

    def defended(self) -> RunConfig:
        """The run with real clients: with ``flower.defence``, unless ``[aggregate]`` is given.

        Statistics of few samples are withheld, unless ``privacy.min_samples`` is given.

        Resolved when the run is made, so that a simulation of its description has the same bits.
        """
        if self.flower.min_clients > self.schedule.cohort:
            raise ConfigError(
                f"flower.min_clients must be at most schedule.cohort, {self.schedule.cohort}, not"
                f" {self.flower.min_clients}"
            )
        own = defended_method(self.method, self.flower.defence)
        return dataclasses.replace(self, aggregate=own.aggregate, privacy=own.privacy)

    def of_rounds(self, rounds: int) -> RunConfig:
        """The same with another number of rounds."""
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, rounds=rounds))

    def located(self) -> RunConfig:
        """The same, with an absolute path of own data."""
        return self if self.data is None else dataclasses.replace(self, data=located(self.data))

    @property
    def wants_validation(self) -> bool:
        """Whether models are also scored on validation data, where there is any."""
        stops_early = self.stop.target is not None or self.stop.patience is not None
        return self.evaluate.validation or stops_early

    def stop_reason(self, records: Sequence[RoundRecord]) -> str | None:
        """Why a run with these records is finished; None while it is not."""
        rounds = self.schedule.rounds
        if len(records) >= rounds:
            return f"all {rounds} rounds done"
        return self.stop.reason(records)

    def workload(
        self, federation: Federation, model: nn.Module, callback: Callback | None = None
    ) -> Workload:
        """What all jobs of a run share.

        Raises:
            TrainingError: If model and data do not fit together.
        """
        task = task_named(federation.task, federation.class_names)
        model = fitted(model.to(self.engine.torch_dtype()), federation, task)
        return Workload(federation, model, task, self.engine, callback or Callback())

    def to_dict(self) -> dict[str, Any]:
        """Plain tables that `read_config` reads back."""
        result: dict[str, Any] = {"seed": self.seed, "label": self.label}
        for name, registry in CHOICES.items():
            chosen: Options | None = getattr(self, name)
            if chosen is not None:
                kind = registry.name_of(type(chosen))
                result[name] = {"name": kind, **options_to_dict(chosen)}
        for name in SECTIONS:
            result[name] = options_to_dict(getattr(self, name))
        return result

    def to_recipe(self) -> dict[str, Any]:
        """The tables of `to_dict` without options that have their default."""
        tables = self.to_dict()
        for name in [*CHOICES, *SECTIONS]:
            for item in dataclasses.fields(getattr(self, name) or Options):
                if getattr(getattr(self, name), item.name) == item.default:
                    tables[name].pop(item.name, None)
        return {name: value for name, value in tables.items() if value not in ({}, "")}

    def digest(self) -> str:
        """A short hash of all that the results depend on."""
        return digest_of(self.to_dict())


Table: TypeAlias = Mapping[str, Any]


class Sections(TypedDict, total=False):
    """The sections of a recipe as keywords: options, or a table of them."""

    train: TrainOptions | Table
    augment: AugmentOptions | Table
    aggregate: AggregateOptions | Table
    server: ServerOptions | Table
    head: HeadOptions | Table
    serve: ServeOptions | Table
    privacy: PrivacyOptions | Table
    schedule: ScheduleOptions | Table
    evaluate: EvaluateOptions | Table
    measure: MeasureOptions | Table
    stop: StopOptions | Table
    store: StoreOptions | Table
    engine: EngineOptions | Table | str
    flower: FlowerOptions | Table


CHOICES: dict[str, Registry[Any]] = {"strategy": STRATEGIES, "data": DATASETS, "model": MODELS}
BASES: dict[str, type[Any]] = {"strategy": Strategy, "data": DataSource, "model": ModelOptions}
SECTIONS: dict[str, type[Options]] = {
    name: kind
    for name, kind in get_type_hints(RunConfig).items()
    if isinstance(kind, type) and issubclass(kind, Options) and name not in CHOICES
}
_NO_RESULT = ("label", "store", "flower")


def read_config(given: Mapping[str, Any], *, to_compare: bool = False) -> RunConfig:
    """Builds a run's configuration from plain tables.

    Instead of a table there may be options that were made already, or a name alone. With
    `to_compare` names of plugins that are not loaded are taken as they are: such a configuration
    can be compared with others, but not trained.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"a configuration must be sections of options, not {given!r}")
    known = [item.name for item in dataclasses.fields(RunConfig)]
    for name in given:
        if name not in known:
            found = dotted_names(name)
            hint = f"did you mean '{found[0]}'?" if found else None
            raise ConfigError(unknown_name("section or option", name, known, hint))
    parts: dict[str, Any] = {
        name: read_options(cls, as_table(given.get(name, {}), name), name)
        for name, cls in SECTIONS.items()
    }
    for name in CHOICES.keys() & given.keys():
        parts[name] = _read_choice(name, given[name], to_compare=to_compare)
    if "strategy" not in parts:
        raise ConfigError("strategy is missing; add a [strategy] section with a name")
    check_engine_name(parts["engine"].name)
    if not to_compare:
        _check_measures(given.get("measure", {}), parts["measure"])
    seed, label = plain(given.get("seed", 0)), given.get("label", "")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(f"seed must be an integer of at least 0, not {seed!r}")
    if not isinstance(label, str) or not is_unicode(label):
        raise ConfigError(f"label must be a string, not {label!r}")
    config = RunConfig(seed=seed, label=label, **parts)
    _ = config.method  # refuses sections that have no meaning together
    return config


def as_table(value: Any, name: str) -> Mapping[str, Any]:
    """A section as a table, from options that were made already, a name alone or a table."""
    if isinstance(value, Options):
        return options_to_dict(value)
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, type):
        raise ConfigError(f"{name} must be an instance, such as {value.__name__}(), not a class")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a section of options, not {value!r}")
    return value


def _read_choice(section: str, given: Any, *, to_compare: bool) -> Any:
    if isinstance(given, Options):
        return given
    registry, options = CHOICES[section], dict(as_table(given, section))
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{section}.name is missing; known: {', '.join(registry.names())}")
    if to_compare and name not in registry.names():
        return registry.stand_in(name, BASES[section], options)
    return read_options(registry.get(name, f"{section}.name"), options, section)


def _check_measures(given: Any, options: MeasureOptions) -> None:
    named = options.what != MeasureOptions().what
    if isinstance(given, Mapping):  # runs that are stored name both
        named = "what" in given and "every" not in given
    if named and options.every == 0:
        raise ConfigError(
            "measure.what has no effect without measure.every; set that to a number of rounds"
        )
    for name in options.what:
        MEASURES.get(name, "measure.what")


def dotted_names(name: str) -> list[str]:
    """The dotted names of all options of a name, in sections that depend on no choice."""
    return [
        f"{section}.{name}"
        for section, kind in SECTIONS.items()
        if name in (field.name for field in dataclasses.fields(kind))
    ]


def digest_of(tables: Mapping[str, Any]) -> str:
    """The digest of a configuration as plain tables."""
    parts = {name: part for name, part in tables.items() if name not in _NO_RESULT}
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(one: RunConfig, other: RunConfig) -> list[str]:
    """The dotted names of the options in which two configurations differ."""
    flat, others = flatten(one.to_dict()), flatten(other.to_dict())
    return sorted(name for name in flat.keys() | others if flat.get(name) != others.get(name))


def flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    if prefix.count(".") > 50:
        raise ConfigError(f"sections are nested too deeply: {prefix[:50]}…")
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
