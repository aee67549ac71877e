"""`fedproto flower up`: a recipe on real processes, interrupts, kills, and the logs of failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from fedproto.store import RunStore
from helpers import wait_until

RECIPE = """
seed = 3
data = { name = "synthetic", clients = 1, seed = 5 }
model = { name = "mlp", hidden = 6, features = 5 }
strategy = { name = "fedproto" }
train = { epochs = 2, batch_size = 20, lr = 0.05 }
schedule = { rounds = 3, cohort = 1 }
engine = { name = "reference", device = "cpu" }
flower = { evaluate_on = "server", deadline = 120, wait = 90 }
"""


def command(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    return subprocess.Popen(
        [sys.executable, "-m", "fedproto", "flower", "up", str(recipe), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that still work for a test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder / "logs") in line:
            found.append(line)
    return found


def programs_of(folder: Path) -> list[str]:
    """Those that are Flower's; until it runs another, a new process has the line of its parent."""
    return [line for line in processes_of(folder) if "fedproto.flower.programs" in line]


@pytest.mark.timeout(300)
def test_up_runs_a_recipe_and_leaves_nothing_behind(tmp_path):
    process = command(
        tmp_path,
        *("--out", "run", "--logs", str(tmp_path / "logs"), "--set", "schedule.rounds=1"),
        *("--set", "flower.evaluate_on=clients"),
        *("--set", "data.clients=2", "--set", "schedule.cohort=2"),
    )
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output
    assert "fedproto" in output
    (record,) = RunStore.open(tmp_path / "run").records()
    assert record.failures == {}
    assert "accuracy" in record.metrics
    assert processes_of(tmp_path) == []


@pytest.mark.timeout(300)
def test_up_ends_on_interrupt(tmp_path):
    process = command(tmp_path, "--out", "run", "--logs", str(tmp_path / "logs"))
    wait_until(lambda: programs_of(tmp_path), "the server")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "rounds are safe" in output
    wait_until(lambda: processes_of(tmp_path) == [], "the end of all processes", 30)


@pytest.mark.timeout(300)
def test_nothing_outlives_a_killed_up(tmp_path):
    process = command(tmp_path, "--out", "run", "--logs", str(tmp_path / "logs"))
    wait_until(lambda: len(programs_of(tmp_path)) >= 2, "the server and the node")
    process.kill()
    process.communicate(timeout=30)
    wait_until(lambda: processes_of(tmp_path) == [], "the end of all processes", 60)


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def programs(pid: int) -> list[int]:
    """Children that are programs of Flower's, the server's first."""
    found = []
    for child in children(pid):
        with contextlib.suppress(OSError):
            if b"fedproto.flower.programs" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


@pytest.mark.timeout(300)
def test_the_logs_of_a_failed_up_are_kept_where_the_error_says(tmp_path):
    process = command(tmp_path, "--out", "run")
    # Short-lived helpers come and go among the children.
    wait_until(lambda: len(programs(process.pid)) >= 2, "the server and the node")
    os.kill(programs(process.pid)[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    kept = tmp_path / "run" / "flower-logs"
    assert str(Path("run") / "flower-logs") in output
    assert (kept / "superlink.log").exists()
