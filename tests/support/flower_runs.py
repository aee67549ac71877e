"""Runs over a grid in this process, and the same in a simulation."""

from __future__ import annotations

from fedproto.config import read_config
from fedproto.flower.server_app import serve
from fedproto.store import RunStore
from flower_grid import LocalGrid
from helpers import simulate

CLIENTS = 5


def tables(**sections):
    base = {
        "seed": 3,
        "data": {"name": "synthetic", "clients": CLIENTS, "seed": 5},
        "model": {"name": "mlp", "hidden": 6, "features": 5},
        "strategy": {"name": "fedproto"},
        "train": {"epochs": 2, "batch_size": 20, "lr": 0.05},
        "schedule": {"rounds": 3, "cohort": 3, "delta": 0.4},
        "engine": {"name": "reference", "device": "cpu"},
        "flower": {"evaluate_on": "server", "wait": 0, "deadline": 0.2},
    }
    for name, section in sections.items():
        new = isinstance(section, dict)
        base[name] = {**base.get(name, {}), **section} if new else section
    return base


def over_flower(folder, grid=None, **sections) -> RunStore:
    store = RunStore.create(folder, read_config(tables(**sections)))
    serve(grid or LocalGrid(range(CLIENTS)), store.path)
    return store


def simulated(folder, **sections) -> RunStore:
    store = RunStore.create(folder, read_config(tables(**sections)))
    simulate([store])
    return store


def pooled(metrics):
    """Scores without those of single clients, which a server with or without data has apart."""
    of_clients = ("mean_client", "worst_tenth", "at_zero")
    return {
        name: value
        for name, value in metrics.items()
        if not name.removeprefix("validation_").startswith(of_clients)
    }


def everyone(**sections):
    """Sections for a run in which all clients are in every cohort."""
    schedule = {"cohort": CLIENTS, "delta": 0.0, "rounds": 2}
    return {"schedule": schedule} | sections
