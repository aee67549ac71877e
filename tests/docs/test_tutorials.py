"""README's and the tutorials' commands run, in order, and print what the pages show.

Python blocks of README and guides are run in `test_docs.py`; notebooks in `test_project.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from documents import ROOT, blocks, commands

pytestmark = pytest.mark.slow

INSTALLS = ("pip install", "make install", ". .venv", "make demo")
"""Commands that install the project; what they call is run by other tests and by `make dist`."""


def run(command: str, folder) -> str:
    """Runs one line of a page with this environment's programs; what it printed."""
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        shlex.split(command, comments=True),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def words(line: str) -> list[str]:
    """The words of a line of output, without borders and numbers, which depend on the machine."""
    return re.findall(r"[A-Za-z%][A-Za-z%]+", line)


@pytest.mark.parametrize("name", ["first-federation", "read-a-report"])
def test_the_commands_of_a_tutorial_run(name, tmp_path):
    page = ROOT / f"docs/tutorials/{name}.md"
    for recipe in blocks(page, "toml"):
        (tmp_path / "stragglers.toml").write_text(recipe)
    found = [(command, shown) for command, *shown in commands(page)]
    assert len(found) >= 3
    for command, shown in found:
        if command.startswith("pip install"):
            continue
        printed = [set(words(line)) for line in run(command, tmp_path).splitlines()]
        for line in shown:
            if line.startswith(("┃", "│")):  # a pipe is wide: it has the columns hidden there too
                assert any(set(words(line)) <= there for there in printed), line
    assert list(tmp_path.rglob("*.html"))


def test_the_commands_of_the_readme_run(tmp_path):
    readme = ROOT / "README.md"
    table = re.findall(r"^\| `(fedproto [^`]+)` \|", readme.read_text(), flags=re.MULTILINE)
    assert len(table) == 5
    for command in table:
        run(command, tmp_path)
    for command, *_ in commands(readme):
        assert command.startswith(INSTALLS), command
