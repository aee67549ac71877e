"""Whole rounds of the stacked engine with other convolution kernels and cuts, beside those it has.

    python benchmarks/variants.py --out results/gpu-variants.json
    TRITON_INTERPRET=1 python benchmarks/variants.py --check     # results alone, without a GPU

`by pixels` reads a pooled cell and its code for each of its pixels in all weight gradients, where
the engine reads cells of few channels once. `deep` adds an input gradient of fewer turns, `few` has
smaller programs and no sums over parts for few jobs. What a kernel is worth tell `plain dense`,
`no strips`, `step by step` (the MLP without a kernel for whole steps) and `unchecked`, of which
only the first round differs. Rounds are interleaved; `--profile` lists kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from workloads import CLASSES, MODELS, SAMPLES, SHAPES, federation, initial_state, jobs_on

from fedproto.data.tasks import task_named
from fedproto.engines.base import ENGINES, EngineOptions, Workload
from fedproto.engines.stacking import launching
from fedproto.engines.stacking.launching import ANY, Cut, _power
from fedproto.engines.stacking.layers import Conv, Dense
from fedproto.engines.stacking.lockstep import Lockstep
from fedproto.engines.tracing import ConvStep
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model

PAPER = ["now", "by pixels", "deep", "plain dense"]
FIELD = ["now", "by pixels", "plain dense", "no strips"]
WHOLE = ["now", "step by step"]
CASES: list[dict[str, Any]] = [
    {"model": "cnn", "jobs": 120, "epochs": 40, "variants": PAPER},
    {"model": "cnn", "jobs": 10, "epochs": 40, "variants": [*PAPER, "few"]},
    {"model": "cnn", "jobs": 120, "epochs": 40, "tf32": False, "variants": PAPER[:2]},
    {"model": "lenet", "jobs": 100, "epochs": 5, "variants": FIELD},
    {"model": "lenet", "jobs": 10, "epochs": 5, "variants": [*FIELD[:2], "few"]},
    {"model": "lenet", "jobs": 100, "epochs": 5, "amp": True, "variants": FIELD},
    {"model": "mlp", "jobs": 120, "epochs": 40, "variants": WHOLE},
    {"model": "mlp", "jobs": 10, "epochs": 40, "variants": WHOLE},
    {"model": "mlp", "jobs": 120, "epochs": 40, "tf32": False, "variants": WHOLE},
    {"model": "mlp", "jobs": 10, "epochs": 40, "tf32": False, "variants": WHOLE},
]

MANY = 32
"""Jobs from which on there are enough programs for all of a GPU, however large each is."""

FEW: dict[str, dict[int, Cut]] = {
    "forward": {32: Cut(64, 64, 32, 4, 3, "tf32")},
    "input": {64: Cut(64, 64, 32, 4, 3, "tf32")},
    "weight": {32: Cut(64, 64, 32, 4, 2, "tf32")},
}
"""Cuts for few jobs in tf32, by the number of channels that are read."""

DEEP: dict[str, dict[int, Cut]] = {"input": {64: Cut(128, 64, 64, 4, 2, "tf32")}}
"""A cut of the paper's second convolution with a whole tap in each turn."""


CUT = launching._cut


def other_cut(
    cuts: dict[str, dict[int, Cut]], most: int, kernel: str, step: ConvStep, x: Tensor
) -> tuple[Cut, bool]:
    """As `launching._cut`, with other cuts for at most so many jobs in tf32."""
    cut, strips = CUT(kernel, step, x)
    plain = x.dtype == torch.float32 and launching.precision() == "tf32"
    other = cuts.get(kernel, {}).get(step.channels[kernel == "input"])
    if not plain or other is None or len(x) > most:
        return cut, strips
    written = step.channels[kernel != "input"]
    return other._replace(columns=min(other.columns, _power(written))), strips


def nothing(*_: object, **__: object) -> None:
    """In place of what gives a kernel."""


PIXELS = {**launching.CUTS, "weight by cells": {}}
SMALL = [(launching, "_cut", partial(other_cut, FEW, MANY)), (launching, "PROGRAMS", 264)]
VARIANTS: dict[str, list[tuple[Any, str, Any]]] = {
    "now": [],
    "by pixels": [(launching, "CUTS", PIXELS)],
    "deep": [(launching, "_cut", partial(other_cut, DEEP, ANY))],
    "few": SMALL,
    "plain dense": [(Dense, "_uses_kernels", lambda *_: False)],
    "no strips": [(launching, "FEW", ANY)],
    "step by step": [(launching.MlpStep, "of", nothing)],
    "unchecked": [(Lockstep, "_check_kernels", nothing)],
}
CONVOLUTIONS = ("now", "by pixels", "deep", "few")


