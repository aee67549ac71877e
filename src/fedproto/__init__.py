"""Federated learning of visual models, guided by prototypes."""

from typing import TYPE_CHECKING, Any

from fedproto.version import __version__

if TYPE_CHECKING:
    from fedproto.api import (
        Result,
        Results,
        analyse,
        load,
        load_all,
        load_data,
        predict,
        run,
        sweep,
    )
    from fedproto.config.options import (
        EvaluateOptions,
        FlowerOptions,
        ScheduleOptions,
        StopOptions,
        StoreOptions,
    )
    from fedproto.data import DATASETS, DataSource, Federation
    from fedproto.data.tasks import TaskOptions
    from fedproto.engines.augment import AugmentOptions
    from fedproto.engines.base import EngineOptions
    from fedproto.engines.training import TrainOptions
    from fedproto.errors import (
        ConfigError,
        DataError,
        FedprotoError,
        HardlyLearnedWarning,
        StoreError,
        TrainingError,
    )
    from fedproto.measures import MeasureOptions
    from fedproto.models import MODELS, FeatureModel, ModelOptions, with_features
    from fedproto.store.sweeps import extend
    from fedproto.strategies import (
        GHBM,
        STRATEGIES,
        Centralized,
        Ditto,
        FedACG,
        FedAtt,
        FedAvg,
        FedBABU,
        FedDecorr,
        FedDisco,
        FedDyn,
        FedLC,
        FedNova,
        FedNTD,
        FedPer,
        FedProto,
        FedProtoTan,
        FedProx,
        FedRep,
        FedRoD,
        FedRS,
        Moon,
        QFedAvg,
        Scaffold,
        Strategy,
    )
    from fedproto.strategies.aggregation import AggregateOptions
    from fedproto.strategies.sections import HeadOptions, Method, ServerOptions
    from fedproto.strategies.serve import ServeOptions
    from fedproto.types import Prototypes, RoundRecord

__all__ = [
    "DATASETS",
    "GHBM",
    "MODELS",
    "STRATEGIES",
    "AggregateOptions",
    "AugmentOptions",
    "Centralized",
    "ConfigError",
    "DataError",
    "DataSource",
    "Ditto",
    "EngineOptions",
    "EvaluateOptions",
    "FeatureModel",
    "FedACG",
    "FedAtt",
    "FedAvg",
    "FedBABU",
    "FedDecorr",
    "FedDisco",
    "FedDyn",
    "FedLC",
    "FedNTD",
    "FedNova",
    "FedPer",
    "FedProto",
    "FedProtoTan",
    "FedProx",
    "FedRS",
    "FedRep",
    "FedRoD",
    "Federation",
    "FedprotoError",
    "FlowerOptions",
    "HardlyLearnedWarning",
    "HeadOptions",
    "MeasureOptions",
    "Method",
    "ModelOptions",
    "Moon",
    "Prototypes",
    "QFedAvg",
    "Result",
    "Results",
    "RoundRecord",
    "Scaffold",
    "ScheduleOptions",
    "ServeOptions",
    "ServerOptions",
    "StopOptions",
    "StoreError",
    "StoreOptions",
    "Strategy",
    "TaskOptions",
    "TrainOptions",
    "TrainingError",
    "__version__",
    "analyse",
    "extend",
    "load",
    "load_all",
    "load_data",
    "predict",
    "run",
    "sweep",
    "with_features",
]

_HOMES = (
    "errors",
    "types",
    "data",
    "strategies",
    "strategies.aggregation",
    "strategies.serve",
    "strategies.sections",
    "models",
    "store.sweeps",
    "data.tasks",
    "engines.base",
    "engines.training",
    "engines.augment",
    "measures",
    "config.options",
    "api",
)
"""Where what is offered here comes from."""


def __getattr__(name: str) -> Any:
    """Imports what is asked for: PyTorch alone takes seconds, which not all commands need."""
    import importlib

    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"fedproto.{home}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    raise AttributeError(f"module 'fedproto' has no attribute '{name}'")


def __dir__() -> list[str]:
    """All that is offered here, imported or not."""
    return sorted({*globals(), *__all__})
