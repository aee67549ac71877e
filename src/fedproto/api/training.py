"""The same from Python as from the command line: train, sweep, load, look inside, predict.

The common options are keywords, and so is every section of a recipe, as options that were made
already or as a dictionary.

    fedproto.run("digits", "cnn", "fedavg", rounds=20, engine={"device": "cpu"}, lr=0.05)
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedproto.api.progress import Callbacks, OnProgress, OnRound, progress_bar
from fedproto.api.result import Result, Results, hardly_learned, refusals, stored_facts
from fedproto.config import RunConfig, read_config
from fedproto.config.recipe import Sections, as_tables, axis_name, directory_name, set_option
from fedproto.config.run import asked_config
from fedproto.data.base import DATASETS, data_root
from fedproto.data.federation import Federation
from fedproto.data.own import located
from fedproto.disk.files import check_limit
from fedproto.errors import ConfigError, HardlyLearnedWarning, StoreError, printable
from fedproto.models.base import ModelOptions, build_model, under_seed
from fedproto.options import Options, read_options
from fedproto.rounds.runs import Run
from fedproto.simulate import check_assignment, model_for
from fedproto.simulate.driver import Assignment, carry_out
from fedproto.store import RunStore, open_or_create
from fedproto.store.sweeps import create_sweep, run_directories

Section: TypeAlias = "Options | Mapping[str, Any] | str"
Data: TypeAlias = "Federation | Section"
Model: TypeAlias = "nn.Module | Callable[[], nn.Module] | Section"


def run(
    data: Data,
    model: Model,
    strategy: Section = "fedproto",
    *,
    rounds: int | None = None,
    cohort: int | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    device: str | None = None,
    seed: int = 0,
    label: str = "",
    out: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    progress: bool | OnProgress = False,
    **sections: Unpack[Sections],
) -> Result:
    """Trains one strategy.

    Args:
        data: The clients' data: a federation, for instance from `Federation.from_clients`; or a
            data set's name, or its options.
        model: Any module that gives logits: training starts from its weights, which are left as
            they are. Or a function that makes one, which is called under the run's seed; or a
            model's name, or its options.
        strategy: The federated method: an instance, a name, or a name with options.
        rounds: Number of rounds; 50 by default.
        cohort: Clients per round.
        delta: Share of stragglers in a cohort.
        epochs: Local epochs.
        batch_size: Samples per local step.
        lr: Learning rate of local training.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        seed: Seed of initial weights, cohorts, stragglers and batch orders.
        label: What to call the run in tables; the strategy's name by default.
        out: A directory to keep the run in; a stopped run of the same configuration, data and model
            goes on there.
        on_round: Called with configuration and record after every round.
        progress: True for a bar; or called with the rounds done and the rounds in all.
        **sections: The sections of a recipe (`train`, `schedule`, `server`, `evaluate`, `engine`,
            …) as `TrainOptions` and its like, or as dictionaries.

    Raises:
        ConfigError: If an option is unknown, ambiguous or impossible.
        DataError: If data cannot be loaded.
        TrainingError: If model and data do not fit together.
        StoreError: If the directory cannot be used, or holds a run on other data.

    Warns:
        HardlyLearnedWarning: If most updates were refused, as with a learning rate that is much too
            high; the records say why.
    """
    common = _given(
        rounds=rounds, cohort=cohort, delta=delta, epochs=epochs, batch_size=batch_size, lr=lr,
        device=device,
    )  # fmt: skip
    keywords = {"strategy": strategy, "seed": seed, "label": label, **common, **sections}
    config = _config(data, model, as_tables(keywords))
    assignment = _assignment(config, _loaded(config, data), model)
    store = None if out is None else open_or_create(Path(out), config)
    return _train([assignment], [store], on_round, progress)[0]


def sweep(
    data: Data,
    model: Model,
    strategies: Mapping[str, Section] | Sequence[Section],
    *,
    seeds: int | Iterable[int] = 1,
    grid: Mapping[str, Sequence[Any]] | None = None,
    rounds: int | None = None,
    cohort: int | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    progress: bool | OnProgress = False,
    **sections: Unpack[Sections],
) -> Results:
    """Trains several strategies on the same cohorts and batches, together.

    Args:
        data: As in `run`; the same for all.
        model: As in `run`; the same for all.
        strategies: What to compare, by label: strategies as in `run`; or dictionaries of keywords
            of `run`, such as ``{"strategy": "fedavg", "delta": 0.5}``. A list has the strategies'
            own names as labels.
        seeds: How many, from 0 on; or which.
        grid: Values to try per option, in all combinations: ``{"lr": [0.01, 0.1]}``; options
            other than the common ones by dotted names, ``{"server.momentum": [0, 0.9]}``.
        rounds: As in `run`, and so are the other options.
        cohort: Clients per round.
        delta: Share of stragglers in a cohort.
        epochs: Local epochs.
        batch_size: Samples per local step.
        lr: Learning rate of local training.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        out: A directory to keep the runs in. Runs that are there already are reused, stopped ones
            go on, missing ones are added.
        on_round: Called with configuration and record after every round.
        progress: True for a bar; or called with the rounds done and the rounds in all.
        **sections: As in `run`, for all runs.

    Raises:
        FedprotoError: As `run`.
    """
    common = _given(
        rounds=rounds, cohort=cohort, delta=delta, epochs=epochs, batch_size=batch_size, lr=lr,
        device=device,
    )  # fmt: skip
    axes = {key: list(values) for key, values in (grid or {}).items()}
    chosen = range(seeds) if isinstance(seeds, int) else list(seeds)
    variants = _variants(strategies)
    number = len(variants) * len(chosen) * math.prod(map(len, axes.values()))
    check_limit("runs", number, "the sweep")
    configs: dict[str, RunConfig] = {}
    for label, changes in variants.items():
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            for seed in chosen:
                keywords = {**common, **sections, **changes, "seed": seed, "label": label}
                tables = as_tables(keywords | {k: v for k, v in point.items() if "." not in k})
                for key, value in point.items():
                    if "." in key:
                        set_option(tables, key, value)
                parts = [label, *itertools.starmap(axis_name, point.items()), f"seed{seed}"]
                configs[directory_name("-".join(parts))] = _config(data, model, tables)
    if not configs:
        raise ConfigError("a sweep needs at least one strategy, one value per option and one seed")
    loaded = _loaded(next(iter(configs.values())), data)
    assignments = [_assignment(config, loaded, model) for config in configs.values()]
    stores: Sequence[RunStore | None] = [None] * len(assignments)
    if out is not None:
        stores = create_sweep(Path(out), configs, reuse=True)
    return Results(_train(assignments, stores, on_round, progress))


def _given(**options: Any) -> dict[str, Any]:
    """The options that have a value."""
    return {name: value for name, value in options.items() if value is not None}


def _variants(strategies: Mapping[str, Section] | Sequence[Section]) -> dict[str, dict[str, Any]]:
    """Keywords of `run` by label."""
    if isinstance(strategies, str) or not isinstance(strategies, Mapping | Sequence):
        raise ConfigError(
            "sweep takes data, model and strategies in this order; strategies are a list or a"
            f" dictionary by label, not {strategies!r}"
        )
    if not isinstance(strategies, Mapping):
        named = [read_config({"strategy": strategy}).title for strategy in strategies]
        strategies = dict(zip(named, strategies, strict=True))
        if len(strategies) < len(named):
            raise ConfigError("two strategies have one name; give them labels in a dictionary")
    return {
        # A table with a name is a strategy's; one without is a table of keywords.
        label: dict(given)
        if isinstance(given, Mapping) and "name" not in given
        else {"strategy": given}
        for label, given in strategies.items()
    }


def load_data(name: str, **options: Any) -> Federation:
    """A data set by its name, shared out among clients as its options say.

    Args:
        name: As ``fedproto list datasets`` has it.
        **options: The data set's own options.

    Raises:
        ConfigError: If there is no such data set or option.
        DataError: If it cannot be loaded.
    """
    source = read_options(DATASETS.get(name), options, name)
    return located(source).load(data_root())


def load(
    directory: str | os.PathLike[str], *, model: Model | None = None, data: Federation | None = None
) -> Result:
    """A run as it stands in its directory: configuration, records, model.

    Args:
        directory: Of the run.
        model: The module, or a function that makes it, where it was given in Python.
        data: The federation, where it was given in Python.

    Raises:
        StoreError: If there is no run, or it is damaged.
    """
    store = RunStore.open(Path(directory))
    config = store.config
    build: Callable[[], nn.Module] | None = None
    described = data is not None or "input_shape" in store.description().get("data", {})
    if model is not None:
        build = _builder(config, model, data)
    elif config.model is not None and described:
        named = config.model.untrained()

        def build() -> nn.Module:
            about = stored_facts(store.path) if data is None else data.about()
            shape = tuple(about["input_shape"])
            return build_model(named, shape, about["num_classes"], config.seed)

    elif config.model is not None:
        build = _builder(config, config.model.untrained(), None)
    return Result(config, store.records(), store.load_checkpoint(), build, data, store.path)


def load_all(directory: str | os.PathLike[str]) -> Results:
    """All runs in and below a directory; a sweep's in its order.

    Raises:
        StoreError: If there is no run, or one is damaged.
    """
    found = run_directories(Path(directory)) if Path(directory).is_dir() else []
    if not found:
        raise StoreError(f"{directory} holds no run: no run.json in it or below")
    return Results([load(each) for each in found])


def _config(data: Data, model: Model, tables: dict[str, Any]) -> RunConfig:
    if not isinstance(data, Federation):
        tables["data"] = data
    if not _is_own(model):
        tables["model"] = model
    return asked_config(tables).located()


def _is_own(model: Model) -> bool:
    """Whether a model is a user's own module, or what makes one."""
    return isinstance(model, nn.Module) or (callable(model) and not isinstance(model, Options))


