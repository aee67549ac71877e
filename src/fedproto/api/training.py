"""The same from Python as from the command line: train, sweep, load, look inside, predict.

Every section of a recipe is a keyword here, as a dictionary, as options that were made already, or
as a name alone; so is every single option of training and schedule.

    fedproto.run("digits", "cnn", "fedavg", rounds=20, engine={"device": "cpu"}, lr=0.05)
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fedproto.api.progress import Callbacks, OnProgress, OnRound, progress_bar
from fedproto.api.result import Result, Results, hardly_learned, refusals
from fedproto.config import RunConfig, read_config
from fedproto.config.keywords import as_tables
from fedproto.config.recipe import directory_name
from fedproto.data.base import DATASETS, data_root
from fedproto.data.federation import Federation
from fedproto.data.own import located
from fedproto.disk.limits import check_limit
from fedproto.errors import ConfigError, HardlyLearnedWarning, StoreError, printable
from fedproto.models.base import ModelOptions, under_seed
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
    out: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    progress: bool | OnProgress = False,
    **options: Any,
) -> Result:
    """Trains one strategy.

    Args:
        data: The clients' data: a federation, for instance from `Federation.from_clients`; or a
            data set's name, or its options.
        model: A module with ``features(x)``, see `with_features`: training starts from its weights,
            which are left as they are. Or a function that makes one, which is called under the
            run's seed; or a model's name, or its options.
        strategy: The federated method: an instance, a name, or a name with options.
        out: A directory to keep the run in; a stopped run of the same configuration, data and model
            goes on there.
        on_round: Is told of every round that is over.
        progress: True for a bar; or is told how many of how many rounds are done.
        **options: Sections of a recipe (`train`, `schedule`, `evaluate`, `measure`, `engine`, …) as
            dictionaries; `seed` and `label`; or single options of sections by their own names:
            rounds, cohort, delta, epochs, batch_size, lr, device, …

    Raises:
        ConfigError: If an option is unknown or impossible.
        DataError: If data cannot be loaded.
        TrainingError: If model and data do not fit together.
        StoreError: If the directory cannot be used, or holds a run on other data.

    Warns:
        HardlyLearnedWarning: If most updates were refused, as with a learning rate that is much too
            high; the records say why.
    """
    config = _config(data, model, {"strategy": strategy, **options})
    assignment = _assignment(config, _loaded(config, data), model)
    store = None if out is None else open_or_create(Path(out), config)
    return _train([assignment], [store], on_round, progress)[0]


def sweep(
    variants: Mapping[str, Section],
    data: Data,
    model: Model,
    *,
    seeds: int | Iterable[int] = 1,
    out: str | os.PathLike[str] | None = None,
    on_round: OnRound | None = None,
    progress: bool | OnProgress = False,
    **options: Any,
) -> Results:
    """Trains several strategies on the same cohorts and batches, together.

    Args:
        variants: What to compare, by label: strategies as in `run`; or dictionaries of keywords of
            `run`, such as ``{"strategy": "fedavg", "delta": 0.5}``.
        data: As in `run`; the same for all.
        model: As in `run`; the same for all.
        seeds: How many, from 0 on; or which.
        out: A directory to keep the runs in; a stopped sweep goes on there.
        on_round: Is told of every round that is over.
        progress: True for a bar; or is told how many of how many rounds are done.
        **options: As in `run`, for all runs.

    Raises:
        FedprotoError: As `run`.
    """
    chosen = range(seeds) if isinstance(seeds, int) else list(seeds)
    check_limit("runs", len(variants) * len(chosen), "the sweep")
    configs: dict[str, RunConfig] = {}
    for label, variant in variants.items():
        # A table with a name is a strategy's; one without is a table of keywords.
        plain = isinstance(variant, Mapping) and "name" not in variant
        changes = dict(variant) if isinstance(variant, Mapping) and plain else {"strategy": variant}
        for seed in chosen:
            keywords = {**options, **changes, "seed": seed, "label": label}
            configs[directory_name(f"{label}-seed{seed}")] = _config(data, model, keywords)
    if not configs:
        raise ConfigError("a sweep needs at least one variant and one seed")
    loaded = _loaded(next(iter(configs.values())), data)
    assignments = [_assignment(config, loaded, model) for config in configs.values()]
    stores: Sequence[RunStore | None] = [None] * len(assignments)
    if out is not None:
        stores = create_sweep(Path(out), configs, reuse=True)
    return Results(_train(assignments, stores, on_round, progress))


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
    if model is not None:
        build = _builder(config, model, data)
    elif config.model is not None:
        build = _builder(config, config.model.untrained(), data)
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


def _config(data: Data, model: Model, keywords: Mapping[str, Any]) -> RunConfig:
    tables = as_tables(keywords)
    if not isinstance(data, Federation):
        tables["data"] = data
    if not _is_own(model):
        tables["model"] = model
    return read_config(tables).located()


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
    if isinstance(model, nn.Module):
        return lambda: copy.deepcopy(model)
    if not isinstance(model, ModelOptions):

        def build() -> nn.Module:
            made = under_seed(config.seed, model)
            if not isinstance(made, nn.Module):
                raise ConfigError(f"model must make a torch module, not {type(made).__name__}")
            return made

        return build

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
