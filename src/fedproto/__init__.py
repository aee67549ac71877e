"""Federated learning of visual models, guided by prototypes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedproto.aggregation import AggregateOptions
    from fedproto.data import DATASETS, DataSource, Federation
    from fedproto.errors import ConfigError, FedprotoError, StoreError
    from fedproto.models import MODELS, FeatureModel, ModelOptions, with_features
    from fedproto.server import ServerOptions
    from fedproto.simulate import Result, run
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
    from fedproto.types import Prototypes, RoundRecord

    __version__: str

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
    "RoundRecord",
    "Scaffold",
    "ServerOptions",
    "StoreError",
    "Strategy",
    "run",
    "with_features",
]

_MODULES = {
    "aggregation": ("AggregateOptions",),
    "data": ("DATASETS", "DataSource", "Federation"),
    "errors": ("ConfigError", "FedprotoError", "StoreError"),
    "models": ("MODELS", "FeatureModel", "ModelOptions", "with_features"),
    "server": ("ServerOptions",),
    "simulate": ("Result", "run"),
    "types": ("Prototypes", "RoundRecord"),
}
"""Where what is offered here comes from; all else is a strategy."""


def __getattr__(name: str) -> Any:
    """Imports what is asked for: PyTorch alone takes seconds, which not all commands need."""
    import importlib

    if name == "__version__":
        value: Any = _version()
    elif name in __all__:
        homes = [module for module, names in _MODULES.items() if name in names]
        value = getattr(importlib.import_module(f"fedproto.{[*homes, 'strategies'][0]}"), name)
    else:
        raise AttributeError(f"module 'fedproto' has no attribute '{name}'")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedproto")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
