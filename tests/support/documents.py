"""Reading the project's documents: code blocks, links, headings."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "results/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of a document in these languages; "" for those without one."""
    found = _FENCE.finditer(path.read_text())
    return [block["code"] for block in found if block["language"] in languages]


def prose(path: Path) -> str:
    """A document without its fenced blocks."""
    return _FENCE.sub("", path.read_text())


def commands(path: Path) -> list[list[str]]:
    """The shell commands of a document, each with the lines of output shown below it.

    In a console block a command follows a prompt; elsewhere every line is one. A backslash at the
    end goes on in the next line.
    """
    found = []
    for block in blocks(path, "console"):
        parts = re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]
        found += [part.splitlines() for part in parts]
    for block in blocks(path, "sh", "bash", ""):
        found += [[line] for line in block.replace("\\\n", " ").splitlines()]
    return found


def anchors(path: Path) -> set[str]:
    """The anchors that code hosts give a document's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*?) *$", prose(path), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{count}" if count else slug)
    return found
