"""The HTML page: one file with styles, scripts and data inside, that needs nothing from elsewhere.

The parts lie in ``page/``: plain HTML, CSS and JavaScript.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedproto.disk.files import explained, write_atomically
from fedproto.errors import StoreError
from fedproto.report.content import page_content
from fedproto.report.following import Followers
from fedproto.report.spread import DataPanels

_SCRIPTS = (
    "base.js",
    "state.js",
    "charts.js",
    "pointing.js",
    "panels.js",
    "saving.js",
    "answer.js",
    "curves.js",
    "clients.js",
    "cost.js",
    "attention.js",
    "data.js",
    "analysis.js",
    "configuration.js",
    "main.js",
)


def render(content: Mapping[str, Any], title: str, *, live: bool = False) -> str:
    """The page as text."""
    parts = {
        "title": escape(title),
        "connect": "'self'" if live else "'none'",
        "style": _asset("page.css"),
        "script": "\n".join(_asset(name) for name in _SCRIPTS),
        "data": to_script_json({**content, "title": title, "live": live}),
    }
    # One pass, so that what looks like a placeholder inside the data stays text.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def to_script_json(content: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element, whatever the labels say."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # elsewhere than in texts JSON has none of them
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return (files("fedproto.report") / "page" / name).read_text(encoding="utf-8")


def write_page(
    directories: Sequence[Path],
    file: Path,
    *,
    title: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    panels: DataPanels | None = None,
) -> list[str]:
    """Writes one self-contained page about runs; what had to be left out, and why."""
    runs, unread = Followers(directories).update(forgiving=True)
    if unread and not runs:
        raise StoreError(unread[0])
    if not runs:
        folders = ", ".join(str(path) for path in directories)
        raise StoreError(f"{folders} holds no run: no run.json in it or below")
    content = page_content(runs, metric=metric, target=target, panels=panels, problems=unread)
    page = render(content, title or ", ".join(path.resolve().name for path in directories))
    with explained(file, " cannot be written", "; choose another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, page.encode())
    return list(content["problems"])
