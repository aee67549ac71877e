"""What the documents show is what works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

import fedproto
from documents import ROOT, blocks
from fedproto import equations
from fedproto.config import SECTIONS
from fedproto.options import describe

GUIDE = ROOT / "docs/how-to/write-a-strategy.md"


def test_the_readmes_library_example_runs(tmp_path):
    (example,) = blocks(ROOT / "README.md", "python")
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    head, _, *rows = result.stdout.splitlines()
    assert head.split()[:3] == ["method", "accuracy", "%"]
    assert [row.split()[0] for row in rows] == ["FedAvg", "FedProto"]
    assert (tmp_path / "report.html").stat().st_size > 10_000
    lines = [line for line in example.splitlines() if line]
    assert len(lines) <= 12, "from import to report"


def test_the_extension_example_runs_as_a_plugin(tmp_path):
    code, recipe = "\n\n".join(blocks(GUIDE, "python")), tmp_path / "own.toml"
    (tmp_path / "own.py").write_text(
        code + "\n\nfrom fedproto.report.results import find_runs\n"
        "def spread(path):\n    return attention_spread(find_runs([Path(path)])[0])\n"
    )
    recipe.write_text(blocks(GUIDE, "toml")[0])
    commands = ("run own.toml --out=run --quiet", "list strategies", "compare run")
    program = "from fedproto.cli import main\n" + "".join(
        f"assert main('--plugin=own.py {command}'.split()) == 0\n" for command in commands
    )
    spread = "import own; print(); print(*own.spread('run'))"
    result = subprocess.run(
        [sys.executable, "-c", program + spread], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    *shown, last = result.stdout.splitlines()
    assert "loss-weighted" in "".join(shown)
    assert any("accuracy %" in line for line in shown)
    assert len(last.split()) == 10


def test_an_extension_passes_the_conformance_suite(tmp_path):
    code = "\n\n".join(blocks(GUIDE, "python"))
    for name in ("conftest.py", "helpers.py", "test_strategy_contract.py"):
        (source,) = (ROOT / "tests").rglob(name)
        (tmp_path / name).write_text(source.read_text())
    (tmp_path / "own.py").write_text(code)
    helpers = tmp_path / "helpers.py"
    helpers.write_text(
        helpers.read_text().replace("import torch\n", "import torch\nimport own\n", 1)
    )
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-k",
            "loss-weighted",
            "-p",
            "no:cacheprovider",
            ".",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout


def test_the_generated_reference_names_everything():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/tools/reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    # Before the page of commands imports the paper's.
    strategies, data = fedproto.STRATEGIES.names(), fedproto.DATASETS.names()
    made = {page: make() for page, make in reference.PAGES.items()}
    for name in strategies:
        assert f"\n## {name}\n" in made["reference/strategies.md"]
    scaffold = (
        "| [`scaffold`](#scaffold) | SCAFFOLD (Karimireddy et al. 2020) | control (broadcast)"
    )
    assert scaffold in made["reference/strategies.md"]
    for command in ("run", "flower up", "data fetch"):
        assert f"\n## {command}\n" in f"\n{made['reference/command-line.md']}"
    for section in SECTIONS:
        assert f"[`{section}`](options/{section}.md)" in made["reference/options.md"]
        for option in describe(SECTIONS[section]):
            assert f"\n| `{option.name}` |" in reference.option_pages()[section]
    licences = made["reference/data.md"]
    named = [name for name in data if fedproto.DATASETS.get(name).licence]
    assert [row.split("`")[1] for row in licences.splitlines()[2:]] == named
    for page in reference.PAGES:
        assert (ROOT / "docs" / page).is_file()


def test_the_paper_map_names_functions_and_tests_that_exist():
    text = (ROOT / "docs/appendix/paper-map.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text)) - {"test_equations", "test_equations_properties"}
    assert named
    for name in named:
        assert f"def {name}(" in tests, name
    public = {
        name
        for name, value in vars(equations).items()
        if callable(value) and getattr(value, "__module__", "") == equations.__name__
    }
    assert public <= set(re.findall(r"`(\w+)`", text))


def test_a_comparison_for_a_paper_takes_fifteen_lines(tmp_path):
    """As the page has it, but on digits and for two rounds."""
    (example,) = blocks(ROOT / "docs/how-to/paper-figures.md", "python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    small = example.replace('"mnist", "clients": 50', '"digits", "clients": 12').replace(
        "rounds=100, cohort=10", "rounds=2, cohort=4"
    )
    result = subprocess.run(
        [sys.executable, "-c", small], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    table = (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert table.count("\\\\\n") == 6
    assert "fedacg" in table
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("page", ["own-model", "own-arrays", "resume", "export"])
def test_the_code_of_the_guides_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n\n".join(blocks(ROOT / f"docs/how-to/{page}.md", "python"))
    exec(compile(code, page, "exec"), {"__name__": page})
