"""Runs from beginning to end: what the command line and a Python program call.

`run` trains one strategy on a user's own federation and module. `simulate` carries out the runs of
a sweep that are described in run directories, from wherever each of them stands.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from fedproto.aggregation import AggregateOptions
from fedproto.augment import AugmentOptions
from fedproto.config import RunConfig, ScheduleOptions, differences
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.engines.base import ENGINES, Demand, Engine, Notify, Workload, ignore
from fedproto.engines.reference import load_state, read_state
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.measures.options import MeasureOptions
from fedproto.measures.reference import check_reference
from fedproto.models.base import build_model, features_of
from fedproto.options import read_options
from fedproto.planning import check_fits
from fedproto.rng import Purpose, torch_seed
from fedproto.rounds import Watcher, run_rounds
from fedproto.runs import Run, reason_to_end
from fedproto.server import ServerOptions
from fedproto.store import RunStore, is_run
from fedproto.strategies.base import Strategy
from fedproto.tasks import TaskOptions, task_named
from fedproto.training import TrainOptions
from fedproto.types import RoundRecord, ServerState

EngineFor: TypeAlias = Callable[[RunConfig, Federation, nn.Module, Notify], Engine]
"""Makes an engine for runs that share data, model and options."""


@dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
        records: What happened, round by round.
        model: A module with the final aggregate weights.
    """

    records: list[RoundRecord]
    model: nn.Module

    @property
    def metrics(self) -> dict[str, float]:
        """The scores of the last round."""
        return self.records[-1].metrics


def run(
    federation: Federation,
    model: nn.Module,
    strategy: Strategy,
    *,
    rounds: int = 50,
    cohort: int = 10,
    delta: float = 0.0,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    task: TaskOptions | None = None,
    augment: AugmentOptions | None = None,
    measure: MeasureOptions | None = None,
    aggregate: AggregateOptions | None = None,
    server: ServerOptions | None = None,
    **train: Any,
) -> Result:
    """Trains a user's own module on a user's own federation.

    Args:
        federation: The clients' data, for instance from `Federation.from_clients`.
        model: A module with ``features(x)``; see `with_features`. Training starts from its
            weights, which are left as they are.
        strategy: The federated method.
        rounds: Number of rounds.
        cohort: Clients per round.
        delta: Share of stragglers.
        seed: Seed of cohorts, stragglers and batch orders.
        out: A directory to keep the run in; a stopped run of the same configuration goes on there.
        task: What is asked of the federation's task beyond its data.
        augment: How training images are varied.
        measure: What is measured of the aggregate models, and how often.
        aggregate: How updates become one: their mean, or a rule that bears outliers.
        server: What the server does with that: nothing, or a step of an optimizer.
        **train: Options of local training: epochs, batch_size, lr, optimizer, …

    Raises:
        ConfigError: If an option is unknown or impossible.
        TrainingError: If model and data do not fit together.
        StoreError: If the directory cannot be used.
    """
    config = RunConfig(
        strategy=strategy,
        seed=seed,
        task=task or TaskOptions(),
        train=read_options(TrainOptions, train, "train"),
        augment=augment or AugmentOptions(),
        measure=measure or MeasureOptions(),
        aggregate=aggregate or AggregateOptions(),
        server=server or ServerOptions(),
        schedule=ScheduleOptions(rounds=rounds, cohort=cohort, delta=delta),
    )
    config.augment.check_fits(federation.input_shape)
    trained = copy.deepcopy(model)
    engine = build_engine(config, federation, model)
    params, buffers = read_state(model)
    initial = ServerState(0, params, config.train.shared_buffers(model, buffers))
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        if out is None:
            store, begun = None, Run(config, initial)
        else:
            store = open_or_create(Path(out), config)
            stack.enter_context(store.locked())
            begun = _begin(store, initial)
        for _, record in run_rounds([begun], federation, engine):
            if store is not None:
                _keep(store, begun, record)
    load_state(trained, begun.state)
    return Result(begun.records, trained)


def load_federations(configs: Iterable[RunConfig]) -> dict[DataSource, Federation]:
    """Loads the data of some runs and checks that all of them can run on it.

    Called before anything is written, so that a mistake leaves no half-made directory behind.

    Raises:
        FedprotoError: If data cannot be loaded, or model, cohort or device do not fit.
    """
    federations: dict[DataSource, Federation] = {}
    for config in configs:
        if config.data is None or config.model is None:
            raise ConfigError(
                "the run has no [data] or no [model]; if it was started from Python with own data"
                " or an own module, continue it there: fedproto.run(..., out=...)"
            )
        if config.data not in federations:
            try:
                federations[config.data] = config.data.load(data_root())
            except MemoryError as error:
                raise DataError(f"the data does not fit into memory: {error}") from None
        federation = federations[config.data]
        check_fits(config, federation)
        check_reference(config)
        task_named(federation.task)
        config.augment.check_fits(federation.input_shape)
        features_of(model_for(config, federation))
        config.engine.torch_device()
    return federations


