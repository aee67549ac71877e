"""What a run is to do: typed sections, the same in Python, recipes and run directories."""

from fedproto.config.options import (
    EvaluateOptions,
    FlowerOptions,
    ScheduleOptions,
    StopOptions,
    StoreOptions,
)
from fedproto.config.run import (
    CHOICES,
    SECTIONS,
    RunConfig,
    differences,
    digest_of,
    flatten,
    read_config,
)

__all__ = [
    "CHOICES",
    "SECTIONS",
    "EvaluateOptions",
    "FlowerOptions",
    "RunConfig",
    "ScheduleOptions",
    "StopOptions",
    "StoreOptions",
    "differences",
    "digest_of",
    "flatten",
    "read_config",
]
