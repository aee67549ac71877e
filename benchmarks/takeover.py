"""One hostile client: the accuracy that each attack leaves under a defence.

    python benchmarks/takeover.py --methods Steady --seeds 0 1 2 --out runs/takeover.json
    python benchmarks/takeover.py --table results/takeover.json
    python benchmarks/takeover.py --honest digits demo --out results/defence.json

All attacks on a method with a seed train together, as one sweep. Client 0 is hostile in every
cohort it is drawn for; it sees what it is sent and what it would honestly answer, and nothing of
the others. Its claims are those of a client that enrols with ten million samples where nothing
limits enrolment. A seed decides partition, initial weights, cohorts and batch orders.

An attack costs what it takes from the accuracy with that client honest ("none"), and from that with
the client absent ("absent": it sends nothing usable). With ``--honest`` nobody is hostile, and
counted is what the default defence does to the updates of recipes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedproto.config import RunConfig, read_config
from fedproto.config.options import DEFENCES, StoreOptions
from fedproto.config.recipe import read_recipe
from fedproto.data.base import data_root
from fedproto.data.federation import Federation
from fedproto.data.samples import TensorSamples
from fedproto.engines.base import ENGINES, LocalJob
from fedproto.models.base import MODELS, ModelOptions, build_model
from fedproto.rng import Indices
from fedproto.rounds import aggregate, jobs, runs_from, train
from fedproto.store import RunStore
from fedproto.store.run import describe_environment
from fedproto.strategies import aggregation
from fedproto.strategies.serve import packed
from fedproto.types import ClientUpdate

Attack = Callable[[LocalJob, ClientUpdate], ClientUpdate]
HOSTILE, CLAIMED = 0, 9_999_999
TARGET, MARKED = 0, 8
"""Of the backdoor: the class that marked samples are taken for, and the numbers that are marked."""


@MODELS.register("normed-mlp")
@dataclass(frozen=True)
class NormedMLP(ModelOptions):
    """A small network with batch normalisation, whose statistics an attack can reach."""

    def build(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Two dense layers with batch normalisation, and a head."""
        numbers = int(torch.tensor(input_shape).prod())
        body = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(numbers, 64), nn.BatchNorm1d(64), nn.ReLU()),
            *(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU()),
        )
        return _Headed(body, nn.Linear(32, num_classes))


