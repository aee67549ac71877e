"""The HTML page about runs, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedproto.disk.files import explained, write_atomically
from fedproto.errors import StoreError
from fedproto.report.content import page_content
from fedproto.report.following import Followers
from fedproto.report.html import render
from fedproto.report.spread import DataPanels


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
