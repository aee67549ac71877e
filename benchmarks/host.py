"""Where the host's time of a sweep's round goes: a profile of processor time, part by part.

    OMP_NUM_THREADS=1 python benchmarks/host.py --out results/host-profile.json

Twelve runs of the synthetic recipe, stacked, on a CPU, where what a device would do takes processor
time too: it is told apart (steps, looks, tests). Small tensors cost about as much on a CPU as the
launch of a kernel does on the host of a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path

from fedproto.config.recipe import read_recipe
from fedproto.rounds import runs_from, train
from fedproto.store.run import describe_environment
from fedproto.store.sweeps import create_sweep

METHODS = ("fedavg", "fedprox", "fedatt", "fedproto")
PARTS = {
    "steps": ["lockstep.py:train"],
    "looks at the clients' data": ["stacked.py:observe"],
    "tests": ["evaluate.py:evaluate_round"],
    "members of a stack": ["stacked.py:_alike"],
    "planning": ["jobs.py:plan_round"],
    "checks of the updates": ["aggregate.py:reason_to_refuse", "aggregate.py:outliers"],
    "averaging": ["aggregation.py:combine"],
    "reports of the clients": ["setting.py:update"],
    "records and checkpoints": ["run.py:append", "run.py:save_checkpoint"],
}
DEVICE = ("steps", "looks at the clients' data", "tests")


def main() -> None:
    """Measures and writes what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    spent(2)  # imports what is imported on demand
    seconds = spent(arguments.rounds)
    host = seconds["all"] - sum(seconds[part] for part in DEVICE)
    figures = {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/host.py --rounds {arguments.rounds}",
        "environment": describe_environment(),
        "milliseconds of processor time per round of 12 runs": {
            part: 1000 * one / arguments.rounds for part, one in seconds.items()
        },
        "share of the host's part": {
            part: one / host for part, one in seconds.items() if part not in (*DEVICE, "all")
        },
    }
    print(json.dumps(figures, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


def spent(rounds: int) -> dict[str, float]:
    """Seconds of processor time in each part of a sweep, and in all of it."""
    options = ["engine.name=stacked", "engine.device=cpu", "train.epochs=1"]
    configs = {
        name: config
        for name, config in read_recipe(
            "synthetic", [*options, f"schedule.rounds={rounds}"]
        ).items()
        if name.startswith(METHODS)
    }
    profiler = cProfile.Profile(time.process_time)
    with tempfile.TemporaryDirectory() as folder:
        stores = create_sweep(Path(folder) / "sweep", configs)
        profiler.runcall(train, runs_from(stores))
    found: dict[str, float] = {}
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for (path, _, function), (_, _, _, cumulated, _) in stats.items():
        name = f"{Path(path).name}:{function}"
        if "fedproto" in path:
            found[name] = found.get(name, 0.0) + cumulated
    parts = {part: sum(found[name] for name in names) for part, names in PARTS.items()}
    rounds_alone = found["loop.py:_run_round"] + parts["records and checkpoints"]
    return {**parts, "all": rounds_alone}


if __name__ == "__main__":
    main()
