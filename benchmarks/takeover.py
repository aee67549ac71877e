"""One hostile client in every cohort of ten: what each defence leaves of the accuracy.

    python benchmarks/takeover.py --data digits --seeds 0 1 2 --out runs/bench/takeover.json

The first client of every cohort is hostile. It sees what it is sent and what it would honestly
answer, and nothing of the others. "absent" is no attack: that client sends nothing usable, which
shows what the federation is worth without it. A seed decides partition, initial weights, cohorts
and batch orders.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedproto.config import RunConfig, read_config
from fedproto.engines.job import LocalJob
from fedproto.engines.reference import ReferenceEngine
from fedproto.flower.defence import DEFENCES
from fedproto.rounds import closing, guard
from fedproto.simulate import simulate
from fedproto.store import RunStore
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
        name: -1000 * one if name.startswith(("control/", "prototypes/sum")) else one
        for name, one in update.payload.items()
    }
    return replace(scaled(-1)(job, update), payload=told)


def absent(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """Nothing that could be used."""
    return absurd(float("nan"))(job, update)


def many_samples(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """The opposite way, with the weight of ten million samples."""
    return replace(scaled(-1)(job, update), num_examples=CLAIMED)


ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "x 10": scaled(10),
    "x 1000": scaled(1000),
    "x -1": scaled(-1),
    "x -9": scaled(-9),
    "noise": noise,
    "1e3": absurd(1e3),
    "1e29": absurd(1e29),
    "10M samples, x -1": many_samples,
    "payload x -1000, x -1": payload,
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


def config_of(task: str, strategy: str, defence: str, seed: int, rounds_: int) -> RunConfig:
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
            "engine": {"name": "reference"},
        }
    )
    return replace(config, aggregate=DEFENCES[defence])


def carry_out(configs: list[RunConfig], attack: Attack | None) -> list[float]:
    """Accuracies in per cent, the mean over the last three tests."""

    def engine_for(config, federation, model, notify):  # noqa: ANN001, ANN202
        engine = ReferenceEngine(config.workload(federation, model, notify))
        train = engine.train

        def attacked(jobs, on_done=None):  # noqa: ANN001, ANN202
            hostile = {}
            for job in jobs:
                hostile.setdefault(id(job.state), job.client)
            return [
                attack(job, result) if job.client == hostile[id(job.state)] else result
                for job, result in zip(jobs, train(jobs, on_done), strict=True)
            ]

        if attack is not None:
            engine.train = attacked
        return engine

    with tempfile.TemporaryDirectory() as folder:
        stores = [
            RunStore.create(Path(folder) / str(place), config)
            for place, config in enumerate(configs)
        ]
        simulate(stores, engine_for=engine_for)
        scores = []
        for store in stores:
            tests = [
                record.metrics["accuracy"]
                for record in store.records()
                if "accuracy" in record.metrics
            ]
            scores.append(100 * sum(tests[-3:]) / 3)
    return scores


def believe_claims() -> None:
    """As over a network, where a client's samples are those it enrolled with."""
    refuse = guard.reason_to_refuse

    def reason(update, expected):  # noqa: ANN001, ANN202
        if update.num_examples == CLAIMED:
            update = replace(update, num_examples=expected.num_examples)
        return refuse(update, expected)

    closing.reason_to_refuse = reason


def main() -> None:
    """Prints a row per attack and a column per defence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--strategies", nargs="+", default=["fedavg", "fedproto"])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--defences", nargs="+", default=list(DEFENCES), choices=list(DEFENCES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    believe_claims()
    table: dict[str, dict[str, dict[str, list[float]]]] = {}
    for strategy in given.strategies:
        rows = table.setdefault(strategy, {})
        print(f"{strategy:22}" + "".join(f"{defence:>20}" for defence in given.defences))
        for name in given.attacks:
            configs = [
                config_of(given.data, strategy, defence, seed, given.rounds)
                for defence in given.defences
                for seed in given.seeds
            ]
            scores = carry_out(configs, ATTACKS[name])
            row = rows[name] = {
                defence: scores[place * len(given.seeds) : (place + 1) * len(given.seeds)]
                for place, defence in enumerate(given.defences)
            }
            cells = [
                f"{sum(values) / len(values):.1f} ({min(values):.0f}–{max(values):.0f})"
                for values in row.values()
            ]
            print(f"{name:22}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
