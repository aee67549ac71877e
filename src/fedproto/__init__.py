"""Federated learning of visual models, guided by prototypes."""

from importlib.metadata import PackageNotFoundError, version

from fedproto.aggregation import AggregateOptions
from fedproto.api import load, load_all, run, sweep
from fedproto.data import DATASETS, DataSource, Federation
from fedproto.extend import extend
from fedproto.insight import analyse, predict
from fedproto.models import MODELS, FeatureModel, ModelOptions, with_features
from fedproto.result import Result, Results
from fedproto.server import ServerOptions
from fedproto.strategies import STRATEGIES, Centralized, FedAtt, FedAvg, FedProto, FedProx, Strategy
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
    "DataSource",
    "FeatureModel",
    "FedAtt",
    "FedAvg",
    "FedProto",
    "FedProx",
    "Federation",
    "ModelOptions",
    "Prototypes",
    "Result",
    "Results",
    "RoundRecord",
    "ServerOptions",
    "Strategy",
    "analyse",
    "extend",
    "load",
    "load_all",
    "predict",
    "run",
    "sweep",
    "with_features",
]
