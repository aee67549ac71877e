"""Model-steps per second on a CUDA device, parity with the reference engine, and whole sweeps.

    python benchmarks/gpu.py steps parity --out results/gpu.json
    python benchmarks/gpu.py sweep --recipe synthetic --set engine.name=stacked

Parts: `steps` (eager loop, graph-captured loop, stacked engine), `rounds` (whole rounds of the
field's models beside a bare captured loop of the same steps), `profile` (the kernels of a
round of a recipe), `growth` (cost over steps and runs), `parity` (stacked against reference),
`devices` (a round over the number of devices), `sweep` (a recipe from start to end). What has been
measured is written after every part.
"""

# Long: its parts measure the same workloads by the same clock, and write one file.
from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from workloads import CLASSES, MODELS, SAMPLES, SHAPES, federation, initial_state, jobs_on

from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.config.options import EvaluateOptions, ScheduleOptions
from fedproto.config.recipe import read_recipe
from fedproto.data.tasks import task_named
from fedproto.engines.base import ENGINES, EngineOptions, Workload
from fedproto.engines.processes import make_engine
from fedproto.engines.reference import read_state
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.rounds import Run, run_rounds, runs_from
from fedproto.rounds import train as train_runs
from fedproto.store.run import describe_environment
from fedproto.store.sweeps import create_sweep
from fedproto.strategies import STRATEGIES
from fedproto.types import ServerState

BATCH = 10


