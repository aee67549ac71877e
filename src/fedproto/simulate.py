"""Runs that are described by configurations and run directories, from beginning to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from fedproto.config import RunConfig, differences
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.data.own import located
from fedproto.driver import Assignment, EngineFor, carry_out, is_finished
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.measures.reference import check_reference
from fedproto.models.base import build_model, features_of
from fedproto.planning import check_fits
from fedproto.rng import Purpose, torch_seed
from fedproto.rounds import Watcher
from fedproto.store import RunStore, is_run
from fedproto.tasks import task_named
from fedproto.types import ServerState


def check_assignment(config: RunConfig, federation: Federation, model: nn.Module) -> None:
    """Checks that a configuration, data and a module go together.

    Called before anything is written, so that a mistake leaves no half-made directory behind.

    Raises:
        FedprotoError: If model, cohort or device do not fit.
    """
    check_fits(config, federation)
    check_reference(config)
    task_named(federation.task)
    config.augment.check_fits(federation.input_shape)
    features_of(model)
    config.engine.torch_device()


def load_federations(configs: Iterable[RunConfig]) -> dict[DataSource, Federation]:
    """Loads the data of some runs and checks that all of them can run on it.

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
        check_assignment(config, federation, model_for(config, federation))
    return federations


def simulate(
    stores: Sequence[RunStore],
    watcher: Watcher | None = None,
    federations: Mapping[DataSource, Federation] | None = None,
    engine_for: EngineFor | None = None,
    patience: float = 0.0,
) -> None:
    """Carries out the runs of a sweep, each from where it stands, until all are over.

    Args:
        stores: The runs' directories.
        watcher: Is told how far things are.
        federations: The data, if it was loaded already with `load_federations`. Runs that are over
            are compared with it too.
        engine_for: Makes the engine, in place of the one that the configuration names.
        patience: Seconds to wait for another process that is at the same directories.

    Raises:
        FedprotoError: If a configuration, the data or a directory is at fault.
    """
    if federations is None:
        federations = load_federations(store.config for store in stores if not is_finished(store))
    assignments = [
        assigned(store.config, federations[data], store)
        for store in stores
        if (data := store.config.data) is not None and data in federations
    ]
    carry_out(assignments, watcher, engine_for, patience)


def assigned(
    config: RunConfig, federation: Federation, store: RunStore | None = None
) -> Assignment:
    """A run whose model the configuration names."""
    return Assignment(
        config, federation, lambda: model_for(config, federation), config.model, store
    )


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
    if config.digest() not in (store.config.digest(), here(store.config).digest()):
        different = differences(store.config, config)
        more = f", or 'fedproto resume {path} --rounds {config.schedule.rounds}'"
        raise StoreError(
            f"{path} holds a run of another configuration (it differs in {', '.join(different)});"
            f" choose another directory{more if different == ['schedule.rounds'] else ''}"
        )
    return store


def here(config: RunConfig) -> RunConfig:
    """The same configuration, with a path of own data that no longer depends on where one is."""
    return config if config.data is None else replace(config, data=located(config.data))


def model_for(config: RunConfig, federation: Federation) -> nn.Module:
    """The model of a run, with its initial weights."""
    assert config.model is not None  # noqa: S101 - checked by `load_federations`
    seed = torch_seed(config.seed, Purpose.MODEL)
    return build_model(config.model, federation.input_shape, federation.num_classes, seed)


def initial_state(config: RunConfig, federation: Federation) -> ServerState:
    """Where a run starts from."""
    return assigned(config, federation).initial()
