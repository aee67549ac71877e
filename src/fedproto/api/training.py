"""The same from Python as from the command line: train, sweep, load, look inside, predict.

The common options are keywords, and so is every section of a recipe, as options that were made
already or as a dictionary.

    fedproto.run("digits", "cnn", "fedavg", rounds=20, engine={"device": "cpu"}, lr=0.05)
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedproto.api.progress import progress_for
from fedproto.api.result import Result, Results, hardly_learned, refusals
from fedproto.callback import Callback, CallbackList
from fedproto.config import RunConfig, Sections, read_config
from fedproto.config.recipe import COMMON, as_tables, axes_of, combine, dotted_keyword
from fedproto.config.run import as_table
from fedproto.data.base import DATASETS, data_root
from fedproto.data.federation import Federation
from fedproto.data.own import located
from fedproto.errors import ConfigError, HardlyLearnedWarning, printable
from fedproto.models.base import build_model, under_seed
from fedproto.options import Options, plain, read_options
from fedproto.rounds import Run, train
from fedproto.store import RunStore, open_or_create
from fedproto.store.sweeps import create_sweep, found_in

_log = logging.getLogger("fedproto")

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
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
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
        label: Name of the run in tables; default: the strategy's name.
        out: A directory to keep the run in; a stopped run of the same configuration, data and model
            continues there.
        callbacks: Follow the training; see `fedproto.Callback`.
        progress: Whether to show how far the training is, on standard error.
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
    follower = CallbackList(callbacks)
    common = _given(rounds, cohort, delta, epochs, batch_size, lr, device)
    keywords = {"strategy": strategy, "seed": seed, "label": label, **common, **sections}
    config = read_config(_tables(data, model, keywords)).located()
    one = _checked_run(config, _loaded(config, data), model)
    if out is not None:
        one.store = open_or_create(Path(out), config)
    return _train([one], follower, progress=progress)[0]


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
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
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
            continue, missing ones are added.
        callbacks: Follow the training; see `fedproto.Callback`.
        progress: Whether to show how far the training is, on standard error.
        **sections: As in `run`, for all runs.

    Raises:
        FedprotoError: As `run`.
    """
    follower = CallbackList(callbacks)
    common = _given(rounds, cohort, delta, epochs, batch_size, lr, device)
    variants = [
        _tables(data, model, {**common, **sections, **changes, "label": label})
        for label, changes in _variants(strategies).items()
    ]
    seeds = plain(seeds)
    named = as_table({} if grid is None else grid, "grid")
    values: dict[str, Any] = {dotted_keyword(key): one for key, one in named.items()}
    values["seed"] = range(seeds) if isinstance(seeds, int) else seeds
    axes = axes_of(values, "sweep")
    configs = {name: config.located() for name, config in combine(variants, axes).items()}
    if not configs:
        raise ConfigError("a sweep needs at least one strategy")
    loaded = _loaded(next(iter(configs.values())), data)
    runs = [_checked_run(config, loaded, model) for config in configs.values()]
    if out is not None:
        for one, store in zip(runs, create_sweep(Path(out), configs, reuse=True), strict=True):
            one.store = store
    return Results(_train(runs, follower, progress=progress))


def _given(*values: float | str | None) -> dict[str, Any]:
    """The common options that have a value, given in the order of `COMMON`."""
    return {name: value for name, value in zip(COMMON, values, strict=True) if value is not None}


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
            raise ConfigError("two strategies have the same name; give them labels in a dictionary")
    return {
        # A table with a name is a strategy's; one without is a table of keywords.
        label: dict(given)
        if isinstance(given, Mapping) and "name" not in given
        else {"strategy": given}
        for label, given in strategies.items()
    }


