"""Federated learning of visual models, guided by prototypes."""

from importlib.metadata import PackageNotFoundError, version

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

try:
    __version__ = version("fedproto")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

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
