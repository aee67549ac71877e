"""`fedproto reproduce`: a command of the package `paper`, which a checkout has beside `src`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from fedproto.errors import ConfigError

_CHECKOUT = Path(__file__).resolve().parents[3]


def reproduce() -> None:
    """Reproduce tables and figures of the paper, from a checkout of the repository."""
    raise ConfigError(
        "fedproto reproduce runs from a checkout of the repository: clone it, install it with"
        " pip install -e '.[paper]' in its folder, and try again"
    )


SETTINGS: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
"""How its arguments are read; without the package `paper` they are not."""

if "paper" in sys.modules or (_CHECKOUT / "paper/command.py").is_file():
    sys.path.insert(0, str(_CHECKOUT))
    reproduce = importlib.import_module("paper.command").reproduce
    SETTINGS = {}
