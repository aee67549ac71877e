"""How long the report page takes: to write for large runs, to open and to answer a click.

    python benchmarks/report.py --out runs/bench/report.json [FOLDER ...]

Makes up runs of 1,000 clients and 3,000 rounds, writes their page in a process of its own, whose
time and memory are measured, and opens it in a headless Chromium. Folders of real runs come after
them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fedproto import FedAvg, FedProto
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.synthetic import Synthetic
from fedproto.store import RunStore
from fedproto.store.run import describe_environment
from fedproto.types import RoundRecord

METRICS = ("accuracy", "loss", "train_loss", "ece", "dissimilarity", "mmd", "aggregate_mean_margin")


def write_runs(folder: Path, *, runs: int, rounds: int, clients: int, cohort: int) -> int:
    """Runs with made-up records: half of one method, half of another; returns their bytes."""
    schedule = ScheduleOptions(rounds=rounds, cohort=cohort)
    size = 0
    for place in range(runs):
        strategy = FedAvg() if place % 2 else FedProto()
        data = Synthetic(clients=clients)
        config = RunConfig(strategy, data, seed=place // 2, schedule=schedule)
        path = folder / f"run{place}"
        RunStore.create(path, config)
        rng = np.random.default_rng(place)
        with (path / "rounds.jsonl").open("w") as file:
            for number in range(rounds):
                chosen = np.sort(rng.choice(clients, cohort, replace=False)).tolist()
                weights = rng.dirichlet(np.full(cohort, 5.0)).tolist()
                scores = dict(zip(METRICS, rng.random(len(METRICS)).tolist(), strict=True))
                epochs = dict.fromkeys(chosen, 2)
                attention = dict(zip(chosen, weights, strict=True))
                record = RoundRecord(
                    number, chosen, [], [], epochs, attention, scores, 10**6, 10**6, 0.25
                )
                file.write(json.dumps(asdict(record)) + "\n")
        size += (path / "rounds.jsonl").stat().st_size
    return size


def parse_alone(folder: Path) -> float:
    """Processor seconds of decoding the records' JSON and nothing else."""
    started = time.process_time()
    for file in folder.rglob("rounds.jsonl"):
        with file.open() as lines:
            for line in lines:
                json.loads(line)
    return time.process_time() - started


def write_page(folder: Path, page: Path) -> dict[str, float]:
    """Time and memory of the command that writes a page."""
    command = [sys.executable, "-m", "fedproto", "report", str(folder), "--out", str(page)]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "write_s": time.perf_counter() - started,
        "write_cpu_s": used,
        "peak_memory_mb": after.ru_maxrss / 1024,
        "page_mb": page.stat().st_size / 1e6,
    }


def open_page(page: Path, profile: Path) -> dict[str, float]:
    """How long a browser takes to open a page of some width, and to answer clicks."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support"))
    from browser import open_browser, set_size

    with open_browser(profile) as session:
        set_size(session, 1440, 900)
        session.get(page.as_uri())
        session.get("about:blank")
        session.get(page.as_uri())
        took: dict[str, Any] = session.execute_script(
            """
            const entry = performance.getEntriesByType("navigation")[0];
            const clicks = [];
            for (const chip of [...document.querySelectorAll(".chip")].slice(0, 5)) {
              for (const _ of [0, 1]) {
                const started = performance.now();
                chip.click();
                document.body.offsetHeight;
                clicks.push(performance.now() - started);
              }
            }
            return {
              open_s: entry.domComplete / 1000, slowest_click_ms: Math.max(...clicks),
              height_px: document.documentElement.scrollHeight,
            };
            """
        )
    return took


def main() -> None:
    """Prints the figures, and writes them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="folders of real runs")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohorts", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for place, cohort in enumerate(given.cohorts):
            folder = scratch / f"made{place}"
            shape = {"runs": given.runs, "rounds": given.rounds, "clients": given.clients}
            size = write_runs(folder, **shape, cohort=cohort)
            page = scratch / "page.html"
            row = {"what": "made up", **shape, "cohort": cohort, "records_mb": size / 1e6}
            row |= write_page(folder, page)
            row["parse_alone_cpu_s"] = parse_alone(folder)
            found.append(row | open_page(page, scratch / f"profile{place}"))
            print(json.dumps(found[-1]))
        for place, folder in enumerate(given.folders):
            page = scratch / "page.html"
            runs = len(list(folder.rglob("run.json")))
            row = {"what": folder.name, "runs": runs, **write_page(folder, page)}
            found.append(row | open_page(page, scratch / f"real{place}"))
            print(json.dumps(found[-1]))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": describe_environment(), "pages": found}
        given.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
