"""Federated learning of visual models, guided by prototypes.

PyTorch takes seconds to import, so a name is imported when it is first asked for. The names and
their modules are listed once, below, where type checkers read them; at run time they are read from
this source.
"""

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedproto.version import __version__ as __version__

if TYPE_CHECKING:
    from fedproto.api.analysing import analyse as analyse
    from fedproto.api.predictor import predict as predict
    from fedproto.api.result import Result as Result
    from fedproto.api.result import Results as Results
    from fedproto.api.training import load as load
    from fedproto.api.training import load_all as load_all
    from fedproto.api.training import load_data as load_data
    from fedproto.api.training import run as run
    from fedproto.api.training import sweep as sweep
    from fedproto.callback import Callback as Callback
    from fedproto.config.options import EvaluateOptions as EvaluateOptions
    from fedproto.config.options import FlowerOptions as FlowerOptions
    from fedproto.config.options import ScheduleOptions as ScheduleOptions
    from fedproto.config.options import StopOptions as StopOptions
    from fedproto.config.options import StoreOptions as StoreOptions
    from fedproto.data import DATASETS as DATASETS
    from fedproto.data import DataSource as DataSource
    from fedproto.data import Federation as Federation
    from fedproto.engines.augment import AugmentOptions as AugmentOptions
    from fedproto.engines.base import EngineOptions as EngineOptions
    from fedproto.engines.training import TrainOptions as TrainOptions
    from fedproto.errors import ConfigError as ConfigError
    from fedproto.errors import DataError as DataError
    from fedproto.errors import FedprotoError as FedprotoError
    from fedproto.errors import HardlyLearnedWarning as HardlyLearnedWarning
    from fedproto.errors import StoreError as StoreError
    from fedproto.errors import TrainingError as TrainingError
    from fedproto.measures import MeasureOptions as MeasureOptions
    from fedproto.models import MODELS as MODELS
    from fedproto.models import FeatureModel as FeatureModel
    from fedproto.models import ModelOptions as ModelOptions
    from fedproto.models import with_features as with_features
    from fedproto.store.sweeps import extend as extend
    from fedproto.strategies import STRATEGIES as STRATEGIES
    from fedproto.strategies import Strategy as Strategy
    from fedproto.strategies.aggregation import AggregateOptions as AggregateOptions
    from fedproto.strategies.ditto import Ditto as Ditto
    from fedproto.strategies.fedacg import FedACG as FedACG
    from fedproto.strategies.fedatt import FedAtt as FedAtt
    from fedproto.strategies.fedavg import Centralized as Centralized
    from fedproto.strategies.fedavg import FedAvg as FedAvg
    from fedproto.strategies.fedbabu import FedBABU as FedBABU
    from fedproto.strategies.feddecorr import FedDecorr as FedDecorr
    from fedproto.strategies.feddisco import FedDisco as FedDisco
    from fedproto.strategies.feddyn import FedDyn as FedDyn
    from fedproto.strategies.fednova import FedNova as FedNova
    from fedproto.strategies.fedntd import FedNTD as FedNTD
    from fedproto.strategies.fedper import FedPer as FedPer
    from fedproto.strategies.fedproto import FedProto as FedProto
    from fedproto.strategies.fedprototan import FedProtoTan as FedProtoTan
    from fedproto.strategies.fedprox import FedProx as FedProx
    from fedproto.strategies.fedrep import FedRep as FedRep
    from fedproto.strategies.fedrod import FedRoD as FedRoD
    from fedproto.strategies.ghbm import GHBM as GHBM
    from fedproto.strategies.moon import Moon as Moon
    from fedproto.strategies.scaffold import Scaffold as Scaffold
    from fedproto.strategies.sections import HeadOptions as HeadOptions
    from fedproto.strategies.sections import Method as Method
    from fedproto.strategies.sections import PrivacyOptions as PrivacyOptions
    from fedproto.strategies.sections import ServerOptions as ServerOptions
    from fedproto.strategies.serve import ServeOptions as ServeOptions
    from fedproto.strategies.steady import Steady as Steady
    from fedproto.types import Prototypes as Prototypes
    from fedproto.types import RoundRecord as RoundRecord
else:

    def __getattr__(name: str) -> Any:
        """Imports a name when it is first asked for."""
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'fedproto' has no attribute '{name}'")
        globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return globals()[name]


_MODULE_OF = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fedproto.")
    for alias in node.names
}

__all__ = sorted(_MODULE_OF)


def __dir__() -> list[str]:
    """All names, imported or not."""
    return [*__all__, "__all__", "__doc__", "__version__"]
