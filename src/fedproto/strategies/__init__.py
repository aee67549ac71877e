"""The federated methods, one file each; `base` says what they can override."""

from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.centralized import Centralized
from fedproto.strategies.fedatt import FedAtt
from fedproto.strategies.fedavg import FedAvg
from fedproto.strategies.feddisco import FedDisco
from fedproto.strategies.feddyn import FedDyn
from fedproto.strategies.fedlc import FedLC
from fedproto.strategies.fednova import FedNova
from fedproto.strategies.fedproto import FedProto
from fedproto.strategies.fedprox import FedProx
from fedproto.strategies.fedrs import FedRS
from fedproto.strategies.qfedavg import QFedAvg
from fedproto.strategies.scaffold import Scaffold

__all__ = [
    "STRATEGIES",
    "Centralized",
    "FedAtt",
    "FedAvg",
    "FedDisco",
    "FedDyn",
    "FedLC",
    "FedNova",
    "FedProto",
    "FedProx",
    "FedRS",
    "QFedAvg",
    "Scaffold",
    "Strategy",
]
