"""Published results: what lies in the tree is what was published, and no more than that."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from archives import ARCHIVES
from documents import ROOT
from paper import pages
from paper.output import Output

ROOM = 15_000_000
"""Bytes; every refresh of an archive stays in everybody's clone for good."""


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


@pytest.mark.parametrize("folder", pages.ARCHIVES)
def test_archives_give_the_tables_beside_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Output, "figure", lambda *_: None)
    compared = set()
    for published, made in pages.tables(folder, tmp_path):
        compared.add(published)
        if published.suffix == ".csv":
            for ours, expected in zip(rows(made), rows(published), strict=True):
                assert ours == pytest.approx(expected), published.stem
        elif published.suffix == ".md":
            assert made.read_text() == published.read_text()
    beside = set((ROOT / "results" / folder).iterdir())
    assert {path for path in beside if path.suffix in (".csv", ".md")} <= compared


MEASURED_ELSEWHERE = {
    "README.md": ("Demo: 3 seeds",),
    "docs/appendix/paper-map.md": ("Open", "The source", "clients | samples"),
    "docs/appendix/segmentation.md": ("images a second", "recipe"),
    "docs/evidence/performance.md": ("",),
    "docs/appendix/hostile-clients.md": ("the hostile client sends", "no attack"),
}
"""Heads of tables with figures of benchmarks and counts, whose sources their pages name."""


def test_every_table_of_scores_in_the_docs_is_made_from_the_archives(tmp_path):
    """A table with four decimal fractions or more is made by `make tables`, or listed above."""
    for page, text in pages.pages(tmp_path).items():
        assert text == (ROOT / page).read_text(encoding="utf-8"), f"{page}: run make tables"
    made = {(table.page, pages.row(table.make(tmp_path)[0])) for table in pages.PAGE_TABLES}
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        page = file.relative_to(ROOT).as_posix()
        if page.startswith("docs/reference/"):  # defaults and facts
            continue
        for head, body in tables_in(file.read_text(encoding="utf-8")):
            measured = re.findall(r"(?<![\w.`/=-])[+−]?\d+\.\d+(?![\w.`])", body)
            listed = any(known in head for known in MEASURED_ELSEWHERE.get(page, ()))
            assert len(measured) < 4 or listed or (page, head) in made, f"{page}: {head}"


def tables_in(text: str) -> Iterator[tuple[str, str]]:
    """The first line and the others of each table in Markdown."""
    for block in re.findall(r"(?:^[ ]*\|.*\n?)+", text, re.MULTILINE):
        head, *body = (line.strip() for line in block.splitlines())
        yield head, "\n".join(body)


def test_sentences_with_scores_say_what_the_tables_say():
    """README and the page on the paper, as they would be written from the tables."""
    accuracy = pages.published("sources/accuracy").set_index(["quantity", "data_set", "row"])
    mnist = accuracy.loc["test accuracy (%)"].loc["MNIST"]
    claims = pages.published("sources/claims").set_index(["claim", "data_set"])["difference"]
    claim = "Attention improves on equal weights that tolerate partial work"
    added = [
        pages.number(claims[claim, one], sign=True) for one in ("Synthetic", "MNIST", "FEMNIST")
    ]
    ours, paper = (pages.number(mnist.loc["FedProto", side]) for side in ("ours", "paper"))
    readme, page = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", pages.EVIDENCE)
    )
    assert f"FedProto reaches {ours} % where the paper has {paper} %" in readme
    assert (
        f"{added[0]} points on synthetic data, {added[1]} on MNIST, {added[2]} on FEMNIST" in readme
    )
    assert f"FedProto reaches {ours} % where the paper has {paper} %" in page
    assert f"{added[0]} points on synthetic data, {added[1]} and {added[2]} on MNIST" in page
    ablation = pages.published("sources/ablation")
    means = ablation[
        (ablation["quantity"].str.contains("mean")) & (ablation["data_set"] == "MNIST")
    ]
    assert f"within {means['difference'].abs().mean():.1f} points on average" in page
    rho = pages.published("sources/margins-correlation").set_index("row").loc["ours"]
    assert f"ρ = {rho['rho']:.2f}, {rho['points']:.0f} points" in page