class _Headed(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.classifier = body, head

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def head(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def scaled(times: float) -> Attack:
    """The honest update, times a factor."""

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
        params = {name: torch.full_like(one, value) for name, one in update.params.items()}
        return replace(update, params=params)

    return attack


def few_steps(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """The opposite update, as if made in one step."""
    return replace(scaled(-1)(job, update), steps=1)


def claimed(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
    """The honest update, with the weight of ten million samples."""
    del job
    return replace(update, num_examples=CLAIMED)


def reported(length: float, *, swapped: bool, own: bool = False) -> Attack:
    """Invented means of all or its own classes, matching products, and ten million samples.

    Random directions, or each class at the place of the next one as the received head has it.
    """

    def attack(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
        told = dict(update.payload)
        for group in ("prototypes", "serve"):
            if f"{group}/sum" not in told:
                continue
            sum_cd, count_c = told[f"{group}/sum"].double(), told[f"{group}/count"]
            held = count_c > 0
            usual = (sum_cd[held] / count_c[held].unsqueeze(1)).norm(dim=1).mean()
            way_cd = torch.randn(
                sum_cd.shape,
                generator=torch.Generator().manual_seed(job.client),
                dtype=torch.float64,
            )
            rows = [
                one
                for name, one in job.state.params.items()
                if one.shape == sum_cd.shape and name.startswith(("classifier", "head", "output"))
            ]
            if swapped and rows:
                way_cd = rows[-1].double().roll(1, dims=0)
            mean_cd = length * usual * way_cd / way_cd.norm(dim=1, keepdim=True).clamp(min=1e-9)
            count_c = torch.full_like(count_c, CLAIMED // len(count_c))
            count_c = torch.where(held | (not own), count_c, 0)
            told[f"{group}/count"] = count_c
            told[f"{group}/sum"] = (mean_cd * count_c.unsqueeze(1)).to(told[f"{group}/sum"])
            if (products := told.get(f"{group}/products")) is not None:
                number = int(count_c.sum())
                spread = 0.01 * usual**2 * torch.eye(mean_cd.shape[1], dtype=torch.float64)
                square = (mean_cd.t() * count_c) @ mean_cd + number * spread
                told[f"{group}/products"] = packed(square).to(products)
        return replace(update, payload=told, num_examples=CLAIMED)

    return attack


def statistics_moved(mean: float, variance: float | None) -> Attack:
    """Honest weights with other running statistics."""

    def attack(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
        del job
        buffers = {
            name: one + mean
            if name.endswith("running_mean")
            else torch.full_like(one, variance)
            if variance is not None and name.endswith("running_var")
            else one
            for name, one in update.buffers.items()
        }
        return replace(update, buffers=buffers)

    return attack


def both(*attacks: Attack) -> Attack:
    """Several attacks one after another."""

    def attack(job: LocalJob, update: ClientUpdate) -> ClientUpdate:
        for one in attacks:
            update = one(job, update)
        return update

    return attack


FAR, SWAPPED = reported(10, swapped=False), reported(1, swapped=True)
OWN = reported(1, swapped=True, own=True)
ATTACKS: dict[str, Attack | None] = {
    "none": None,
    "absent": absurd(float("nan")),
    "x 1000": scaled(1000),
    "x -1": scaled(-1),
    "x -3": scaled(-3),
    "x -9": scaled(-9),
    "noise": noise,
    "one step, x -1": few_steps,
    "10M samples": claimed,
    "10M samples, x -1": both(scaled(-1), claimed),
    "10M samples, x -3": both(scaled(-3), claimed),
    "far statistics": FAR,
    "far statistics, x -1": both(scaled(-1), FAR),
    "swapped statistics": SWAPPED,
    "swapped statistics, x -1": both(scaled(-1), SWAPPED),
    "swapped statistics of its classes": OWN,
    "swapped statistics of its classes, x -1": both(scaled(-1), OWN),
    "running mean + 10": statistics_moved(10, None),
    "running variance 1e15": statistics_moved(0, 1e15),
    "10M samples, running mean + 10, x -1": both(statistics_moved(10, None), scaled(-1), claimed),
}
CLAIMS = {name for name in ATTACKS if name.startswith(("10M samples", "far", "swapped"))}
MLP = {"name": "mlp", "hidden": 64, "features": 32}
DIGITS = {"name": "digits", "clients": 10, "classes_per_client": 2}
WORDS = {
    "none": "its honest update",
    "absent": "nothing usable",
    "x 1000": "its update times 1,000",
    "x -1": "its update reversed",
    "x -3": "its update times −3",
    "x -9": "its update times −9",
    "noise": "noise",
    "10M samples": "10M samples",
    "10M samples, x -3": "10M samples, its update times −3",
    "10M samples, x -1": "10M samples, its update reversed",
    "far statistics, x -1": "far statistics, its update reversed",
    "swapped statistics, x -1": "swapped statistics, its update reversed",
    "swapped statistics of its classes": "swapped statistics of its classes",
    "swapped statistics of its classes, x -1": "swapped statistics of its classes, update reversed",
    "running mean + 10": "running mean + 10",
    "running variance 1e15": "running variance 1e15",
    "10M samples, running mean + 10, x -1": "10M samples, running mean + 10, update reversed",
}
"""Attacks in the words of docs/appendix/hostile-clients.md."""
TWO_CLASSES = {"data": DIGITS, "model": MLP, "sampling": "uniform", "rounds": 20}
TASKS: dict[str, dict[str, Any]] = {
    "digits": {
        "data": {"name": "digits", "clients": 20, "classes_per_client": 3},
        "model": {"name": "cnn"},
        "cohort": 5,
        "sampling": "uniform",
        "delta": 0.5,
        "lr": 0.1,
        "rounds": 30,
    },
    "synthetic": {
        "data": {"name": "synthetic", "clients": 30},
        "model": MLP,
        "cohort": 10,
        "sampling": "size",
        "rounds": 20,
    },
    "digits, two classes": TWO_CLASSES | {"cohort": 10},
    "digits, two classes, cohorts of 3": TWO_CLASSES | {"cohort": 3},
    "digits, two classes, cohorts of 3 by size": TWO_CLASSES | {"cohort": 3, "sampling": "size"},
    "digits, two classes, batch norm": TWO_CLASSES
    | {"cohort": 10, "model": {"name": "normed-mlp"}},
}
"""The first is the bundled recipe `demo`: 20 clients, so an attacker is one in twenty."""
METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {"strategy": {"name": "fedavg"}},
    "FedProto": {"strategy": {"name": "fedproto"}},
    "FedAvg, LDA head": {"strategy": {"name": "fedavg"}, "serve": {"head": "lda"}},
    "Steady": {"strategy": {"name": "steady"}},
    "Steady, LDA head": {
        "strategy": {"name": "steady"},
        "serve": {"head": "lda", "average": "ema"},
    },
    "SCAFFOLD": {"strategy": {"name": "scaffold"}},
    "FedDyn": {"strategy": {"name": "feddyn"}},
}


def config_of(task: str, method: str, defence: str, attack: str, seed: int) -> RunConfig:
    """A run of one attack."""
    about = TASKS[task]
    config = read_config(
        {
            "seed": seed,
            "label": attack,
            "data": {**about["data"], "seed": seed},
            "model": about["model"],
            **METHODS[method],
            "train": {"epochs": 2, "batch_size": 10, "lr": about.get("lr", 0.05)},
            "schedule": {
                name: about[name]
                for name in ("rounds", "cohort", "sampling", "delta")
                if name in about
            },
            "evaluate": {"every": 5},
            "store": {"checkpoint_every": 0},
            "engine": {"name": "reference" if "norm" in task else "stacked"},
        }
    )
    return replace(config, aggregate=DEFENCES[defence])


def run_attacks(configs: Sequence[RunConfig]) -> list[float]:
    """Accuracies in per cent, the mean over the last three tests, of runs that train together."""

    def engine_for(config, workload):  # noqa: ANN001, ANN202
        engine = ENGINES.get(config.engine.name)(workload)
        honest = engine.train

        def attacked(jobs):  # noqa: ANN001, ANN202
            # All runs have as many rounds, so that their jobs always come in the runs' order.
            places: dict[int, int] = {}
            updates = []
            for job, update in zip(jobs, honest(jobs), strict=True):
                run = places.setdefault(id(job.state), len(places))
                attack = ATTACKS[configs[run].label] if job.client == HOSTILE else None
                updates.append(update if attack is None else attack(job, update))
            return updates

        engine.train = attacked
        return engine

    if not configs:
        return []
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
    return [100 * statistics.mean(each[-3:]) for each in tests]


def triggered(federation: Federation, which: Indices) -> Federation:
    """The federation with a mark on some samples, which are labelled as `TARGET`."""
    samples = federation.samples
    assert isinstance(samples, TensorSamples)
    inputs, targets = samples.inputs.clone(), samples.targets.clone()
    marked = inputs[which].flatten(1)
    marked[:, -MARKED:] = inputs.max()
    inputs[which], targets[which] = marked.view_as(inputs[which]), TARGET
    return replace(federation, samples=TensorSamples(inputs, targets))


def run_backdoor(configs: Sequence[RunConfig], marks: int = 2) -> list[tuple[float, float]]:
    """Accuracies in per cent, and shares of marked test samples that are taken for `TARGET`.

    The hostile client marks one sample in `marks` of its own (none for 0), and is honest in all
    else.
    """
    source = configs[0].data
    assert source is not None
    federation = source.load(data_root())
    own = federation.train_indices(HOSTILE)
    runs = [
        replace(one, store=StoreOptions(checkpoint_every=one.schedule.rounds)) for one in configs
    ]
    tested = federation.test_indices
    labels = federation.samples.batch(tested)[1]
    others = tested[(labels != TARGET).numpy()]
    marked = triggered(federation, others)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        stores = [RunStore.create(Path(folder) / str(n), one) for n, one in enumerate(runs)]
        poisoned = triggered(federation, own[::marks] if marks else own[:0])
        train(runs_from(stores, {source: poisoned}))
        for store in stores:
            model = build_model(
                store.config.model, federation.input_shape, federation.num_classes, seed=0
            )
            state = store.load_checkpoint()
            scores = []
            for data, indices in ((federation, tested), (marked, others)):
                engine = ENGINES.get("reference")(store.config.workload(data, model))
                scores.append(100 * engine.evaluate([state.served], indices)[0]["accuracy"])
            found.append((scores[0], scores[1]))
    return found


def agreements(config: RunConfig) -> list[float]:
    """Cosines of honest updates with the sum of the others in their round."""
    found: list[float] = []

    def engine_for(config, workload):  # noqa: ANN001, ANN202
        engine = ENGINES.get(config.engine.name)(workload)
        honest = engine.train

        def watched(jobs):  # noqa: ANN001, ANN202
            updates = honest(jobs)
            moved = torch.stack(
                [
                    torch.cat(
                        [(one - job.state.params[n]).flatten() for n, one in up.params.items()]
                    )
                    for job, up in zip(jobs, updates, strict=True)
                ]
            )
            found.extend(torch.cosine_similarity(moved, moved.sum(dim=0) - moved).tolist())
            return updates

        engine.train = watched
        return engine

    with tempfile.TemporaryDirectory() as folder:
        train(runs_from([RunStore.create(Path(folder) / "run", config)]), engine_for=engine_for)
    return found


def measure_agreement(given: argparse.Namespace, figures: dict[str, Any], commit: str) -> None:
    """How many honest updates point against the others, which a flipped sign turns around."""
    for task, method in product(given.tasks, given.methods):
        cosines = [
            cosine
            for seed in given.seeds
            for cosine in agreements(config_of(task, method, "clip", "none", seed))
        ]
        against = 100 * statistics.mean(cosine < 0 for cosine in cosines)
        cell = {
            "updates": len(cosines),
            "against the others, per cent": round(against, 1),
            "median": round(statistics.median(cosines), 3),
        }
        figures.setdefault("agreement", {}).setdefault(task, {})[method] = cell
        figures["commits"][f"{task}, {method}, agreement"] = commit
        print(task, method, cell, flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


REFUSALS = {"times as long": "rejected for length", "its statistics": "rejected for statistics"}
"""What the default defence says of an update that it rejects."""
OTHERWISE = "rejected otherwise"


def measure_honest(given: argparse.Namespace, figures: dict[str, Any], commit: str) -> None:
    """What the default defence does to honest updates of recipes, and to their clients' claims."""
    clip, bound = aggregation._clip_factors, aggregate.bound_claims
    counts: Counter[str] = Counter()

    def clipping(options, origin, updates, shares, slack=1.0):  # noqa: ANN001, ANN202
        factors = clip(options, origin, updates, shares, slack)
        if slack == 1.0 and factors is not None:  # else it is of the memory of SCAFFOLD's kin
            counts["clipped"] += int((factors < 1).sum())
        return factors

    def bounding(options, updates, declared):  # noqa: ANN001, ANN202
        bounded = bound(options, updates, declared)
        for one, own in zip(bounded, updates, strict=True):
            counts["samples capped"] += one.num_examples < own.num_examples
        return bounded

    aggregation._clip_factors, aggregate.bound_claims = clipping, bounding
    quick = ["store.checkpoint_every=0", "evaluate.every=1000", "measure.every=0"]
    for name in given.honest:
        read = read_recipe(name, [*quick, "engine.name=stacked", *given.set])
        configs = [one.defended() for one in read.values() if not one.strategy.pooled]
        counts.clear()
        with tempfile.TemporaryDirectory() as folder:
            stores = [
                RunStore.create(Path(folder) / str(place), config)
                for place, config in enumerate(configs)
            ]
            runs = runs_from(stores)
            sizes = [run.federation.train_sizes for run in runs]
            train(runs)
            for record in (record for store in stores for record in store.records()):
                counts["updates"] += len(record.attention) + len(record.failures)
                for reason in record.failures.values():
                    kinds = (to for part, to in REFUSALS.items() if part in reason)
                    counts[next(kinds, OTHERWISE)] += 1
        large = [float((each > 2 * np.median(each)).mean()) for each in sizes]
        cell = {
            "runs": len(configs),
            "rounds": configs[0].schedule.rounds,
            **{name: counts[name] for name in ("updates", *REFUSALS.values(), OTHERWISE)},
            **{name: counts[name] for name in ("clipped", "samples capped")},
            "clients above twice the median, per cent": round(100 * statistics.mean(large), 1),
        }
        title = ", ".join([name, *given.set])
        figures.setdefault("honest", {})[title] = cell
        figures["commits"][title] = commit
        print(title, cell, flush=True)
        if given.out is not None:
            given.out.write_text(json.dumps(figures, indent=1) + "\n")


def believe_claims() -> None:
    """As over a network: a client's samples are those it enrolled with, also where it is drawn."""
    refuse, participants = aggregate.reason_to_refuse, jobs.participants
    believed_sizes = jobs.believed_sizes

    def reason(update, job, setting):  # noqa: ANN001, ANN202
        if update.num_examples == CLAIMED:
            job = replace(job, batches=replace(job.batches, num_examples=CLAIMED))
        return refuse(update, job, setting)

    def claiming(config, round_, federation):  # noqa: ANN001, ANN202
        def claimed_sizes(sizes, *bounds):  # noqa: ANN001, ANN002, ANN202
            if config.label in CLAIMS:
                sizes = sizes.copy()
                sizes[HOSTILE] = CLAIMED
            return believed_sizes(sizes, *bounds)

        jobs.believed_sizes = claimed_sizes
        return participants(config, round_, federation)

    aggregate.reason_to_refuse, jobs.participants = reason, claiming


def main() -> None:
    """Prints the attacks on each task and method, and writes all accuracies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS)[:3], choices=list(METHODS))
    parser.add_argument("--defences", nargs="+", default=["none", "clip"], choices=list(DEFENCES))
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--agreement", action="store_true", help="measures honest directions")
    parser.add_argument("--backdoor", action="store_true", help="measures a backdoor, nothing else")
    parser.add_argument("--honest", nargs="+", default=[], help="counts what recipes lose to clip")
    parser.add_argument("--set", action="append", default=[], help="an option of these recipes")
    parser.add_argument("--out", type=Path, help="keeps what is there, and adds the rest")
    parser.add_argument("--table", type=Path, help="prints the table of such a file, and ends")
    given = parser.parse_args()
    if given.table is not None:
        print("\n".join(table(json.loads(given.table.read_text()))))
        return
    known = given.out is not None and given.out.exists()
    figures = json.loads(given.out.read_text()) if known else {}
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    figures |= {"environment": describe_environment(), "date": time.strftime("%Y-%m-%d")}
    figures.setdefault("commits", {})
    if given.honest:
        measure_honest(given, figures, commit)
        return
    believe_claims()
    figures["tasks"] = TASKS
    if given.backdoor or given.agreement:
        measure = measure_backdoor if given.backdoor else measure_agreement
        measure(given, figures, commit)
        return
    for task in given.tasks:
        for method in given.methods:
            rows = figures.setdefault("accuracy", {}).setdefault(task, {}).setdefault(method, {})
            for seed in given.seeds:
                for defence in given.defences:
                    missing = [
                        attack
                        for attack in given.attacks
                        if _reaches(attack, task, method)
                        and str(seed) not in rows.get(attack, {}).get(defence, {})
                    ]
                    scores = run_attacks(
                        [config_of(task, method, defence, attack, seed) for attack in missing]
                    )
                    for attack, score in zip(missing, scores, strict=True):
                        rows.setdefault(attack, {}).setdefault(defence, {})[str(seed)] = round(
                            score, 2
                        )
                figures["commits"][f"{task}, {method}"] = commit
                if given.out is not None:
                    given.out.write_text(json.dumps(figures, indent=1) + "\n")
            print_rows(f"{task}: {method}", rows, given.defences)


def measure_backdoor(given: argparse.Namespace, figures: dict[str, Any], commit: str) -> None:
    """Each defence with the backdoor, and the first one without it, as "nobody"."""
    for task, method, seed in product(given.tasks, given.methods, given.seeds):
        configs = [config_of(task, method, one, "none", seed) for one in given.defences]
        scores = run_backdoor(configs) + run_backdoor(configs[:1], marks=0)
        cells = figures.setdefault("backdoor", {}).setdefault(task, {}).setdefault(method, {})
        for defence, (accuracy, success) in zip([*given.defences, "nobody"], scores, strict=True):
            cell = cells.setdefault(defence, {"accuracy": {}, "success": {}})
            cell["accuracy"][str(seed)] = round(accuracy, 2)
            cell["success"][str(seed)] = round(success, 2)
        print(task, method, seed, scores, flush=True)
        figures["commits"][f"{task}, {method}, backdoor"] = commit
        if given.out is not None:
            given.out.write_text(json.dumps(figures, indent=1) + "\n")


def _reaches(attack: str, task: str, method: str) -> bool:
    """Whether an attack differs from a simpler one with a task and a method."""
    if "statistics" in attack:
        return method == "FedProto" or "LDA head" in method
    if "running" in attack:
        return "batch norm" in task
    if "samples" in attack and method in ("Steady", "Steady, LDA head"):
        return TASKS[task]["sampling"] == "size"  # its weights are equal
    return "step" not in attack or method == "SCAFFOLD"


def table(figures: dict[str, Any]) -> Iterator[str]:
    """The default defence in Markdown: the attack that costs each task and method the most.

    Changes are means over seeds, in brackets that of the worst seed.
    """
    titles = ["task, method (seeds)", "no defence, `clip`", "client absent"]
    titles += ["the hostile client sends", "change", "beyond absence"]
    yield "| " + " | ".join(titles) + " |"
    yield "|---|---|---|---|---|---|"
    for task, methods in figures["accuracy"].items():
        for method, rows in methods.items():
            found = {attack: rows[attack]["clip"] for attack in WORDS if attack in rows}
            honest, absent = found.pop("none"), found.pop("absent")
            plain = [rows["none"]["none"][seed] for seed in honest]
            changes = {
                attack: [scores[seed] - honest[seed] for seed in scores]
                for attack, scores in found.items()
            }
            costliest = min(changes, key=lambda attack: statistics.mean(changes[attack]))
            missed = [absent[seed] - honest[seed] for seed in absent]
            beyond = [found[costliest][seed] - absent[seed] for seed in absent]
            cells = [
                f"{task}, {method} ({len(honest)})",
                f"{statistics.mean(plain):.1f}, {statistics.mean(honest.values()):.1f}",
                f"{statistics.mean(missed):+.1f} ({min(missed):+.0f})",
                WORDS[costliest],
                f"{statistics.mean(changes[costliest]):+.1f} ({min(changes[costliest]):+.0f})",
                f"{statistics.mean(beyond):+.1f} ({min(beyond):+.0f})",
            ]
            yield "| " + " | ".join(cells).replace("-", "−") + " |"


def print_rows(
    title: str, rows: dict[str, dict[str, dict[str, float]]], defences: list[str]
) -> None:
    """Means over seeds; the mean change from no attack under the same defence, and the worst."""
    print(f"{title:38}" + "".join(f"{defence:>26}" for defence in defences))
    for attack, row in rows.items():
        line = f"{attack:38}"
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
