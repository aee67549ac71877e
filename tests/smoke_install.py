"""Installs a wheel into a fresh environment outside the repository and tries everything once.

    make dist && python tests/smoke_install.py dist/*.whl

With ``--contents`` it only looks at the files in the wheel.

Every command of the command line, and the code of the README and of the tutorials, with only what
the wheel itself brings and asks for. Not a test of the suite: it needs a package index and minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
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
    ["list", "train"],
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
    ["tune", "tune-digits", "--set=schedule.rounds=2", "--set=tune.trials=2", "--out=runs/tuned"],
    ["analyse", "runs/one"],
    ["report", "runs"],
    ["check", "runs"],
    ["export", "runs/one"],
    ["predict", "runs/one", "figures"],
    ["flower", "keys", "federation", "--host=localhost", "--clients=2"],
    ["flower", "up", "quickstart", *TINY, "--set=data.clients=3", "--out=runs/flower"],
    ["flower", "up", "runs/flower", "--rounds=3"],
]
REFUSES = {
    ("reproduce", "accuracy", "--only=synthetic"): "from a checkout of the repository",
    ("data", "check", "mnist", "--data-root=nowhere"): "fedproto data fetch mnist",
    ("flower", "register", "--server=federation/server"): "no server answers",
    ("flower", "submit", "quickstart", "--server=federation/server"): "no server answers",
    ("flower", "start", "nowhere"): "make one with 'fedproto flower keys'",
}
"""What cannot work in a fresh environment by itself, and says what to do."""

ALL_COMMANDS = """
from fedproto.cli.app import COMMANDS, command
for name in COMMANDS:
    for inner in getattr(command(name), "commands", [""]):
        print(f"{name} {inner}".strip())
"""


def check_contents(wheel: Path) -> None:
    """Compares the files in a wheel with those of the checkout: the package, and nothing else."""
    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    expected = {path.relative_to(ROOT / "src").as_posix() for path in files}
    expected = {name for name in expected if not name.endswith(".pyc")}
    expected |= {f"fedproto/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")}
    if found != expected:
        sys.exit(f"missing: {sorted(expected - found)}; superfluous: {sorted(found - expected)}")


def main(wheel: Path) -> None:
    """Runs it all; the first failure ends it."""
    check_contents(wheel)
    with tempfile.TemporaryDirectory(prefix="fedproto-smoke-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv/bin/python"
        extras = f"{wheel}[all,flower]"
        install = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), extras]
        _run([str(python), *install], place)
        work = place / "work"
        work.mkdir()
        (work / "toy.py").write_text(PLUGIN)
        (work / "toy.txt").write_text("toy\n")
        _try_commands(python, work)
        (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        _run([str(python), "-W", "error", "-c", example], work)
        for notebook in sorted((ROOT / "docs").rglob("*.ipynb")):
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
    *flags, file = sys.argv[1:]
    (check_contents if "--contents" in flags else main)(Path(file).resolve())
