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
    from fedproto.errors import ConfigError, FedprotoError, HardlyLearnedWarning, StoreError
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
        Guided,
        ProtoHead,
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
    "Guided",
    "HardlyLearnedWarning",
    "ModelOptions",
    "ProtoHead",
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

_HOMES = (
    "errors",
    "types",
    "data",
    "strategies",
    "strategies.aggregation",
    "strategies.server",
    "models",
    "store.extending",
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
