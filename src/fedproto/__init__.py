"""Federated learning of visual models, guided by prototypes."""

from typing import TYPE_CHECKING, Any

from fedproto.version import __version__

if TYPE_CHECKING:
    from fedproto.aggregation import AggregateOptions
    from fedproto.api import load, load_all, load_data, run, sweep
    from fedproto.data import DATASETS, DataSource, Federation
    from fedproto.errors import ConfigError, FedprotoError, StoreError
    from fedproto.extending import extend
    from fedproto.insight import analyse, predict
    from fedproto.models import MODELS, FeatureModel, ModelOptions, with_features
    from fedproto.result import Result, Results
    from fedproto.server import ServerOptions
    from fedproto.strategies import (
        STRATEGIES,
        Centralized,
        FedAtt,
        FedAvg,
        FedDisco,
        FedDyn,
        FedLC,
        FedNova,
        FedProto,
        FedProx,
        FedRS,
        Guided,
        QFedAvg,
        Scaffold,
        Strategy,
    )
    from fedproto.types import Prototypes, RoundRecord

__all__ = [
    "DATASETS",
    "MODELS",
    "STRATEGIES",
    "AggregateOptions",
    "Centralized",
    "ConfigError",
    "DataSource",
    "FeatureModel",
    "FedAtt",
    "FedAvg",
    "FedDisco",
    "FedDyn",
    "FedLC",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedRS",
    "Federation",
    "FedprotoError",
    "Guided",
    "ModelOptions",
    "Prototypes",
    "QFedAvg",
    "Result",
    "Results",
    "RoundRecord",
    "Scaffold",
    "ServerOptions",
    "StoreError",
    "Strategy",
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

_MODULES = {
    "aggregation": ("AggregateOptions",),
    "api": ("load", "load_all", "load_data", "run", "sweep"),
    "data": ("DATASETS", "DataSource", "Federation"),
    "errors": ("ConfigError", "FedprotoError", "StoreError"),
    "extending": ("extend",),
    "insight": ("analyse", "predict"),
    "models": ("MODELS", "FeatureModel", "ModelOptions", "with_features"),
    "result": ("Result", "Results"),
    "server": ("ServerOptions",),
    "types": ("Prototypes", "RoundRecord"),
}
"""Where what is offered here comes from; all else is a strategy."""


def __getattr__(name: str) -> Any:
    """Imports what is asked for: PyTorch alone takes seconds, which not all commands need."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module 'fedproto' has no attribute '{name}'")
    homes = [module for module, names in _MODULES.items() if name in names]
    value = getattr(importlib.import_module(f"fedproto.{[*homes, 'strategies'][0]}"), name)
    globals()[name] = value
    return value
