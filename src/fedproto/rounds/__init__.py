"""The round loop: who does what in a round, what may enter the average, when a run is over."""

from fedproto.rounds.aggregate import aggregate_round
from fedproto.rounds.loop import Watcher, run_rounds
from fedproto.rounds.runs import Run

__all__ = ["Run", "Watcher", "aggregate_round", "run_rounds"]
