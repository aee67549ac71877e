"""README's table of the demo is what the demo prints."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from fedproto.cli import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def rows(text: str, head: str) -> dict[str, dict[str, str]]:
    """A Markdown table by its first column; `head` is how its first line begins."""
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    names, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(names[1:], row[1:], strict=True)) for row in cells}


@pytest.mark.timeout(900)
def test_the_readme_shows_what_the_demo_prints(tmp_path, monkeypatch, capsys):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^\t\$\(BIN\)/fedproto (.* runs/demo.*)$", makefile, flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["sweep", "compare", "analyse", "report"]
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = [sorted(map(str, tmp_path.glob(word))) or [word] for word in command.split()]
        assert main(list(itertools.chain(*words))) == 0, command
    assert len(list(tmp_path.glob("runs/demo/*/analysis/embedding.json"))) == 5, "one a method"
    capsys.readouterr()
    assert main(["compare", "runs/demo", "--markdown"]) == 0
    printed = rows(capsys.readouterr().out, "| method |")
    shown = rows(README.read_text(encoding="utf-8"), "| Demo: ")
    assert list(shown) == list(printed)
    for method, cells in shown.items():
        for name, cell in cells.items():
            ours, theirs = float(cell.split(" ")[0]), float(printed[method][name].split(" ")[0])
            # Other processors round differently, which decides more where seeds differ more.
            spread = float(cell.rpartition("±")[2])
            assert theirs == pytest.approx(ours, abs=max(2, spread)), (method, name)