def simulate(
    stores: Sequence[RunStore],
    watcher: Watcher | None = None,
    federations: Mapping[DataSource, Federation] | None = None,
    engine_for: EngineFor | None = None,
    patience: float = 0.0,
) -> None:
    """Carries out the runs of a sweep, each from where it stands, until all are over.

    Runs that share data, model and engine train together.

    Args:
        stores: The runs' directories.
        watcher: Is told how far things are.
        federations: The data, if it was loaded already with `load_federations`.
        engine_for: Makes the engine, in place of the one that the configuration names.
        patience: Seconds to wait for another process that is at the same directories.

    Raises:
        FedprotoError: If a configuration, the data or a directory is at fault.
    """
    watcher = watcher or Watcher()
    unfinished = [store for store in stores if not is_finished(store)]
    if federations is None:
        federations = load_federations(store.config for store in unfinished)
    for group in _groups(unfinished):
        first = group[0].config
        assert first.data is not None  # noqa: S101 - checked by `load_federations`
        federation = federations[first.data]
        with contextlib.ExitStack() as stack:
            for store in group:
                stack.enter_context(store.locked(patience))
            runs = [_begin(store, initial_state(store.config, federation)) for store in group]
            store_of = {id(begun): store for begun, store in zip(runs, group, strict=True)}
            model = model_for(first, federation)
            make = engine_for or build_engine
            engine = make(first, federation, model, watcher.notice)
            stack.callback(engine.close)
            for begun, record in run_rounds(runs, federation, engine, watcher):
                _keep(store_of[id(begun)], begun, record)
                watcher.round_done(begun, record)


def open_or_create(path: Path, config: RunConfig) -> RunStore:
    """The run directory of a configuration: the one that is there, or a new one.

    Raises:
        StoreError: If the directory holds a run of another configuration.
    """
    if not is_run(path):
        try:
            return RunStore.create(path, config)
        except StoreError:
            if not is_run(path):  # otherwise another process made it this moment
                raise
    store = RunStore.open(path)
    if store.config.digest() != config.digest():
        raise StoreError(
            f"{path} holds a run of another configuration (it differs in"
            f" {', '.join(differences(store.config, config))}); choose another --out"
        )
    return store


def is_finished(store: RunStore) -> bool:
    """Whether nothing is left to do in a run directory."""
    records = store.records()
    if reason_to_end(store.config, records) is None:
        return False
    # A kill between the last record and its checkpoint leaves that round to be done again.
    return store.config.store.checkpoint_every == 0 or store.newest_round() == len(records)


def _begin(store: RunStore, initial: ServerState) -> Run:
    state = store.load_checkpoint()
    if state is None:
        state = initial
    device = store.config.engine.torch_device()
    records = store.go_back_to(state.round)
    return Run(store.config, state.to(device), records, store.client_memory)


def _keep(store: RunStore, run: Run, record: RoundRecord) -> None:
    store.append(record)
    store.save_checkpoint(run.state, last=run.stop_reason is not None)


def _groups(stores: Iterable[RunStore]) -> list[list[RunStore]]:
    groups: dict[Any, list[RunStore]] = {}
    for store in stores:
        config = store.config
        shared = config.data, config.model, config.task, config.engine, config.train.batch_norm
        groups.setdefault(shared, []).append(store)
    return list(groups.values())


def model_for(config: RunConfig, federation: Federation) -> nn.Module:
    """The model of a run, with its initial weights."""
    assert config.model is not None  # noqa: S101 - checked by `load_federations`
    seed = torch_seed(config.seed, Purpose.MODEL)
    return build_model(config.model, federation.input_shape, federation.num_classes, seed)


def initial_state(config: RunConfig, federation: Federation) -> ServerState:
    """Where a run starts from."""
    model = model_for(config, federation).to(config.engine.torch_dtype())
    params, buffers = read_state(model)
    return ServerState(0, params, config.train.shared_buffers(model, buffers))


def build_engine(
    config: RunConfig, federation: Federation, model: nn.Module, notify: Notify = ignore
) -> Engine:
    """The engine that a configuration names, for runs that share data, model and options."""
    task = task_named(federation.task, federation.class_names, config.task)
    size = float(federation.train_sizes.mean())
    epochs = config.schedule.rounds * config.schedule.cohort * config.train.epochs
    demand = Demand(config.schedule.cohort, epochs * math.ceil(size / config.train.batch_size))
    workload = Workload(federation, model, task, config.engine, notify, demand)
    return ENGINES.get(config.engine.name)(workload)
