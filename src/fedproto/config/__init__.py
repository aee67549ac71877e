"""Configuration of runs: typed sections, the same in Python, recipes and run directories."""

from fedproto.config.run import (
    CHOICES,
    SECTIONS,
    RunConfig,
    Sections,
    differences,
    digest_of,
    flatten,
    read_config,
)

__all__ = [
    "CHOICES",
    "SECTIONS",
    "RunConfig",
    "Sections",
    "differences",
    "digest_of",
    "flatten",
    "read_config",
]
