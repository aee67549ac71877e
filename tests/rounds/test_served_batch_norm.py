"""Averages of models with batch normalisation: their averaged statistics against re-estimated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedproto import FedAvg
from fedproto.config.run import model_for
from fedproto.data.federation import Federation
from fedproto.engines.setting import load_state
from fedproto.models.base import MODELS, build_model
from fedproto.strategies.serve import ServeOptions
from helpers import begin, config_of, train_runs
