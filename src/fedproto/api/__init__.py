"""The same from Python as from the command line: train, sweep, load, analyse, predict."""

from fedproto.api.predictor import analyse, predict
from fedproto.api.result import Result, Results
from fedproto.api.training import load, load_all, load_data, run, sweep

__all__ = [
    "Result",
    "Results",
    "analyse",
    "load",
    "load_all",
    "load_data",
    "predict",
    "run",
    "sweep",
]
