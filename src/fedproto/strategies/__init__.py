"""The federated methods, one file each; `base` says what they can override.

This module also exports what a strategy of one's own needs: declarations, batches, reports.
"""

from fedproto.options import option
from fedproto.strategies.base import STRATEGIES, Strategy, equal_weights, size_weights
from fedproto.strategies.sections import Method
from fedproto.strategies.values import (
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
)
from fedproto.types import ClientUpdate, ClientWeights, Prototypes, ServerState, part, under

__all__ = [
    "STRATEGIES",
    "Batch",
    "ClientUpdate",
    "ClientWeights",
    "Declarations",
    "Declared",
    "Local",
    "Method",
    "Needs",
    "Objective",
    "Observation",
    "Outputs",
    "Prototypes",
    "Report",
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
