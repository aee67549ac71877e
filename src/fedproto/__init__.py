"""Federated learning of visual models, guided by prototypes."""

from fedproto.aggregation import AggregateOptions
from fedproto.api import load, load_all, load_data, run, sweep
from fedproto.data import DATASETS, DataSource, Federation
from fedproto.errors import ConfigError, FedprotoError, StoreError
from fedproto.extend import extend
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
    QFedAvg,
    Scaffold,
    Strategy,
)
from fedproto.types import Prototypes, RoundRecord
from fedproto.version import __version__

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
