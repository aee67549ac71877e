"""Federations of many small clients: what building one costs, and a round of a hundred of them.

    python benchmarks/clients.py --out results/many-clients.json

Every client has five samples. Rounds of the two federations alternate, so that a busy machine
disturbs both alike: read the ratio. Nothing is tested in between; that grows with the samples.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fedproto import FedAvg, Federation, FedProto
from fedproto.config import RunConfig
from fedproto.config.options import EvaluateOptions, ScheduleOptions
from fedproto.data.tasks import task_named
from fedproto.engines.base import ENGINES, EngineOptions, Workload
from fedproto.engines.reference import read_state
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.models.small import MLPOptions
from fedproto.rounds import Run, run_rounds
from fedproto.store.run import describe_environment
from fedproto.types import ServerState

SAMPLES, CHANNELS, CLASSES, COHORT = 5, 16, 10, 100


def main() -> None:
    """Measures and writes what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", nargs="+", type=int, default=[10_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--build", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)  # such small models gain nothing from more
    if given.build:
        print(json.dumps(build(given.build)[1]))
        return
    built = {}
    for number in given.clients:  # each in a process of its own, for the memory that it takes
        command = [sys.executable, __file__, "--build", str(number)]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        built[number] = json.loads(found.stdout)
        print(number, built[number], flush=True)
    going = {number: rounds(build(number)[0], given.rounds + 2) for number in given.clients}
    seconds: dict[int, list[float]] = {number: [] for number in given.clients}
    for turn in range(given.rounds + 1):
        for number, one in going.items():
            started = time.perf_counter()
            next(one)
            if turn:  # the first one warms up
                seconds[number].append(time.perf_counter() - started)
    first = seconds[given.clients[0]]
    ratios = {
        number: statistics.median(mine / its for mine, its in zip(times, first, strict=True))
        for number, times in seconds.items()
    }
    for number, times in seconds.items():
        print(f"{number}: {statistics.median(times):.3f} s a round, ratio {ratios[number]:.2f}")
    figures = {
        "environment": describe_environment(),
        "date": time.strftime("%Y-%m-%d"),
        "samples per client": SAMPLES,
        "cohort": COHORT,
        "build": built,
        "seconds a round": seconds,
        "ratio to the first": ratios,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


def build(clients: int) -> tuple[Federation, dict[str, float]]:
    """A federation from arrays, one pair per client, and what building it took."""
    rng = np.random.RandomState(0)
    inputs = rng.standard_normal((SAMPLES * clients, CHANNELS)).astype(np.float32)
    labels = rng.randint(0, CLASSES, SAMPLES * clients)
    parts = [
        (inputs[start : start + SAMPLES], labels[start : start + SAMPLES])
        for start in range(0, len(inputs), SAMPLES)
    ]
    wall, cpu = time.perf_counter(), time.process_time()
    federation = Federation.from_clients(parts)
    return federation, {
        "seconds": time.perf_counter() - wall,
        "processor seconds": time.process_time() - cpu,
        "peak memory of the process, GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def rounds(federation: Federation, number: int) -> Iterator[None]:
    """Two runs, round by round."""
    model = build_model(MLPOptions(), federation.input_shape, CLASSES, seed=0)
    engine = ENGINES.get("reference")(
        Workload(federation, model, task_named("classification"), EngineOptions(device="cpu"))
    )
    runs = [
        Run(
            RunConfig(
                strategy=strategy,
                train=TrainOptions(epochs=1),
                schedule=ScheduleOptions(rounds=number, cohort=COHORT),
                evaluate=EvaluateOptions(every=number),
            ),
            federation,
            initial=ServerState(0, *read_state(model)),
        )
        for strategy in (FedAvg(), FedProto())
    ]
    done = run_rounds(runs, engine)
    while True:
        for _ in runs:
            next(done)
        yield


if __name__ == "__main__":
    main()
