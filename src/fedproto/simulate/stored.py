"""Runs that are described by configurations and run directories, from beginning to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from fedproto.config import RunConfig
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation
from fedproto.engines.base import Workload
from fedproto.engines.setting import setting_of
from fedproto.errors import ConfigError, DataError, TrainingError
from fedproto.models.base import build_model, features_of, layers_in_words
from fedproto.rounds import Watcher
from fedproto.rounds.planning import check_fits
from fedproto.simulate.driver import Assignment, EngineFor, carry_out
from fedproto.simulate.reference import check_reference
from fedproto.store import RunStore
from fedproto.types import ServerState


def check_assignment(config: RunConfig, federation: Federation, model: nn.Module) -> None:
    """Checks that a configuration, data and a module go together.

    Called before anything is written, so that a mistake leaves no half-made directory behind.
    """
    check_fits(config, federation)
    check_reference(config)
    config.engine.torch_device()
    config.augment.check_fits(federation.input_shape)
    _check_declarations(config, config.workload(federation, model))


def _check_declarations(config: RunConfig, workload: Workload) -> None:
    """Checks that the model has the features and the head that a method needs."""
    method = config.method
    if "features" in method.needs.before | method.needs.after:
        features_of(workload.model)
    setting = setting_of(workload, dict(workload.model.named_parameters()))
    try:
        method.check(setting)
        method.server_memory(setting)
        method.payload(setting, 1)
    except TrainingError as error:
        if setting.has_head:
            raise
        kind = type(workload.model).__name__
        raise TrainingError(
            f"{error} ({kind}: head(features(x)) does not give its logits; name the layer that"
            f" does with_features(model, head='...'); {layers_in_words(workload.model)})"
        ) from None


def load_federations(configs: Iterable[RunConfig]) -> dict[DataSource, Federation]:
    """Loads the data of some runs and checks that all of them can run on it."""
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

    Data that was loaded already with `load_federations` is used; runs that are over are compared
    with it too.
    """
    if federations is None:
        federations = load_federations(store.config for store in stores if not store.finished)
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
    named = config.model
    architecture = None if named is None else replace(named.untrained(), init="torch")
    return Assignment(
        config, federation, lambda: model_for(config, federation), architecture, store
    )


def model_for(config: RunConfig, federation: Federation) -> nn.Module:
    """The model of a run, with its initial weights."""
    assert config.model is not None  # noqa: S101 - checked by `load_federations`
    return build_model(config.model, federation.input_shape, federation.num_classes, config.seed)


def initial_state(config: RunConfig, federation: Federation) -> ServerState:
    """Where a run starts from."""
    return assigned(config, federation).initial()