@contextlib.contextmanager
def variant(name: str) -> Iterator[None]:
    """Puts a variant in place of what the engine has."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, value in VARIANTS[name]:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield


def check() -> None:
    """Compares all variants of the paper's second convolution with what the engine has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for channels, image, taps in (((32, 64), (6, 6), 5), ((1, 32), (8, 6), 5)):
        layer = Conv(
            inputs=(0,), output=1, name="conv", channels=channels, image=image,
            taps=(taps, taps), stride=(1, 1), padding=(2, 2), pool="valid", relu=True, kernels=True,
        )  # fmt: skip
        x = torch.randn(2, 2, *image, channels[0], device=device)
        weight = torch.randn(2, taps * taps * channels[0], channels[1], device=device)
        bias = torch.randn(2, channels[1], device=device)
        found = {}
        for name in CONVOLUTIONS:
            with variant(name):
                y, code = launching.conv_forward(layer, x, weight, bias)
                dz = torch.ones(2, 2, *image, channels[1], device=device)
                dx = launching.conv_input_gradient(layer, x, dz, weight)
                gradient = launching.conv_weight_gradient(layer, x, y, code)
                own = launching.conv_weight_gradient(layer, x, y, code, weight.clone())
            found[name] = y, dx, gradient, weight - own
        for name, own in found.items():
            worst = max(
                float((one - other).norm() / other.norm())
                for one, other in zip(own, found["now"], strict=True)
            )
            print(f"{channels} {name}: relative difference {worst:.1e}")
            assert worst < 1e-2


def measure(
    case: dict[str, Any], repeats: int, only: list[str], *, profile: bool
) -> dict[str, Any]:
    """Microseconds per model and step of every variant, round by round in turn."""
    model, count = case["model"], case["jobs"]
    data = federation([SAMPLES[model]] * count, SHAPES[model])
    train = TrainOptions(lr=0.01, batch_size=50 if model == "lenet" else 10)
    received = initial_state(model).to(torch.device("cuda"))
    jobs = jobs_on(data, received, list(range(count)), epochs=case["epochs"], train=train)
    options = EngineOptions(
        name="stacked", device="cuda", tf32=case.get("tf32", True), amp=case.get("amp", False)
    )
    built = build_model(MODELS[model], SHAPES[model], CLASSES, seed=0)
    work = Workload(data, built, task_named("classification"), options)
    rounds, first = {}, {}
    for name in only or case["variants"]:
        engine = ENGINES.get("stacked")(work)
        started = time.perf_counter()
        with variant(name):  # graphs keep what they were captured with
            engine.train(jobs)
        torch.cuda.synchronize()
        first[name] = time.perf_counter() - started
        rounds[name] = partial(engine.train, jobs)
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(repeats + 1):
        for name, train_all in rounds.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            train_all()
            torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - started)
    steps = count * jobs[0].batches.steps
    found: dict[str, Any] = {
        name: statistics.median(own) / steps * 1e6 for name, own in times.items()
    }
    own = {key: one for key, one in case.items() if key != "variants"}
    print(own, {name: round(one, 2) for name, one in found.items()}, flush=True)
    print("  first rounds in s:", {name: round(one, 1) for name, one in first.items()}, flush=True)
    found["first_round_seconds"] = first
    if profile:
        found["kernels"] = {name: _kernels(one, steps) for name, one in rounds.items()}
    return {**own, "us_per_model_step": found}


def _kernels(train_all: partial[Any], steps: int) -> dict[str, float]:
    """Microseconds per model and step of each kernel of a round."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as taken:
        train_all()
        torch.cuda.synchronize()
    rows = sorted(taken.key_averages(), key=lambda row: -row.self_device_time_total)[:16]
    for row in rows:
        print(f"  {row.self_device_time_total / steps:7.3f} us x{row.count:6d} {row.key[:90]}")
    return {row.key: row.self_device_time_total / steps for row in rows}


def main() -> None:
    """Checks the variants, then measures them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare results alone")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a round")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["cnn", "lenet", "mlp"])
    parser.add_argument("--only", nargs="+", default=[], choices=VARIANTS, help="variants")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    check()
    torch.set_float32_matmul_precision("highest")
    if given.check:
        return
    found = []
    for case in CASES:
        if case["model"] in given.models:
            found.append(measure(case, given.repeats, given.only, profile=given.profile))
            if given.out:
                given.out.write_text(json.dumps(found, indent=2) + "\n")


if not torch.cuda.is_available():
    assert os.environ.get("TRITON_INTERPRET"), "without a GPU: TRITON_INTERPRET=1 and --check"

if __name__ == "__main__":
    main()
