"""The federated methods, one file each; `base` says what they can override.

This module also exports what a strategy of one's own needs: declarations, batches, reports.
"""

from fedproto.options import option
from fedproto.strategies.base import (
    STRATEGIES,
    Batch,
    Declarations,
    Declared,
    Local,
    Needs,
    Objective,
    Observation,
    Outputs,
    Report,
    Seen,
    Setting,
    Strategy,
    equal_weights,
    size_weights,
)
from fedproto.strategies.ditto import Ditto
from fedproto.strategies.fedacg import FedACG
from fedproto.strategies.fedatt import FedAtt
from fedproto.strategies.fedavg import Centralized, FedAvg
from fedproto.strategies.fedbabu import FedBABU
from fedproto.strategies.feddecorr import FedDecorr
from fedproto.strategies.feddisco import FedDisco
from fedproto.strategies.feddyn import FedDyn
from fedproto.strategies.fedlc import FedLC
from fedproto.strategies.fednova import FedNova
from fedproto.strategies.fedntd import FedNTD
from fedproto.strategies.fedper import FedPer
from fedproto.strategies.fedproto import FedProto
from fedproto.strategies.fedprototan import FedProtoTan
from fedproto.strategies.fedprox import FedProx
from fedproto.strategies.fedrep import FedRep
from fedproto.strategies.fedrod import FedRoD
from fedproto.strategies.fedrs import FedRS
from fedproto.strategies.ghbm import GHBM
from fedproto.strategies.moon import Moon
from fedproto.strategies.qfedavg import QFedAvg
from fedproto.strategies.scaffold import Scaffold
from fedproto.strategies.sections import Method
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState, part, under

__all__ = [
    "GHBM",
    "STRATEGIES",
    "Batch",
    "Centralized",
    "ClientUpdate",
    "ClientWeights",
    "Declarations",
    "Declared",
    "Ditto",
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
    "Local",
    "Method",
    "Moon",
    "Needs",
    "Objective",
    "Observation",
    "Outputs",
    "Prototypes",
    "QFedAvg",
    "Report",
    "Scaffold",
    "Seen",
    "ServerState",
    "Setting",
    "Strategy",
    "equal_weights",
    "option",
    "part",
    "size_weights",
    "under",
]
