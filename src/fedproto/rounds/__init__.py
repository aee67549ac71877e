"""Runs, the round loop, and the end of a round."""

from fedproto.rounds.aggregate import aggregate_round
from fedproto.rounds.loop import run_rounds
from fedproto.rounds.run import Run, load_federations, runs_from, train

__all__ = ["Run", "aggregate_round", "load_federations", "run_rounds", "runs_from", "train"]
