"""Small run directories."""

from __future__ import annotations

from fedproto.config import RunConfig, read_config

TINY = {
    "strategy": {"name": "fedproto"},
    "data": {"name": "digits", "clients": 12},
    "model": {"name": "mlp", "hidden": 8, "features": 8},
    "train": {"epochs": 1},
    "schedule": {"rounds": 3, "cohort": 3},
}


def tiny(**sections) -> RunConfig:
    return read_config(TINY | sections)


def snapshot(path):
    return {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
