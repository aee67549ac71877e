"""The federated methods, one file each; `base` says what they can override.

This module also exports what a strategy of one's own needs: declarations, batches, reports.
"""

from fedproto.options import option as option
from fedproto.strategies.base import STRATEGIES as STRATEGIES
from fedproto.strategies.base import Strategy as Strategy
from fedproto.strategies.base import equal_weights as equal_weights
from fedproto.strategies.base import size_weights as size_weights
from fedproto.strategies.sections import Method as Method
from fedproto.strategies.values import Batch as Batch
from fedproto.strategies.values import Declarations as Declarations
from fedproto.strategies.values import Declared as Declared
from fedproto.strategies.values import Local as Local
from fedproto.strategies.values import Needs as Needs
from fedproto.strategies.values import Objective as Objective
from fedproto.strategies.values import Observation as Observation
from fedproto.strategies.values import Outputs as Outputs
from fedproto.strategies.values import Report as Report
from fedproto.strategies.values import Seen as Seen
from fedproto.strategies.values import Setting as Setting
from fedproto.types import ClientUpdate as ClientUpdate
from fedproto.types import ClientWeights as ClientWeights
from fedproto.types import Prototypes as Prototypes
from fedproto.types import ServerState as ServerState
from fedproto.types import part as part
from fedproto.types import under as under
