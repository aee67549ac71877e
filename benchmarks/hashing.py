"""What fingerprints cost: their share of a quickstart round, and seconds per gigabyte of model.

python benchmarks/hashing.py
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from fedproto.config.recipe import read_recipe
from fedproto.disk import integrity
from fedproto.simulate import simulate
from fedproto.store import RunStore, checkpoints

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
    checkpoints.tensors_fingerprint = timed(integrity.tensors_fingerprint)
    integrity.Chain.add = timed(integrity.Chain.add)
    (config,) = read_recipe("quickstart").values()
    config = replace(config, label="hashing")
    with tempfile.TemporaryDirectory() as folder:
        run = RunStore.create(Path(folder) / "run", config)
        simulate([run])
        seconds = sum(record.seconds for record in run.records())
        rounds = len(run.records())
    print(f"quickstart: {seconds / rounds * 1e3:.1f} ms a round, of which fingerprints")
    print(f"{spent['hashing'] / rounds * 1e3:.3f} ms: {spent['hashing'] / seconds:.3%}")
    tensors = {"params/weight": torch.rand(2**28 // 4)}
    started = time.perf_counter()
    integrity.tensors_fingerprint(tensors, {})
    print(f"{(time.perf_counter() - started) * 4:.2f} s per GiB of model")


if __name__ == "__main__":
    main()
