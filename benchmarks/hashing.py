"""What fingerprints cost: their share of a quickstart round, and seconds per gigabyte of model.

python benchmarks/hashing.py --out results/hashing.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from fedproto.config.recipe import read_recipe
from fedproto.disk import integrity
from fedproto.rounds import runs_from, train
from fedproto.store import RunStore, checkpoints
from fedproto.store import run as run_store
from fedproto.store.run import describe_environment

spent = {"hashing": 0.0}


def timed(function):  # noqa: ANN001, ANN201 - wraps whatever is given
    """The function, with its time added up."""

    def call(*args, **kwargs):  # noqa: ANN002, ANN003, ANN202
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent["hashing"] += time.perf_counter() - started

    return call


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    checkpoints.tensors_fingerprint = timed(integrity.tensors_fingerprint)
    run_store.sealed = timed(integrity.sealed)
    (config,) = read_recipe("quickstart").values()
    config = replace(config, label="hashing")
    with tempfile.TemporaryDirectory() as folder:
        run = RunStore.create(Path(folder) / "run", config)
        train(runs_from([run]))
        seconds = sum(record.seconds for record in run.records())
        rounds = len(run.records())
    tensors = {"params/weight": torch.rand(2**28 // 4)}
    started = time.perf_counter()
    integrity.tensors_fingerprint(tensors, {})
    figures = {
        "environment": describe_environment(),
        "date": time.strftime("%Y-%m-%d"),
        "quickstart, ms a round": seconds / rounds * 1e3,
        "fingerprints, ms a round": spent["hashing"] / rounds * 1e3,
        "share of a round": spent["hashing"] / seconds,
        "seconds per GiB of model": (time.perf_counter() - started) * 4,
    }
    for name, figure in figures.items():
        if isinstance(figure, float):
            print(f"{name}: {figure:.4g}")
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
