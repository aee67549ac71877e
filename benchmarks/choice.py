"""Does `auto` choose well? MNIST at quick scale through it, and through each engine by name.

    python benchmarks/choice.py --passes 3 --out runs/bench/choice.json

All methods and δ of the quick reproduction train together, as `fedproto reproduce` has them; of
their rounds the first few are timed, engines in turn and back, once on the machine as it is and
once with one core kept busy. The choice is made for all rounds. Read the ratios: auto's fastest
pass over the fastest of the better engine; whatever else a machine does only adds to a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedproto.config import RunConfig
from fedproto.data.base import data_root
from fedproto.data.federation import Federation
from fedproto.measures import MeasureOptions
from fedproto.rounds import Run, run_rounds
from fedproto.rounds.run import engine_of, model_for
from fedproto.store.run import describe_environment
from paper.cases import Scope

ENGINES = ("auto", "processes", "reference")
HOPELESS = 1.5
"""An engine so many times slower than the fastest is timed once, not again."""


def configs_of(case: str, engine: str) -> list[RunConfig]:
    """The federated runs of a data set at quick scale."""
    found = Scope("quick").case(case).runs()
    return [
        replace(
            config,
            engine=replace(config.engine, name=engine, device="cpu"),
            measure=MeasureOptions(),
        )
        for config in found
    ]


def timed(configs: list[RunConfig], federation: Federation, passes: int) -> tuple[str, float]:
    """The engine that was used, and seconds of its start and the first passes over all runs."""
    started = time.perf_counter()
    with engine_of(configs, federation, model_for(configs[0], federation)) as engine:
        runs = [Run(config, federation) for config in configs]
        done = run_rounds(runs, engine)
        for _ in range(passes * len(runs)):
            next(done)
        return engine.name, time.perf_counter() - started


def _spin() -> None:
    while True:
        pass


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keeps so many cores from others."""
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(cores)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.terminate()
            process.join()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="mnist")
    parser.add_argument("--passes", type=int, default=3, help="rounds of every run that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    first = configs_of(given.case, "auto")[0]
    assert first.data is not None
    federation = first.data.load(data_root())
    timed(configs_of(given.case, "processes"), federation, 1)  # what is imported once is imported
    results = {}
    for cores in (0, 1):
        seconds: dict[str, list[float]] = {name: [] for name in ENGINES}
        chosen = ""
        with busy(cores):
            for repeat in range(given.repeats):
                for name in ENGINES[:: 1 if repeat % 2 == 0 else -1]:
                    fastest = min((min(taken) for taken in seconds.values() if taken), default=0)
                    if min(seconds[name], default=0) > HOPELESS * fastest > 0:
                        continue
                    used, taken = timed(configs_of(given.case, name), federation, given.passes)
                    seconds[name].append(taken)
                    chosen = used if name == "auto" else chosen
        best = {name: min(taken) for name, taken in seconds.items()}
        ratio = best["auto"] / min(best["processes"], best["reference"])
        results[f"{cores} cores busy"] = {
            "chosen": chosen,
            "seconds": seconds,
            "auto over the better": ratio,
        }
        print(f"{cores} cores busy: auto took {chosen};", seconds, f"ratio {ratio:.2f}", flush=True)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"case": given.case, "passes": given.passes, "results": results}
        facts["environment"] = describe_environment()
        given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
