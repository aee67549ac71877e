"""Counts the words of README and docs, page by page, against a budget.

python docs/tools/budget.py

Words are what stands between spaces, tables and code included. What the site generates is not
counted: it is not in these files. Notebooks count their text, not their code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOTAL = 21_200
"""Words of all pages but the appendices together."""
USUAL = {
    "tutorials": 750,
    "how-to": 550,
    "explanation": 600,
    "reference": 800,
    "evidence": 700,
    "appendix": 2_000,
}
"""Words of a page in a folder, unless it has a budget of its own."""
OWN = {
    "README.md": 700,
    "docs/index.md": 450,
    "docs/how-to/deploy-hosts.md": 900,
    "docs/how-to/write-a-strategy.md": 1_000,
    "docs/explanation/architecture.md": 1_000,
    "docs/explanation/threat-model.md": 1_700,
    "docs/appendix/reproduction.md": 2_500,
    "docs/reference/data.md": 1_200,
    "docs/evidence/reproduction.md": 1_600,
    "docs/how-to/reproduce-paper.md": 650,
    "docs/evidence/performance.md": 850,
    "docs/evidence/what-wins.md": 900,
}
"""Words of pages that need more, or less."""


def words(page: Path) -> int:
    """The number of words of a page, or of a notebook's text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
    return len(text.split())


def counts() -> dict[str, tuple[int, int]]:
    """Words and budget of every page, by its path in the repository."""
    docs = ROOT / "docs"
    pages = [ROOT / "README.md", *sorted(docs.rglob("*.md")), *sorted(docs.rglob("*.ipynb"))]
    found = {}
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        found[name] = (words(page), OWN.get(name) or USUAL[page.parent.name])
    return found


def main() -> int:
    """Prints the counts; 1 if a page or the whole is too long."""
    found = counts()
    for name, (number, budget) in found.items():
        mark = "  TOO LONG" if number > budget else ""
        sys.stdout.write(f"{number:6,} of {budget:6,}  {name}{mark}\n")
    total = sum(number for name, (number, _) in found.items() if "/appendix/" not in name)
    sys.stdout.write(f"{total:6,} of {TOTAL:6,}  all pages but the appendices\n")
    return int(total > TOTAL or any(number > budget for number, budget in found.values()))


if __name__ == "__main__":
    sys.exit(main())
