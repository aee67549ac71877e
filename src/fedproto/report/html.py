"""The HTML page: one file with styles, scripts and data inside, that needs nothing from elsewhere.

The parts lie in ``page/``: plain HTML, CSS and JavaScript.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

_SCRIPTS = (
    "base.js",
    "state.js",
    "charts.js",
    "pointing.js",
    "panels.js",
    "saving.js",
    "heat.js",
    "verdict.js",
    "summary.js",
    "curves.js",
    "attention.js",
    "clients.js",
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
