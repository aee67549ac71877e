"""README's and the tutorials' commands run, in order, and print what the pages show.

Python blocks of README and guides are run in `test_docs.py`; notebooks when the site is built.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from documents import ROOT, blocks, commands
from fedproto.cli import main

pytestmark = pytest.mark.timeout(900)  # seconds, on a machine that is shared

INSTALLS = ("pip install", "make install", ". .venv", "make demo")
"""Commands that install the project; what they call is run by other tests and by `make dist`."""

SHORT = "--set=schedule.rounds=3"
"""Added to commands that train: words are compared, and those are the same after any number of
rounds. The demo's numbers are compared in `test_demo.py`."""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs one line of a page in an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def running(command: str) -> str:
        program, *arguments = shlex.split(command, comments=True)
        assert program == "fedproto", command
        trains = arguments[0] in ("run", "sweep", "tune")
        status, said = main([*arguments, *[SHORT] * trains]), capsys.readouterr()
        assert status == 0, f"{command}\n{said.out}\n{said.err}"
        return said.out

    return running


def words(line: str) -> list[str]:
    """The words of a line of output, without borders and numbers, which depend on the machine."""
    return re.findall(r"[A-Za-z%][A-Za-z%]+", line)


def follow(page: Path, run, tmp_path) -> list[str]:
    """Runs a tutorial's commands; they print what the page shows."""
    for recipe in blocks(page, "toml"):
        (tmp_path / "stragglers.toml").write_text(recipe)
    found = [(command, shown) for command, *shown in commands(page)]
    assert len(found) >= 3
    for command, shown in found:
        if command.startswith("pip install"):
            continue
        printed = [set(words(line)) for line in run(command).splitlines()]
        for line in shown:
            if line.startswith(("┃", "│")):  # a pipe is wide: it has the columns hidden there too
                assert any(set(words(line)) <= there for there in printed), line
    assert list(tmp_path.rglob("*.html"))
    return [command for command, _ in found]


def test_the_commands_of_the_first_tutorial_run(run, tmp_path):
    follow(ROOT / "docs/tutorials/first-federation.md", run, tmp_path)


def test_the_commands_of_the_readme_and_the_tutorial_on_reports_run(run, tmp_path):
    """Both train the same sweep, which is trained once here."""
    done = follow(ROOT / "docs/tutorials/read-a-report.md", run, tmp_path)
    readme = ROOT / "README.md"
    table = re.findall(r"^\| `(fedproto [^`]+)` \|", readme.read_text(), flags=re.MULTILINE)
    assert len(table) == 5
    assert f"{table[0]} --quiet" in done
    for command in table[1:]:
        run(command)
    for command, *_ in commands(readme):
        assert command.startswith(INSTALLS), command