def load_data(name: str, **options: Any) -> Federation:
    """A data set by its name, divided among clients as its options say.

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
    directory: str | os.PathLike[str],
    *,
    model: Model | None = None,
    data: Federation | None = None,
    best: bool = False,
) -> Result:
    """A run as it stands in its directory: configuration, records, model.

    Args:
        directory: Of the run.
        model: The module, or a function that makes it, where it was given in Python.
        data: The federation, where it was given in Python.
        best: The model with the best validation score (``store.best``) instead of the newest.

    Raises:
        StoreError: If there is no run, or it is damaged, or no best model was kept.
    """
    store = RunStore.open(Path(directory))
    config = store.config
    state = store.load_best() if best else store.load_checkpoint()
    result = Result(config, store.records(), state, None, data, store.path)
    if model is not None:
        return replace(result, build=_builder(config, model, data))
    if config.model is None:
        return result
    named = config.model.untrained()

    def build() -> nn.Module:
        about = result.about_data()
        shape = tuple(about["input_shape"])
        return build_model(named, shape, about["num_classes"], config.seed)

    return replace(result, build=build)


def load_all(directory: str | os.PathLike[str]) -> Results:
    """All runs in and below a directory; a sweep's in its order.

    Raises:
        StoreError: If there is no run, or one is damaged.
    """
    return Results([load(each) for each in found_in(Path(directory))])


def _tables(data: Data, model: Model, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a recipe; without data or model that were given in Python."""
    tables = as_tables(keywords)
    if not isinstance(data, Federation):
        tables["data"] = _named(data, "data", "a federation, as Federation.from_clients makes one")
    if not _is_own(model):
        tables["model"] = _named(model, "model", "a torch module, a function that makes one")
    return tables


def _named(given: Any, kind: str, own: str) -> Section:
    if not isinstance(given, Options | Mapping | str):
        raise ConfigError(
            f"{kind} must be {own}, a name or a section of options, not {type(given).__name__}"
        )
    return given


def _is_own(model: Model) -> bool:
    """Whether a model is a user's own module, or what makes one."""
    return isinstance(model, nn.Module) or (callable(model) and not isinstance(model, Options))


def _loaded(config: RunConfig, data: Data) -> Federation:
    if isinstance(data, Federation):
        return data
    assert config.data is not None  # noqa: S101 - put there by `_tables`
    return config.data.load(data_root())


def _checked_run(config: RunConfig, federation: Federation, model: Model) -> Run:
    if _is_own(model):
        run = Run(config, federation, _builder(config, model, federation), architecture=id(model))
    else:
        run = Run(config, federation)
    run.check()
    return run


def _builder(
    config: RunConfig, model: Any, federation: Federation | None
) -> Callable[[], nn.Module]:
    """A function that makes a user's own module, with its initial weights."""

    def make() -> nn.Module:
        made = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model must return a torch module, not {type(made).__name__}")
        if federation is not None and any(map(is_lazy, made.parameters())):
            training = made.training
            made.eval()(torch.zeros(1, *federation.input_shape))
            made.train(training)
        return made

    return lambda: under_seed(config.seed, make)


class _Log(Callback):
    """Writes notices to the log of the program."""

    def on_notice(self, text: str) -> None:
        _log.info("%s", printable(text))


def _train(runs: Sequence[Run], callback: Callback, *, progress: bool) -> list[Result]:
    stores = [run.store for run in runs if run.store is not None]
    total = sum(run.config.schedule.rounds for run in runs)
    with progress_for(stores, total) if progress else nullcontext(Callback()) as shown:
        train(runs, [_Log(), shown, callback])
    for run in runs:
        if hardly_learned(run.records):
            warnings.warn(
                f"{printable(run.config.title)}, seed {run.config.seed}, has hardly learned:"
                f" {printable(refusals(run.records))}",
                HardlyLearnedWarning,
                stacklevel=3,
            )
    return [_result(run) for run in runs]


def _result(run: Run) -> Result:
    # A run that was finished before may have kept no checkpoint.
    state = run.state if run.state.round == len(run.records) else None
    path = None if run.store is None else run.store.path
    return Result(run.config, run.records, state, run.build, run.federation, path)
