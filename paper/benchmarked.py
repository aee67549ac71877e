"""Tables in the docs from the files that benchmarks wrote below ``results``."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from paper.cells import DASH, Lines, number

ROOT = Path(__file__).resolve().parents[1]


def measured(name: str) -> Any:
    """What a benchmark wrote."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def peers(_: Path) -> Lines:
    """A round beside plain loops and other libraries, relative to ours."""
    flower = f"Flower {_version('flwr')}, Ray, 2 actors"
    titles = {
        "ours, processes": "**processes engine** ({seconds:.2f} s a round)",
        "loop, plain": "plain loop, 2 threads",
        "loop, channels-last": "plain loop, channels last, 2 threads",
        "pfl-research": "pfl-research 0.6",
        "Flower, as its tutorial": f"{flower}, as its tutorial",
        "Flower, leanest": f"{flower}, as lean as possible",
    }
    found = {row["name"]: row for row in measured("cpu-peers")["cnn"]["rows"]}
    lines: Lines = [["", "seconds a round", "memory", "start-up"]]
    for name, title in titles.items():
        one = found[name]
        low, high = one["ratio_spread"]
        ratio = "**1**" if low == high else f"{one['ratio']:.2f} ({low:.2f}–{high:.2f})"
        cells = [f"{number(one['memory_mb'], 0)} MB", f"{one['startup_seconds']:.1f} s"]
        lines.append([title.format(seconds=one["median_seconds"]), ratio, *cells])
    return lines


def _version(package: str) -> str:
    version: str = measured("cpu-peers")["environment"]["packages"][package]
    return version.removesuffix(".0")


def steps(_: Path) -> Lines:
    """Microseconds per step and model on a GPU, by the number of models."""
    about = measured("gpu-steps")
    rows = {
        (row["model"], row["what"], row["tf32"], row["models"]): row
        for row in about["steps"]["rows"]
        if "models" in row
    }
    # One model through the stack is of another call, which the note has.
    (single,) = re.findall(r"\(tf32, fp32\): (\d+) and (\d+)", about["note"])
    lines: Lines = [["", "1 model", "10 models", "120 models"]]
    for title, key, alone in (
        ("CNN, eager loop, tf32", ("cnn", "eager loop", True), None),
        ("CNN, captured loop, tf32", ("cnn", "graph loop", True), None),
        ("CNN, stacked, tf32", ("cnn", "stacked, compiled", True), single[0]),
        ("CNN, stacked, float32", ("cnn", "stacked, compiled", False), single[1]),
        ("MLP, stacked, float32", ("mlp", "stacked, compiled", False), None),
    ):
        cells = [_step(rows.get((*key, models))) for models in (1, 10, 120)]
        cells[0] = alone or cells[0]
        lines.append([title, *cells])
    return lines


def _step(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return DASH
    spent, times = row["us_per_model_step"], row["times_eager"]
    text = f"{spent:.0f}" if spent >= 100 else f"{spent:.1f}"
    if times > 1:
        text += f" ({times:.0f}×)"
    return f"**{text}**" if row["models"] == 120 else text


def rounds(_: Path) -> Lines:
    """Microseconds per step and model of whole rounds on a GPU."""
    rows = measured("gpu-rounds")["rounds"]["rows"]

    def cell(what: str, model: str, amp: bool, jobs: Sequence[int] = ()) -> str:
        chosen = [
            row
            for row in rows
            if (row["what"], row["model"], row.get("amp", False)) == (what, model, amp)
            and (not jobs or row["jobs"] in jobs)
        ]
        digits = 1 if model == "cnn" else 0
        spent = [
            "compiled " * row.get("compiled", False) + number(row["us_per_model_step"], digits)
            for row in sorted(chosen, key=lambda row: row.get("compiled", False))
        ]
        return "; ".join(spent) or DASH

    lines: Lines = [
        [
            "Microseconds per step and model",
            "bare loop",
            "captured engine",
            "stacked, 10 models",
            "stacked, 100 or 120",
        ]
    ]
    for title, model, amp in (
        ("LeNet, batch 50, tf32", "lenet", False),
        ("LeNet, batch 50, bfloat16", "lenet", True),
        ("ResNet-18 with GroupNorm, batch 50, bfloat16", "resnet18", True),
        ("the paper's CNN, batch 10, tf32", "cnn", False),
    ):
        loop = cell("bare captured loop", model, amp)
        engine = cell("captured", model, amp, [10])
        few, many = (cell("stacked", model, amp, jobs) for jobs in ([10], [100, 120]))
        lines.append([title, loop, engine, few, many])
    return lines


def sweeps(_: Path) -> Lines:
    """Seconds of whole sweeps on a GPU, from start to end."""
    found = measured("gpu-sweeps")["sources' readings"]["sweeps"]
    titles = {
        "mnist": "MNIST, 1,000 clients",
        "synthetic": "synthetic",
        "guidance-femnist": "FEMNIST",
    }
    by_recipe = {one["command"].split()[2]: one for one in found}
    lines: Lines = [["Sweep", "Seconds"]]
    for recipe, title in titles.items():
        one = by_recipe[recipe]
        what = f"{title}: {one['runs']} runs of {one['rounds']} rounds"
        lines.append([what, str(one["seconds"])])
    return lines


def flower(_: Path) -> Lines:
    """Seconds of a round and of the start over Flower, without the first round."""
    seconds = measured("flower")["seconds"]
    titles = {
        "simulator": "simulator",
        "warm": "deployment with TLS",
        "empty": "an empty Flower app, the same way",
    }
    lines: Lines = [["", "s/round", "start-up s"]]
    for name, title in titles.items():
        one = seconds[name]
        spent = mean(one["rounds"][1:])
        start = f"{one['start-up']:.0f}" if "start-up" in one else DASH
        lines.append([title, number(spent, 2 if spent < 1 else 1), start])
    return lines


def attacks(_: Path) -> Lines:
    """One hostile client: what the costliest attack costs each task and method."""
    table = runpy.run_path(str(ROOT / "benchmarks/takeover.py"))["table"]
    lines = [line.strip("| ").split(" | ") for line in table(measured("takeover"))]
    return [lines[0], *lines[2:]]


def backdoor(_: Path) -> Lines:
    """Accuracy, and the share of marked samples that are taken for the attacker's class."""
    (methods,) = measured("takeover")["backdoor"].values()
    (plain,) = set(next(iter(methods.values()))) - {"clip", "median"}
    shown = {plain: "no attack", "clip": "`clip`", "median": "`median`"}
    lines: Lines = [["method", *shown.values()]]
    for method, defences in methods.items():
        cells = []
        for name in shown:
            accuracy, success = (
                mean(defences[name][what].values()) for what in ("accuracy", "success")
            )
            cells.append(f"{accuracy:.1f}, {success:.1f} %")
        lines.append([method, *cells])
    return lines
