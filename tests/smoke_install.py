"""Installs a wheel into a fresh environment outside the repository and tries everything once.

    python -m build && python tests/smoke_install.py dist/*.whl

Every command of the command line, and the code of the README and of the tutorials, with only what
the wheel itself brings and asks for. Not a test of the suite: it needs a package index and minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "--set=data.name=digits", "--set=data.clients=5", "--set=model.hidden=4",
    "--set=model.features=4", "--set=schedule.rounds=2", "--set=schedule.cohort=3",
]  # fmt: skip
PLUGIN = """
from dataclasses import dataclass
from pathlib import Path

from fedproto import DATASETS
from fedproto.data.base import Download
from fedproto.data.mnist import MNIST


@DATASETS.register("toy")
@dataclass(frozen=True)
class Toy(MNIST):
    '''A data set whose only file is published in this folder.'''

    folder = "toy"
    downloads = (Download(Path("toy.txt").resolve().as_uri(), "toy/toy.txt"),)
"""
WORKS = [
    ["--version"],
    ["--help"],
    ["info"],
    ["list"],
    ["list", "options", "train"],
    ["data", "stats", "digits"],
    ["data", "plot", "digits"],
    ["data", "fetch", "toy", "--plugin=toy.py"],
    ["data", "check", "toy", "--plugin=toy.py"],
    ["run", "quickstart", *TINY, "--out=runs/one"],
    ["sweep", "quickstart", *TINY, "--set=sweep.seed=[0, 1]", "--out=runs/two"],
    ["resume", "runs/one"],
    ["resume", "runs/one", "--rounds=3"],
    ["compare", "runs", "--target=0.1", "--plots=figures"],
    ["best", "runs/two", "--by=accuracy"],
    ["tune", "tune-digits", "--set=schedule.rounds=2", "--trials=2", "--out=runs/tuned"],
    ["analyse", "runs/one"],
    ["report", "runs"],
    ["check", "runs"],
    ["export", "runs/one", "--format=safetensors", "--format=pt"],
    ["predict", "runs/one", "figures"],
    ["flower", "privacy", "--noise=4", "--rounds=10"],
    ["flower", "keys", "federation", "--host=localhost", "--clients=2"],
    ["flower", "up", "quickstart", *TINY, "--set=data.clients=3", "--out=runs/flower"],
    ["flower", "up", "runs/flower", "--rounds=3"],
]
REFUSES = {
    ("reproduce", "accuracy", "--only=synthetic"): "from a checkout of the repository",
    ("data", "check", "mnist", "--data-root=nowhere"): "fedproto data fetch mnist",
    ("flower", "register", "--server=federation/server"): "no server answers",
    ("flower", "submit", "quickstart", "--server=federation/server"): "no server answers",
    ("flower", "simulate", "quickstart"): "flwr[simulation]",
}
"""What cannot work in a fresh environment by itself, and says what to do."""

ALL_COMMANDS = """
from fedproto.cli.app import COMMANDS, command
for name in COMMANDS:
    for inner in getattr(command(name), "commands", [""]):
        print(f"{name} {inner}".strip())
"""


def main(wheel: Path) -> None:
    """Runs it all; the first failure ends it."""
    with tempfile.TemporaryDirectory(prefix="fedproto-smoke-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv/bin/python"
        extras = f"{wheel}[all,flower,privacy]"
        install = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), extras]
        _run([str(python), *install], place)
        work = place / "work"
        work.mkdir()
        (work / "toy.py").write_text(PLUGIN)
        (work / "toy.txt").write_text("toy\n")
        _try_commands(python, work)
        (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        _run([str(python), "-W", "error", "-c", example], work)
        for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
            tool = ROOT / "docs/tools/notebooks.py"
            _run([str(python), "-W", "error", str(tool), str(notebook)], work)
    sys.stdout.write("all of it works\n")


def _try_commands(python: Path, work: Path) -> None:
    program = str(python.with_name("fedproto"))
    for command in WORKS:
        _run([program, *command], work)
    for refused, words in REFUSES.items():
        said = _run([program, *refused], work, expected=2)
        if words not in said or "Traceback" in said:
            sys.exit(f"does not say '{words}':\n{said}")
    tried = {tuple(one[:2]) for one in WORKS} | {one[:2] for one in REFUSES}
    for name in _run([str(python), "-c", ALL_COMMANDS], work).splitlines():
        if not any(name in (one[0], " ".join(one)) for one in tried):
            sys.exit(f"'fedproto {name}' was not tried")


def _run(command: list[str], folder: Path, expected: int = 0) -> str:
    sys.stdout.write(f"$ {' '.join(command)[:150]}\n")
    sys.stdout.flush()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != expected:
        sys.exit(f"ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout + (done.stderr if expected else "")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
