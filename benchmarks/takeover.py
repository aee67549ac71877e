"""One hostile client in every cohort of ten: what each defence leaves of the accuracy.

    python benchmarks/takeover.py --data digits --seeds 0 1 2 --out runs/takeover.json

All attacks and defences of a strategy and a seed train together, as one sweep. The first client of
every cohort is hostile. It sees what it is sent and what it would honestly answer, and nothing of
the others. "absent" is no attack: that client sends nothing usable, which shows what the federation
is worth without it. A seed decides partition, initial weights, cohorts and batch orders.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedproto.config import RunConfig, read_config
from fedproto.config.options import DEFENCES
from fedproto.engines.base import ENGINES, LocalJob
from fedproto.rounds import aggregate, runs_from, train
from fedproto.store import RunStore
from fedproto.store.run import describe_environment
from fedproto.types import ClientUpdate

Attack = Callable[[LocalJob, ClientUpdate], ClientUpdate]
CLAIMED = 9_999_999


def scaled(times: float) -> Attack:
    """The client's own way, so many times as long."""

    def attack(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
        sent = job.state.params
        params = {
            name: sent[name] + times * (one - sent[name]) for name, one in update.params.items()
        }
        return replace(update, params=params)

    return attack


def noise(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """Random weights of size 1 in place of the trained ones."""
    generator = torch.Generator().manual_seed(1000 * job.state.round + job.client)
    params = {
        name: one + torch.randn(one.shape, generator=generator, dtype=one.dtype)
        for name, one in update.params.items()
    }
    return replace(update, params=params)


def absurd(value: float) -> Attack:
    """One number everywhere."""

    def attack(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
        del job
        return replace(
            update,
            params={name: torch.full_like(one, value) for name, one in update.params.items()},
        )

    return attack


def payload(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """What goes beside the weights a thousand times as large and turned round, where that is legal.

    Margins and losses are left alone: beyond their declared bounds the guard refuses them.
    """
    told = {
        name: -1000 * one if name.startswith("prototypes/sum") else one
        for name, one in update.payload.items()
    }
    return replace(scaled(-1)(job, update), payload=told)


def few_steps(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """The opposite way, as if in one step: who enrols with one sample makes no more."""
    return replace(scaled(-1)(job, update), steps=1)


def absent(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """Nothing that could be used."""
    return absurd(float("nan"))(job, update)


def claimed(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """The honest way, with the weight of ten million samples."""
    del job
    return replace(update, num_examples=CLAIMED)


def many_samples(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """The opposite way, with the weight of ten million samples."""
    return claimed(job, scaled(-1)(job, update))


ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "x 10": scaled(10),
    "x 1000": scaled(1000),
    "x -1": scaled(-1),
    "x -9": scaled(-9),
    "noise": noise,
    "1e3": absurd(1e3),
    "1e29": absurd(1e29),
    "10M samples": claimed,
    "10M samples, x -1": many_samples,
    "payload x -1000, x -1": payload,
    "one step, x -1": few_steps,
    "absent": absent,
}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"name": "digits", "clients": 10, "classes_per_client": 2},
        "model": {"name": "mlp", "hidden": 64, "features": 32},
    },
    "mnist": {
        "data": {
            "name": "mnist",
            "clients": 50,
            "partition": "class-sizes",
            "classes_per_client": 2,
            "mean_size": 100.0,
            "sigma": 1.0,
        },
        "model": {"name": "mlp", "hidden": 64, "features": 32},
    },
    "synthetic": {
        "data": {"name": "synthetic", "clients": 30},
        "model": {"name": "mlp", "hidden": 64, "features": 32},
    },
}


def config_of(
    task: str, strategy: str, defence: str, seed: int, rounds_: int, engine: str
) -> RunConfig:
    """A run of ten clients a round."""
    about = TASKS[task]
    config = read_config(
        {
            "seed": seed,
            "label": f"{strategy} {defence}",
            "data": {**about["data"], "seed": seed},
            "model": about["model"],
            "strategy": {"name": strategy},
            "train": {"epochs": 2, "batch_size": 10, "lr": 0.05},
            "schedule": {"rounds": rounds_, "cohort": 10},
            "evaluate": {"every": 5},
            "store": {"checkpoint_every": 0},
            "engine": {"name": engine},
        }
    )
    return replace(config, aggregate=DEFENCES[defence])


def carry_out(configs: Sequence[RunConfig], attacks: Sequence[Attack | None]) -> list[float]:
    """Accuracies in per cent, the mean over the last three tests, of runs that train together."""

    def engine_for(config, workload):  # noqa: ANN001, ANN202
        engine = ENGINES.get(config.engine.name)(workload)
        honest = engine.train

        def attacked(jobs):  # noqa: ANN001, ANN202
            # All runs have as many rounds, so that their jobs always come in the runs' order.
            first = {}
            for job in jobs:
                first.setdefault(id(job.state), (len(first), job.client))
            updates = []
            for job, update in zip(jobs, honest(jobs), strict=True):
                run, hostile = first[id(job.state)]
                attack = attacks[run] if job.client == hostile else None
                updates.append(update if attack is None else attack(job, update))
            return updates

        engine.train = attacked
        return engine

    with tempfile.TemporaryDirectory() as folder:
        stores = [
            RunStore.create(Path(folder) / str(place), config)
            for place, config in enumerate(configs)
        ]
        train(runs_from(stores), engine_for=engine_for)
        tests = [
            [one.metrics["accuracy"] for one in store.records() if "accuracy" in one.metrics]
            for store in stores
        ]
    return [100 * sum(each[-3:]) / 3 for each in tests]


def believe_claims() -> None:
    """As over a network, where a client's samples are those it enrolled with."""
    refuse = aggregate.reason_to_refuse

    def reason(update, expected):  # noqa: ANN001, ANN202
        if update.num_examples == CLAIMED:
            update = replace(update, num_examples=expected.num_examples)
        return refuse(update, expected)

    aggregate.reason_to_refuse = reason


def main() -> None:
    """Prints a row per attack and a column per defence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--strategies", nargs="+", default=["fedavg", "fedproto"])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    parser.add_argument("--engine", default="stacked", choices=["stacked", "reference"])
    parser.add_argument("--out", type=Path, help="takes up what is there, cell by cell")
    given = parser.parse_args()
    believe_claims()
    known = given.out is not None and given.out.exists()
    figures = json.loads(given.out.read_text()) if known else {}
    figures |= {"environment": describe_environment(), "date": time.strftime("%Y-%m-%d")}
    cells = [(attack, defence) for attack in given.attacks for defence in given.defences]
    for strategy in given.strategies:
        rows = (
            figures.setdefault("accuracy", {}).setdefault(given.data, {}).setdefault(strategy, {})
        )
        for seed in given.seeds:
            configs = [
                config_of(given.data, strategy, defence, seed, given.rounds, given.engine)
                for _, defence in cells
            ]
            scores = carry_out(configs, [ATTACKS[attack] for attack, _ in cells])
            for (attack, defence), score in zip(cells, scores, strict=True):
                rows.setdefault(attack, {}).setdefault(defence, {})[str(seed)] = round(score, 2)
            if given.out is not None:
                given.out.write_text(json.dumps(figures, indent=2) + "\n")
        print_rows(strategy, rows, given.defences)


def print_rows(
    strategy: str, rows: dict[str, dict[str, dict[str, float]]], defences: list[str]
) -> None:
    """Means over seeds; beside no attack and the same defence, the mean change and the worst."""
    print(f"{strategy:22}" + "".join(f"{defence:>26}" for defence in defences))
    for attack, row in rows.items():
        line = f"{attack:22}"
        for defence in defences:
            values = row.get(defence, {})
            honest = rows.get("none", {}).get(defence, {})
            change = [values[seed] - honest[seed] for seed in values if seed in honest]
            cell = f"{statistics.mean(values.values()):.1f}" if values else ""
            if change:
                cell += f" {statistics.mean(change):+.1f} (worst {min(change):+.0f})"
            line += f"{cell:>26}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
