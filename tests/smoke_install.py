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
COMMANDS = [
    ["--version"],
    ["--help"],
    ["info"],
    ["list"],
    ["list", "options", "train"],
    ["data", "stats", "digits"],
    ["data", "plot", "digits"],
    ["run", "quickstart", *TINY, "--out=runs/one"],
    ["sweep", "quickstart", *TINY, "--set=sweep.seed=[0, 1]", "--out=runs/two"],
    ["resume", "runs/one"],
    ["resume", "runs/one", "--rounds=3"],
    ["compare", "runs", "--target=0.1", "--plots=figures"],
    ["analyse", "runs/one"],
    ["report", "runs"],
    ["export", "runs/one", "--format=safetensors", "--format=torchscript"],
    ["predict", "runs/one", "figures"],
    ["reproduce", "accuracy", "--only=synthetic", "--scale=smoke"],
]


def main(wheel: Path) -> None:
    """Runs it all; the first failure ends it."""
    with tempfile.TemporaryDirectory(prefix="fedproto-smoke-") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        python = place / "venv/bin/python"
        constraints = ROOT / "constraints.txt"
        install = ["-m", "pip", "install", "--quiet", "-c", str(constraints), f"{wheel}[all]"]
        _run([str(python), *install], place)
        work = place / "work"
        work.mkdir()
        for command in COMMANDS:
            _run([str(python.with_name("fedproto")), *command], work)
        (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        _run([str(python), "-W", "error", "-c", example], work)
        for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
            tool = ROOT / "docs/tools/notebooks.py"
            _run([str(python), "-W", "error", str(tool), str(notebook)], work)
    sys.stdout.write("all of it works\n")


def _run(command: list[str], folder: Path) -> None:
    sys.stdout.write(f"$ {' '.join(command)[:150]}\n")
    sys.stdout.flush()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