def main() -> None:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = {
        "steps": steps,
        "rounds": rounds,
        "profile": profile,
        "growth": growth,
        "parity": parity,
        "memory": memory,
        "devices": devices,
        "sweep": sweep,
    }
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    parser.add_argument("--models", nargs="+", default=["cnn", "mlp"], choices=sorted(MODELS))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 10, 40, 120])
    parser.add_argument("--steps", type=int, default=400, help="local steps per job")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipe", default="synthetic")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--only", nargs="+", default=[""], help="how names of runs begin")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "environment": describe_environment(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for name in arguments.parts:
        started = time.perf_counter()
        figures[name] = parts[name](arguments)
        print(f"[{name}: {time.perf_counter() - started:.1f} s]", flush=True)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _seconds(work: Callable[[], Any], repeats: int) -> list[float]:
    """Wall-clock times after one run that does not count."""
    work()
    times = []
    for _ in range(repeats):
        _synchronize()
        started = time.perf_counter()
        work()
        _synchronize()
        times.append(time.perf_counter() - started)
    return times


def _engine(
    model: str, data: Any, *, name: str = "stacked", dtype: str = "float32", **options: Any
) -> Any:
    chosen = EngineOptions(name=name, device=str(_device()), dtype=dtype, **options)  # type: ignore[arg-type]
    built = build_model(MODELS[model], SHAPES[model], CLASSES, seed=0)
    task = task_named("classification")
    return make_engine(name, Workload(data, built, task, chosen, _Printed()))


class _Printed(Callback):
    def on_notice(self, text: str) -> None:
        print(text)


class _Precision:
    """Sets tf32 for the loops that are not ours."""

    def __init__(self, tf32: bool) -> None:
        self._options = EngineOptions(device=str(_device()), tf32=tf32)

    def __enter__(self) -> None:
        self._context = self._options.computing()
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


def _captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of one step, after a few that choose kernels."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _eager_loop(model: str, data: Any, number: int, *, graph: bool) -> Callable[[], None]:
    """What a researcher writes by hand: module, SGD, batches gathered on the device."""
    device = _device()
    net = build_model(MODELS[model], SHAPES[model], CLASSES, seed=0).to(device)
    inputs, targets = data.samples.inputs.to(device), data.samples.targets.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    order = torch.randperm(SAMPLES[model], device=device)
    batches = len(order) // BATCH
    batch = order[:BATCH].clone()

    def step() -> None:
        optimizer.zero_grad(set_to_none=not graph)
        F.cross_entropy(net(inputs[batch]), targets[batch]).backward()
        optimizer.step()

    if not graph:

        def eager() -> None:
            for place in range(number):
                start = place % batches * BATCH
                batch.copy_(order[start : start + BATCH])
                step()

        return eager
    captured = _captured(step)

    def replay() -> None:
        for place in range(number):
            start = place % batches * BATCH
            batch.copy_(order[start : start + BATCH])
            captured.replay()

    return replay


def _bandwidth() -> float:
    """Bytes read plus bytes written per second by a large copy on the device."""
    source = torch.rand(2**28 if torch.cuda.is_available() else 2**22, device=_device())
    target = torch.empty_like(source)
    times = _seconds(lambda: target.copy_(source), 5)
    return 2 * source.numel() * 4 / statistics.median(times)


def steps(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per model and step."""
    bandwidth = _bandwidth()
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    table: list[dict[str, Any]] = []

    def add(model: str, what: str, tf32: bool, count: int, times: list[float], **more: Any) -> None:
        each = [seconds / count / arguments.steps * 1e6 for seconds in times]
        row = {
            "model": model,
            "what": what,
            "tf32": tf32,
            "models": count,
            "us_per_model_step": statistics.median(each),
            "spread": [min(each), max(each)],
            "model_steps_per_second": 1e6 / statistics.median(each),
            **more,
        }
        eager = [
            known["us_per_model_step"]
            for known in table
            if (known["model"], known["what"], known.get("tf32")) == (model, "eager loop", tf32)
        ]
        row["times_eager"] = eager[0] / row["us_per_model_step"] if eager else 1.0
        table.append(row)
        print(
            f"{model} {'tf32' if tf32 else 'fp32'} {what:22s} {count:4d} models"
            f" {row['us_per_model_step']:9.1f} us/model-step"
            f" {row['model_steps_per_second']:10.0f} /s {row['times_eager']:6.1f}x eager"
            + (f"  first {more['first_seconds']:.1f} s" if "first_seconds" in more else ""),
            flush=True,
        )

    for model in arguments.models:
        state = initial_state(model)
        weights = 4 * sum(tensor.numel() for tensor in state.params.values())
        # Read forward, read backward, read and written by the update.
        bound = 4 * weights / bandwidth * 1e6
        print(f"{model}: moving the weights alone takes {bound:.1f} us/model-step")
        table.append({"model": model, "what": "bound by weights", "us_per_model_step": bound})
        data = federation([SAMPLES[model]] * max(arguments.counts), SHAPES[model])
        epochs = arguments.steps // (SAMPLES[model] // BATCH)
        for tf32 in (True, False):
            reference = _engine(model, data, name="reference", tf32=tf32)
            jobs = jobs_on(data, initial_state(model).to(_device()), [0], epochs=epochs)
            times = _seconds(partial(reference.train, jobs), arguments.repeats)
            add(model, "reference engine", tf32, 1, times)
            with _Precision(tf32):
                loop = _eager_loop(model, data, arguments.steps, graph=False)
                add(model, "eager loop", tf32, 1, _seconds(loop, arguments.repeats))
                if torch.cuda.is_available():
                    loop = _eager_loop(model, data, arguments.steps, graph=True)
                    add(model, "graph loop", tf32, 1, _seconds(loop, arguments.repeats))
            for compiled in (True, False):
                engine = _engine(model, data, tf32=tf32, compile=compiled)
                received = initial_state(model).to(_device())
                what = "stacked, compiled" if compiled else "stacked"
                for count in arguments.counts if compiled else arguments.counts[-1:]:
                    jobs = jobs_on(data, received, list(range(count)), epochs=epochs)
                    _synchronize()
                    started = time.perf_counter()
                    engine.train(jobs)
                    _synchronize()
                    first = time.perf_counter() - started
                    times = _seconds(partial(engine.train, jobs), arguments.repeats)
                    add(model, what, tf32, count, times, first_seconds=first)
                engine.close()
                del engine
    peak = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    return {"bandwidth": bandwidth, "rows": table, "peak_memory_gb": peak}


ROUNDS: list[dict[str, Any]] = [
    {"model": "lenet", "jobs": 100, "epochs": 5},
    {"model": "lenet", "jobs": 10, "epochs": 5},
    {"model": "lenet", "jobs": 100, "epochs": 5, "amp": True},
    {"model": "lenet", "jobs": 10, "epochs": 5, "amp": True},
    {"model": "lenet", "jobs": 100, "epochs": 5, "amp": True, "train": {"weight_decay": 1e-3}},
    {"model": "lenet", "jobs": 100, "epochs": 5, "amp": True, "train": {"momentum": 0.9}},
    {"model": "lenet", "jobs": 10, "epochs": 5, "name": "captured"},
    {"model": "resnet18", "jobs": 10, "epochs": 5, "amp": True},
    {"model": "cnn", "jobs": 120, "epochs": 40},
]
"""Rounds that are timed: the engine is the stacked one unless another is named, in tf32."""

BARE: list[dict[str, Any]] = [
    {"model": "lenet", "steps": 500},
    {"model": "lenet", "steps": 500, "amp": True},
    {"model": "resnet18", "steps": 100, "amp": True},
    {"model": "resnet18", "steps": 100, "amp": True, "compiled": True},
]
"""Loops of one captured step, with nothing around it."""


def rounds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per model and step in whole rounds of batches of 50 (10 for `cnn`)."""
    table = []
    for case in BARE:
        seconds = _bare_loop(**case)
        each = statistics.median(_seconds(seconds, arguments.repeats)) / case["steps"] * 1e6
        table.append({"what": "bare captured loop", **case, "us_per_model_step": each})
        print(table[-1], flush=True)
    for case in ROUNDS:
        model, count, name = case["model"], case["jobs"], case.get("name", "stacked")
        data = federation([SAMPLES[model]] * count, SHAPES[model])
        batch = 10 if model == "cnn" else 50
        train = TrainOptions(lr=0.01, batch_size=batch, **case.get("train", {}))
        received = initial_state(model).to(_device())
        jobs = jobs_on(data, received, list(range(count)), epochs=case["epochs"], train=train)
        engine = _engine(model, data, name=name, tf32=True, amp=case.get("amp", False))
        started = time.perf_counter()
        engine.train(jobs)
        _synchronize()
        first = time.perf_counter() - started
        median = statistics.median(_seconds(partial(engine.train, jobs), arguments.repeats))
        each = median / count / jobs[0].batches.steps * 1e6
        row = {"what": name, **case, "us_per_model_step": each, "round_seconds": median}
        whole = _with_aggregation(engine, data, replace(train, epochs=case["epochs"]), arguments)
        table.append({**row, "first_round_seconds": first, "aggregated_round_seconds": whole})
        print(table[-1], flush=True)
        engine.close()
    return {"rows": table}


def _with_aggregation(
    engine: Any, data: Any, train: TrainOptions, arguments: argparse.Namespace
) -> float:
    """Seconds of a round of all clients: its plan, training, checks and the weighted mean."""
    schedule = ScheduleOptions(rounds=arguments.repeats + 2, cohort=len(data.clients))
    config = RunConfig(strategy=STRATEGIES.get("fedavg")(), train=train, schedule=schedule)
    config = replace(config, evaluate=EvaluateOptions(every=schedule.rounds, last=1))
    initial = ServerState(0, *read_state(engine.workload.model)).to(_device())
    ends = []
    for _ in run_rounds([Run(config, data, initial=initial)], engine):
        _synchronize()
        ends.append(time.perf_counter())
    # The first may compile, the last is tested.
    return statistics.median(b - a for a, b in pairwise(ends[:-1]))


def _bare_loop(
    model: str, steps: int, *, amp: bool = False, compiled: bool = False
) -> Callable[[], None]:
    """Replays of one captured step of a module, in tf32 or bfloat16."""
    device = _device()
    net = build_model(MODELS[model], SHAPES[model], CLASSES, seed=0).to(device)
    run = torch.compile(net) if compiled else net
    x = torch.randn(50, *SHAPES[model], device=device)
    y = torch.randint(CLASSES, (50,), device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()

    with _Precision(tf32=True):
        graph = _captured(step)
    return lambda: [graph.replay() for _ in range(steps)] and None


class _Profile(Callback):
    """Profiles one pass over all runs, after two in which everything is compiled."""

    def __init__(self) -> None:
        activities = torch.profiler.supported_activities()
        self.taken = torch.profiler.profile(activities=activities)
        self.passes = self.jobs = 0
        self.seconds = 0.0

    def on_pass(self, num_jobs: int) -> None:
        self.passes += 1
        _synchronize()
        if self.passes == 3:
            self.jobs = num_jobs
            self.taken.start()
            self.seconds = -time.perf_counter()
        elif self.passes == 4:
            self.seconds += time.perf_counter()
            self.taken.stop()


def profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where a round of a recipe's runs goes: the device's share of it, kernel by kernel."""
    callback = _Profile()
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_from(create_sweep(Path(folder) / "sweep", _configs(arguments)))
        for run in runs:
            run.pause = 4
        train_runs(runs, [callback])
    rows = sorted(callback.taken.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in rows) / 1e6
    print(
        f"{arguments.recipe}: {len(runs)} runs, {callback.jobs} jobs, {callback.seconds:.2f} s a"
        f" round under the profiler, device busy for {busy:.2f} s"
    )
    for row in rows[:30]:
        print(f"{row.self_device_time_total / 1e3:9.1f} ms x{row.count:6d} {row.key[:95]}")
    kernels = {row.key: [row.self_device_time_total / 1e6, row.count] for row in rows[:200]}
    return {"runs": len(runs), "seconds": callback.seconds, "busy": busy, "kernels": kernels}


def growth(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds over local steps and over the number of runs of ten clients each."""
    model = arguments.models[0]
    data = federation([100] * 240, SHAPES[model])
    engine = _engine(model, data, tf32=True)
    received = initial_state(model).to(_device())
    found: dict[str, Any] = {"steps": [], "runs": []}
    for epochs in (5, 10, 20, 40, 80):
        jobs = jobs_on(data, received, list(range(40)), epochs=epochs)
        seconds = statistics.median(_seconds(partial(engine.train, jobs), 3))
        found["steps"].append([epochs * 10, seconds])
        print(f"40 models, {epochs * 10} steps: {seconds:.3f} s", flush=True)
    for runs in (1, 2, 4, 8, 12, 24):
        jobs = jobs_on(data, received, list(range(10 * runs)), epochs=20)
        seconds = statistics.median(_seconds(partial(engine.train, jobs), 3))
        found["runs"].append([runs, seconds])
        print(f"{runs} runs of 10 clients, 200 steps: {seconds:.3f} s", flush=True)
    engine.close()
    return found


def parity(arguments: argparse.Namespace) -> dict[str, float]:
    """Largest difference of weights and attention between stacked and reference, two rounds."""
    found: dict[str, float] = {}
    every = [STRATEGIES.get(name)() for name in STRATEGIES.names()]
    for model in arguments.models:
        data = federation([27, 64, 11, 95, 33, 48], SHAPES[model])
        for dtype in ("float64", "float32"):
            for train in (
                TrainOptions(epochs=2, lr=0.02),
                TrainOptions(epochs=2, lr=0.02, momentum=0.9, weight_decay=1e-3),
                TrainOptions(epochs=2, lr=0.001, optimizer="adam"),
                TrainOptions(epochs=2, lr=0.02, optimizer="sam", clip_norm=1.0, centralize=True),
            ):
                results = []
                torch._dynamo.reset()
                for name in ("reference", "stacked"):
                    # Compiling takes longer than these rounds: once per model and type suffices.
                    plain = train.memoryless
                    strategies = [one for one in every if plain or not one.plain_sgd]
                    engine = _engine(model, data, name=name, dtype=dtype, compile=plain)
                    state = initial_state(model, engine.workload.options.torch_dtype())
                    runs = [
                        Run(
                            RunConfig(
                                strategy=strategy,
                                train=train,
                                schedule=ScheduleOptions(rounds=2, cohort=4, delta=0.5),
                            ),
                            data,
                            initial=state.to(_device()),
                        )
                        for strategy in strategies
                    ]
                    for _ in run_rounds(runs, engine):
                        pass
                    results.append(runs)
                    engine.close()
                worst = 0.0
                for one, other in zip(*results, strict=True):
                    for key, tensor in one.state.params.items():
                        worst = max(worst, float((tensor - other.state.params[key]).abs().max()))
                    for first, second in zip(one.records, other.records, strict=True):
                        assert first.cohort == second.cohort
                        for client, share in first.attention.items():
                            worst = max(worst, abs(share - second.attention[client]))
                limit = 1e-9 if dtype == "float64" else 1e-4
                kind = f"{model} {dtype} {train.optimizer} momentum={train.momentum}"
                found[kind] = worst
                print(f"{kind}: {worst:.2e} {'ok' if worst <= limit else 'TOO LARGE'}", flush=True)
    return found


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains in ever smaller parts of the device's memory: the stack must be split, not crash.

    The plan sees the whole device as free, so that what splits the stack is the device running out.
    """
    model = arguments.models[0]
    data = federation([100] * 120, SHAPES[model])
    received = initial_state(model).to(_device())
    jobs = jobs_on(data, received, list(range(120)), epochs=2)
    engine = _engine(model, data)
    whole = engine.train(jobs)
    engine.close()
    del engine
    _, total = torch.cuda.mem_get_info()
    found = []
    for gibibytes in (4.0, 2.0, 1.0, 0.5):
        torch.cuda.empty_cache()
        limit = torch.cuda.memory_allocated() + gibibytes * 2**30
        torch.cuda.set_per_process_memory_fraction(limit / total)
        said: list[str] = []
        engine = _engine(model, data)
        callback = Callback()
        callback.on_notice = said.append
        engine.workload = replace(engine.workload, callback=callback)
        parts = engine.train(jobs)
        engine.close()
        del engine
        torch.cuda.set_per_process_memory_fraction(1.0)
        worst = max(
            float((one.params[name] - other.params[name]).abs().max())
            for one, other in zip(whole, parts, strict=True)
            for name in one.params
        )
        del parts
        print(f"with {gibibytes} GiB: {said}; largest difference {worst:.2e}", flush=True)
        found.append({"gibibytes": gibibytes, "said": said, "largest_difference": worst})
    return {"limits": found}


def devices(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a round over the number of devices; without CUDA two processes stand in."""
    model, count = arguments.models[0], max(arguments.counts)
    data = federation([SAMPLES[model]] * count, SHAPES[model])
    epochs = max(1, arguments.steps // (SAMPLES[model] // BATCH))
    jobs = jobs_on(data, initial_state(model).to(_device()), list(range(count)), epochs=epochs)
    rows: list[dict[str, Any]] = []
    print(f"{model}, {count} jobs of {jobs[0].batches.steps} steps")
    for number in range(1, (torch.cuda.device_count() or 2) + 1):
        engine = _engine(model, data, tf32=True, devices=number)
        seconds = statistics.median(_seconds(partial(engine.train, jobs), arguments.repeats))
        engine.close()
        times = rows[0]["seconds"] / seconds if rows else 1.0
        rows.append({"devices": number, "seconds": seconds, "speed_up": times})
        print(f"{number:3d} devices {seconds:9.3f} s a round {times:6.2f}x", flush=True)
    return {"model": model, "jobs": count, "rows": rows}


def _configs(arguments: argparse.Namespace) -> dict[str, RunConfig]:
    """The runs of a recipe whose names begin as asked for."""
    return {
        run: config
        for run, config in read_recipe(arguments.recipe, arguments.overrides).items()
        if run.startswith(tuple(arguments.only))
    }


def sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """A recipe from start to end, with the time in training and in tests."""
    configs = _configs(arguments)
    spent = {"train": 0.0, "evaluate": 0.0}
    rounds = {"done": 0}
    name = next(iter(configs.values())).engine.name
    cls = ENGINES.get(name)
    originals = {key: getattr(cls, key) for key in spent}

    def timed(key: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            started = time.perf_counter()
            result = originals[key](self, *args)
            _synchronize()
            spent[key] += time.perf_counter() - started
            if key == "train":
                rounds["done"] += 1
                if rounds["done"] in (1, 2, 3) or rounds["done"] % 20 == 0:
                    elapsed = time.perf_counter() - begun
                    print(
                        f"round {rounds['done']}: {elapsed:.1f} s, training {spent['train']:.1f},"
                        f" tests {spent['evaluate']:.1f}",
                        flush=True,
                    )
            return result

        return call

    for key in spent:
        setattr(cls, key, timed(key))
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        stores = create_sweep(Path(folder) / "sweep", configs)
        train_runs(runs_from(stores))
        seconds = time.perf_counter() - begun
        scores = {
            store.path.name: statistics.mean(
                record.metrics["accuracy"] for record in store.records()[-10:]
            )
            for store in stores
        }
    for key, original in originals.items():
        setattr(cls, key, original)
    print(f"{arguments.recipe}: {len(configs)} runs, {rounds['done']} rounds, {seconds:.1f} s")
    print(f"training {spent['train']:.1f} s, tests {spent['evaluate']:.1f} s")
    for run, score in scores.items():
        print(f"  {run}: accuracy {score:.4f}")
    return {
        "recipe": arguments.recipe,
        "overrides": arguments.overrides,
        "runs": len(configs),
        "rounds": rounds["done"],
        "seconds": seconds,
        **spent,
        "accuracy": scores,
    }


if __name__ == "__main__":
    main()