def _loaded(config: RunConfig, data: Data) -> Federation:
    if isinstance(data, Federation):
        return data
    assert config.data is not None  # noqa: S101 - put there by `_config`
    return config.data.load(data_root())


def _assignment(config: RunConfig, federation: Federation, model: Model) -> Assignment:
    own = _is_own(model)
    build = _builder(config, model if own else config.model, federation)
    check_assignment(config, federation, build())
    return Assignment(config, federation, build, id(model) if own else config.model)


def _builder(
    config: RunConfig, model: Any, federation: Federation | None
) -> Callable[[], nn.Module]:
    """What makes the module of a run, with its initial weights."""
    if not isinstance(model, ModelOptions):

        def make() -> nn.Module:
            made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
            if not isinstance(made, nn.Module):
                raise ConfigError(f"model must make a torch module, not {type(made).__name__}")
            if federation is not None and any(map(is_lazy, made.parameters())):
                training = made.training
                made.eval()(torch.zeros(1, *federation.input_shape))
                made.train(training)
            return made

        return lambda: under_seed(config.seed, make)

    def build_named() -> nn.Module:
        data = federation if federation is not None else _loaded(config, "")
        return model_for(replace(config, model=model), data)

    return build_named


def _train(
    assignments: Sequence[Assignment],
    stores: Sequence[RunStore | None],
    on_round: OnRound | None,
    progress: bool | OnProgress,
) -> list[Result]:
    kept = [replace(each, store=store) for each, store in zip(assignments, stores, strict=True)]
    total = sum(each.config.schedule.rounds for each in kept)
    done = sum(len(each.store.records()) for each in kept if each.store is not None)
    with progress_bar(progress, total) as on_progress:
        runs = carry_out(kept, Callbacks(done, total, on_round, on_progress))
    results = [_result(each, run) for each, run in zip(kept, runs, strict=True)]
    for result in results:
        if hardly_learned(result.records):
            warnings.warn(
                f"{printable(result.config.title)}, seed {result.config.seed}, has hardly learned:"
                f" {printable(refusals(result.records))}",
                HardlyLearnedWarning,
                stacklevel=3,
            )
    return results


def _result(assignment: Assignment, run: Run | None) -> Result:
    store, config = assignment.store, assignment.config
    path = None if store is None else store.path
    if run is None:
        assert store is not None  # noqa: S101 - only a kept run is over before it begins
        run_records, state = store.records(), store.load_checkpoint()
    else:
        run_records, state = run.records, run.state
    return Result(config, run_records, state, assignment.build, assignment.federation, path)
