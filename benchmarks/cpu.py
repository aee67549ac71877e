"""Ours beside plain PyTorch loops and, where their environments are given, beside Flower and
pfl-research: the same work W in one run, with interleaved rounds.

    python benchmarks/cpu.py --rounds 8
    python benchmarks/cpu.py --flower .venv-peers/flower/bin/python --pfl .venv-peers/pfl/bin/python

Work W: 100 clients of MNIST-shaped data with min(300, ⌊lognormal(3.5, 1)⌋ + 10) samples, 10 clients
a round, 2 local epochs in batches of 10, federated averaging by size, no tests. All contenders get
the same samples, cohorts, batches and initial weights, and their weights are compared.
"""  # noqa: D205 - one sentence says it best

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from workloads import MODELS, SHAPES, federation, initial_state, work_w_sizes

from fedproto.rng.schedule import BatchOrder, cohort
from fedproto.store.run import describe_environment

HERE = Path(__file__).resolve().parent
SEED, EPOCHS, BATCH, LR, COHORT = 7, 2, 10, 0.01, 10


def main() -> None:
    """Runs the comparison and prints its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn", "mlp"], choices=sorted(MODELS))
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count")
    parser.add_argument("--engines", nargs="+", default=["processes", "reference"])
    parser.add_argument("--loops", nargs="*", default=["plain", "loader", "channels-last"])
    parser.add_argument("--flower", type=Path, help="Python of an environment with Flower")
    parser.add_argument("--pfl", type=Path, help="Python of an environment with pfl-research")
    parser.add_argument("--before", type=Path, help="another checkout of ours, for its engines")
    parser.add_argument("--growth", action="store_true", help="also cost over clients, steps, runs")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {
        "environment": describe_environment(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for model in arguments.models:
        figures[model] = compare(model, arguments)
        if arguments.out:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.growth:
        figures["growth"] = growth(arguments.models[0])
        if arguments.out:
            arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


def write_work(
    path: Path, model: str, rounds: int, *, clients: int = COHORT, epochs: int = EPOCHS
) -> int:
    """Writes the work for the contenders; returns the local steps of a mean round."""
    sizes = work_w_sizes()
    data = federation(sizes, SHAPES[model])
    known = np.array(sizes)
    content: dict[str, Any] = {
        "inputs": data.samples.inputs.numpy(),  # type: ignore[attr-defined]
        "targets": data.samples.targets.numpy(),  # type: ignore[attr-defined]
        "starts": np.cumsum(known) - known,
        "sizes": known,
        "seed": SEED,
        "epochs": epochs,
        "batch_size": BATCH,
        "lr": LR,
        "cohorts": np.array(
            [cohort(SEED, round_, known, clients, "uniform") for round_ in range(rounds)]
        ),
    }
    steps = 0
    for round_, asked in enumerate(content["cohorts"].tolist()):
        for client in asked:
            order = BatchOrder(SEED, round_, client, sizes[client], BATCH, epochs)
            steps += order.steps
            content[f"order.{round_}.{client}"] = np.stack(
                [order.epoch(number) for number in range(epochs)]
            )
    for name, tensor in initial_state(model).params.items():
        content[f"param.{name}"] = tensor.numpy()
    np.savez(path, **content)
    return steps // rounds


class Contender:
    """A program that does rounds when asked."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.first = 0.0
        self.memory = 0
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 - open as long as the program
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=HERE / "contenders",
            env={**os.environ, **environment},
        )
        started = time.perf_counter()
        self._answer()
        self.startup = time.perf_counter() - started

    def do(self, round_: int, *, counts: bool) -> None:
        """One round."""
        self._tell(str(round_))
        seconds = self._answer()["seconds"]
        # Between rounds, so that looking costs nobody time; allocators keep what they had.
        self.memory = max(self.memory, _memory_of_tree(self._process.pid))
        if counts:
            self.seconds.append(seconds)
        else:
            self.first = seconds

    def end(self) -> None:
        """Lets it write its weights and go."""
        self._tell("end")
        self._answer()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended with code {code}: {self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _memory_of_tree(root: int) -> int:
    """Bytes of a process and all below it; what several share is counted once."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            parents[int(entry.name)] = int(fields[1])
    total = 0
    for process in parents:
        above = process
        while above not in (root, 0, 1) and above in parents:
            above = parents[above]
        if above == root:
            try:
                lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def compare(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one model."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.npz"
        steps = write_work(work, model, arguments.rounds + 1)
        source = {"PYTHONPATH": str(HERE.parent / "src")}
        commands: list[tuple[str, list[str], dict[str, str]]] = [
            (f"ours, {engine}", [sys.executable, "ours.py", engine], source)
            for engine in arguments.engines
        ]
        if arguments.before:
            before = arguments.before.resolve()
            script = str(before / "benchmarks/contenders/ours.py")
            commands += [
                (
                    f"before, {engine}",
                    [sys.executable, script, engine],
                    {"PYTHONPATH": str(before / "src")},
                )
                for engine in arguments.engines
            ]
        commands += [
            (f"loop, {loop}", [sys.executable, "plain.py", loop], {}) for loop in arguments.loops
        ]
        if arguments.flower:
            flower = str(arguments.flower.absolute())
            commands.append(("Flower, as its tutorial", [flower, "flower_tutorial.py"], {}))
            commands.append(("Flower, leanest", [flower, "flower.py"], {}))
        if arguments.pfl:
            commands.append(
                ("pfl-research", [str(arguments.pfl.absolute()), "pfl_research.py"], {})
            )
        contenders = []
        for place, (name, (python, script, *more), environment) in enumerate(commands):
            out = str(Path(folder) / f"weights{place}")
            print(f"starting {name}", flush=True)
            command = [python, script, str(work), out, *more]
            contenders.append(Contender(name, command, environment))
        for round_ in range(arguments.rounds + 1):
            # In turn within every round, so that a busy moment of the machine meets all alike.
            for contender in contenders:
                contender.do(round_, counts=round_ > 0)
            shown = ", ".join(
                f"{one.name} {one.seconds[-1] if one.seconds else one.first:.2f}"
                for one in contenders
            )
            print(f"{model} round {round_}: {shown}", flush=True)
        for contender in contenders:
            contender.end()
        weights = [
            {
                moment: dict(np.load(Path(folder) / f"weights{place}.{moment}.npz"))
                for moment in ("first", "last")
            }
            for place in range(len(contenders))
        ]
    return _table(model, steps, contenders, weights)


def _table(
    model: str, steps: int, contenders: list[Contender], weights: list[dict[str, Any]]
) -> dict[str, Any]:
    ours = contenders[0]
    rows = []
    print(f"\n{model}: {steps} local steps a round; ratios are to '{ours.name}', round by round")
    for contender, found in zip(contenders, weights, strict=True):
        ratios = [theirs / own for theirs, own in zip(contender.seconds, ours.seconds, strict=True)]
        differences = {
            moment: max(
                float(np.abs(found[moment][name] - weights[0][moment][name]).max())
                for name in weights[0][moment]
            )
            for moment in ("first", "last")
        }
        row = {
            "name": contender.name,
            "seconds": contender.seconds,
            "median_seconds": statistics.median(contender.seconds),
            "ratio": statistics.median(ratios),
            "ratio_spread": [min(ratios), max(ratios)],
            "startup_seconds": contender.startup,
            "first_round_seconds": contender.first,
            "memory_mb": contender.memory / 1e6,
            "weights_differ_by": differences,
        }
        rows.append(row)
        print(
            f"{contender.name:22s} {row['median_seconds']:7.3f} s/round"
            f"  {row['ratio']:5.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"
            f"  start {contender.startup:5.1f} s, first round {contender.first:5.2f} s"
            f"  {row['memory_mb']:6.0f} MB"
            f"  weights differ {differences['first']:.1e}, {differences['last']:.1e}"
        )
    print(flush=True)
    return {"steps_per_round": steps, "rows": rows}


def growth(model: str) -> dict[str, Any]:
    """Seconds a round of ours over clients a round, local epochs and runs of a sweep."""
    found: dict[str, Any] = {}
    ladders = {"clients": (1, 2, 4, 8, 16, 32, 64), "epochs": (1, 2, 4, 8), "runs": (1, 2, 4)}
    for what, values in ladders.items():
        found[what] = []
        for value in values:
            chosen = {"clients": COHORT, "epochs": EPOCHS, "runs": 1} | {what: value}
            runs = chosen.pop("runs")
            with tempfile.TemporaryDirectory() as folder:
                work = Path(folder) / "work.npz"
                steps = write_work(work, model, 4, **chosen) * runs
                arguments = [str(work), f"{folder}/weights", "processes", str(runs)]
                environment = {"PYTHONPATH": str(HERE.parent / "src")}
                one = Contender(what, [sys.executable, "ours.py", *arguments], environment)
                for round_ in range(4):
                    one.do(round_, counts=round_ > 0)
                one.end()
            seconds = statistics.median(one.seconds)
            found[what].append({what: value, "steps": steps, "seconds": seconds})
            print(
                f"{what} {value}: {steps} steps, {seconds:.3f} s/round,"
                f" {seconds / steps * 1e3:.2f} ms/step",
                flush=True,
            )
    return found


if __name__ == "__main__":
    main()
