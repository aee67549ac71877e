"""The files around the code are sound and say the same as it does."""

from __future__ import annotations

import os
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import yaml

import fedproto
from documents import ROOT


def test_the_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/fedproto/version.py"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == fedproto.__version__
    assert f"version = {{{fedproto.__version__}}}" in (ROOT / "README.md").read_text()
    assert f"## {fedproto.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()


def test_workflows_test_every_python_that_is_promised():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = {
        text.rpartition(" ")[2]
        for text in project["classifiers"]
        if re.fullmatch(r".*:: 3\.\d+", text)
    }
    tests = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    assert set(tests["jobs"]["test"]["strategy"]["matrix"]["python"]) == promised
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                    assert target in targets
                for file in re.findall(r"\b(tests/\S+\.py)", step.get("run", "")):
                    assert (ROOT / file).exists()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.node"])
def test_images_are_built_from_what_is_there(name):
    text = re.sub(r"\\\n", " ", (ROOT / "docker" / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "VOLUME", "ENTRYPOINT", "CMD"}
    assert {line.split()[0] for line in lines} <= known
    assert lines[0].startswith("FROM python:3.")
    copied = {source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]}
    assert all((ROOT / source).exists() for source in copied)
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel, project = about["tool"]["hatch"]["build"]["targets"]["wheel"], about["project"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    needed |= {path.split("/")[0] for path in (*wheel["packages"], *wheel["force-include"])}
    assert needed <= copied
    (asked,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(asked.split(",")) <= project["optional-dependencies"].keys()
    installs = [line for line in lines if "pip install" in line]
    assert all("-c constraints.txt" in line for line in installs)
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users, "nothing runs as root"
    assert "root" not in users


OF_ONE_MACHINE = re.compile(
    r"(?<![\w.-])/(work|root|farm|opt)/|index-url|find-links|trusted-host|whl/cpu"
)
"""Folders of one machine, and the package indexes that it installs from."""


def test_no_file_names_a_folder_of_one_machine_or_a_package_index():
    found = {}
    folders = (".ci", ".github", "benchmarks", "docker", "docs", "paper", "recipes", "src", "tests")
    paths = [path for name in folders for path in (ROOT / name).rglob("*")]
    for path in [*paths, *ROOT.glob("[!.]*.*"), ROOT / "Makefile"]:
        if path.is_file() and path.suffix not in {".png", ".pyc"} and path != Path(__file__):
            text = path.read_text(encoding="utf-8", errors="replace")
            if match := OF_ONE_MACHINE.search(text):
                found[str(path.relative_to(ROOT))] = match[0]
    assert found == {}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.name
)
def test_benchmarks_find_what_they_measure(path, monkeypatch):
    """They are run by hand, and nothing else would notice a name that moved."""
    monkeypatch.syspath_prepend(path.parent)
    runpy.run_path(str(path))


def test_nothing_reads_or_writes_a_users_own_caches():
    assert os.environ["XDG_CACHE_HOME"]
    assert os.environ["MPLCONFIGDIR"]
