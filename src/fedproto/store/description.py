"""``run.json``: what a run is, sealed with a fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedproto.disk.files import content, is_there
from fedproto.disk.integrity import DamagedError, unsealed
from fedproto.errors import StoreError

FORMAT = 3
"""Format 1 had no fingerprints, runs up to format 2 drew from other random streams: such
directories are read, but not continued."""

CREATION_ENDS_WITHIN = 5.0
"""Seconds to wait for another process that is creating the same directory."""

_READABLE = (1, 2, FORMAT)


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "config": lambda value: isinstance(value, dict),
    "environment": lambda value: isinstance(value, dict),
    "identity": lambda value: isinstance(value, dict),
    "data": lambda value: isinstance(value, dict),
    "engines": lambda value: _are(value, dict),
    "earlier": lambda value: _are(value, str),
}
"""What is written by name, and of which kind it is."""


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return is_there(path / "run.json")


def read_description(path: Path) -> dict[str, Any]:
    """What ``run.json`` says."""
    file = path / "run.json"
    if not is_there(file):
        if not path.exists():
            raise StoreError(f"{path} does not exist")
        inside = sorted(str(found.parent) for found in path.glob("*/run.json"))
        if inside:
            more = f" and {len(inside) - 3} more" if len(inside) > 3 else ""
            raise StoreError(
                f"{path} is not a run but holds several; name one: {', '.join(inside[:3])}{more}"
            )
        raise StoreError(f"{path} is not a run directory: it has no run.json")
    try:
        description, marked = unsealed(content(file))
        version = description.get("format")
        if version != 1 and version in _READABLE and not marked:
            raise DamagedError("its fingerprint is missing")
        for name, fits in _KINDS.items():
            if name in description and not fits(description[name]):
                raise DamagedError(f"its {name} is of the wrong kind")
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
