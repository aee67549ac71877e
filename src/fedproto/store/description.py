"""``run.json``: what a run is, sealed with a fingerprint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedproto.disk.files import content, is_there
from fedproto.disk.integrity import DamagedError, unsealed
from fedproto.errors import StoreError

FORMAT = 2
"""Format 1 had no fingerprints; such directories are read and continued, with fingerprints."""

CREATION_ENDS_WITHIN = 5.0
"""Seconds to wait for another process that is creating the same directory."""

_READABLE = (1, FORMAT)


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return is_there(path / "run.json")


def read_description(path: Path) -> dict[str, Any]:
    """What ``run.json`` says."""
    file = path / "run.json"
    if not is_there(file):
        raise StoreError(f"{path} is no run directory: it has no run.json")
    try:
        description, marked = unsealed(content(file))
        version = description.get("format")
        if version != 1 and version in _READABLE and not marked:
            raise DamagedError("its fingerprint is missing")
    except DamagedError as error:
        raise StoreError(
            f"{file} is damaged: {error}; restore it from a copy, or start a new run"
        ) from None
    if version not in _READABLE:
        raise StoreError(f"{file} is of format {version}; this version reads format {FORMAT}")
    return description


def plugin_hint(description: dict[str, Any]) -> str:
    """What to do about names that are not known here."""
    try:
        plugins = [str(plugin) for plugin in description["environment"]["plugins"]]
    except (KeyError, TypeError):
        plugins = []
    if not plugins:
        return "if a plugin or a program of yours added it, name that: --plugin FILE"
    return f"the run was made with {' '.join(f'--plugin {plugin}' for plugin in plugins)}"
