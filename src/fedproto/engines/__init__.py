"""Engines run jobs. `reference` is the truth that every other one is tested against."""

from fedproto.engines.base import ENGINES, Engine, EngineOptions, Workload

__all__ = ["ENGINES", "Engine", "EngineOptions", "Workload"]
