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
    from fedproto.data import DATASETS, DataSource, Federation
    from fedproto.errors import ConfigError, FedprotoError, StoreError
    from fedproto.models import MODELS, FeatureModel, ModelOptions, with_features
    from fedproto.store.extending import extend
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
        QFedAvg,
        Scaffold,
        Strategy,
    )
    from fedproto.strategies.aggregation import AggregateOptions
    from fedproto.strategies.server import ServerOptions
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
    "api": (
        "Result",
        "Results",
        "analyse",
        "load",
        "load_all",
        "load_data",
        "predict",
        "run",
        "sweep",
    ),
    "data": ("DATASETS", "DataSource", "Federation"),
    "errors": ("ConfigError", "FedprotoError", "StoreError"),
    "models": ("MODELS", "FeatureModel", "ModelOptions", "with_features"),
    "store.extending": ("extend",),
    "strategies.aggregation": ("AggregateOptions",),
    "strategies.server": ("ServerOptions",),
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
