"""The federated methods, one file each; `base` says what they can override."""

from fedproto.strategies.base import STRATEGIES, Strategy
from fedproto.strategies.centralized import Centralized
from fedproto.strategies.fedatt import FedAtt
from fedproto.strategies.fedavg import FedAvg
from fedproto.strategies.fedproto import FedProto
from fedproto.strategies.fedprox import FedProx

__all__ = ["STRATEGIES", "Centralized", "FedAtt", "FedAvg", "FedProto", "FedProx", "Strategy"]
