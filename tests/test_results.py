"""Published results: what lies in the tree is what was published, and no more than that."""

from __future__ import annotations

import csv
import hashlib
import json
import shlex
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest

from archives import ARCHIVES, unpacked
from documents import ROOT
from fedproto.cli import main
from paper.experiments.claims import as_markdown
from paper.output import Output

ROOM = 15_000_000
"""Bytes; every refresh of an archive stays in everybody's clone for good."""
SOURCES = ("synthetic-sources", "mnist-sources", "femnist-sources")
TABLES = {
    "sources": (*SOURCES, "celeba-sources", "segmentation"),
    "guidance": (
        *SOURCES,
        "guidance",
        "guidance-field",
        "guidance-field-mnist",
        "guidance-field-femnist",
        "guidance-more",
        "guidance-served",
        "guidance-celeba",
        "guidance-protohead",
        "guidance-fpascal",
        "guidance-fpascal-more",
    ),
}
"""Folders of tables, and the archives that they come from."""


def test_archives_are_those_that_were_published():
    published = json.loads((ARCHIVES / "published.json").read_text())
    there = sorted(ARCHIVES.glob("*.tar.*"))
    assert there
    for path in there:
        assert published[path.name][-1]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_archives_do_not_grow_the_history():
    assert sum(path.stat().st_size for path in ARCHIVES.iterdir()) < ROOM


def rows(path: Path) -> list[dict[str, str | float]]:
    """A table, its numbers as such; without what comes from no run but from the data's files."""

    def read(cell: str) -> str | float:
        try:
            return float(cell)
        except ValueError:
            return cell

    with path.open(newline="", encoding="utf-8") as file:
        table = [{name: read(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    return [row for row in table if row.get("runs") != 0]


@pytest.mark.parametrize("folder", TABLES)
def test_archives_give_the_tables_beside_them(folder, tmp_path, monkeypatch):
    unpacked(tmp_path / "runs/reproduce", *TABLES[folder])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Output, "figure", lambda *_: None)
    tables = sorted((ROOT / "results" / folder).glob("*.csv"))
    by_command = defaultdict(dict)
    for path in (ROOT / "results" / folder).glob("*.json"):
        origin = json.loads(path.read_text())
        renamed = {name: name.replace(origin["experiment"], path.stem) for name in origin["files"]}
        known = {path.with_name(name): made for made, name in renamed.items()}
        by_command[origin["command"]] |= {table: known[table] for table in tables if table in known}
    assert sorted(path for known in by_command.values() for path in known) == tables
    for number, (command, known) in enumerate(by_command.items()):
        assert main([*shlex.split(command)[1:], f"--out=made{number}"]) == 0
        for published, name in known.items():
            (made,) = Path(f"made{number}").rglob(name)
            for ours, expected in zip(rows(made), rows(published), strict=True):
                assert ours == pytest.approx(expected), published.stem


def test_the_page_shows_the_claims_as_published():
    published = ROOT / "results/sources/claims"
    made = as_markdown(pd.read_csv(published.with_suffix(".csv")))
    assert made == published.with_suffix(".md").read_text(encoding="utf-8")
    assert made in (ROOT / "docs/evidence/reproduction.md").read_text(encoding="utf-8")


def test_the_page_on_heads_shows_the_published_scores():
    """A line per data set and share of stragglers: at the end / over all rounds."""
    table = pd.read_csv(ROOT / "results/guidance/guidance.csv")
    page = (ROOT / "docs/evidence/what-wins.md").read_text(encoding="utf-8")
    methods = ("ProtoHead", "Guided", "FedAvgM", "FedAdam", "Fairness + toleration")
    groups = table[table["runs"] == 5].groupby(["data_set", "delta"], sort=False)
    assert len(groups) == 6
    for (data_set, delta), group in groups:
        rows = group.set_index("method")[["score", "mean_over_rounds"]]
        cells = [" / ".join(f"{value:.1f}" for value in rows.loc[name]) for name in methods]
        assert f"| {data_set} | {delta:g} | {' | '.join(cells)} |\n" in page


def test_the_page_on_heads_shows_the_published_differences():
    table = pd.read_csv(ROOT / "results/guidance/guidance-pairs.csv")
    page = (ROOT / "docs/evidence/what-wins.md").read_text(encoding="utf-8")
    table = table[(table["minus"] == "ProtoHead") & (table["pairs"] == 5)]
    for (data_set, delta), group in table.groupby(["data_set", "delta"], sort=False):
        rows = group.set_index(["method", "quantity"])

        def cell(method: str, quantity: str, rows: pd.DataFrame = rows) -> str:
            found = -rows.loc[(method, quantity), ["difference", "high", "low"]]
            return "{:+.1f} [{:+.1f}, {:+.1f}]".format(*found).replace("-", "−")

        cells = [
            cell(method, quantity)
            for method in ("Fairness + toleration", "FedAvgM")
            for quantity in ("final", "mean over rounds")
        ]
        assert f"| {data_set} | {delta:g} | {' | '.join(cells)} |\n" in page
