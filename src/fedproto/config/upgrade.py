"""Configurations of earlier versions, read as the sections of today.

Until version 0.1 options that combine with every strategy belonged to strategies: sampling, partial
work, the head by class, the served model; and ``guided`` and ``protohead`` were strategies of their
own. Run directories of that version stay readable through `upgraded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MARKS = ("tolerate_partial_work", "sampling")
"""Options that every strategy had, and none has today."""

_REMOVED = (
    *("balance", "rehearsal", "rehearsed", "head_others", "head_weights", "sharpness"),
    *("max_attention", "head", "flip", "serve", "forget", "fade", "momentum"),
)
"""Options of strategies that are sections today, or are gone; records of their runs remain."""

_GONE = {
    "data": ("blocks",),
    "store": ("exact",),
    "measure": ("estimator", "clients"),
    "aggregate": ("krum", "trim"),
    "head": ("flip",),
    "serve": ("statistics",),
    "train": ("accumulate",),
    "engine": ("max_stack",),
    "augment": ("crop",),
    "flower": ("too_few", "suspend_window", "max_examples", "max_claim"),
}
"""Options of sections that are gone, and had no effect on the results of runs that are kept."""


def upgraded(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration as tables that `fedproto.config.read_config` reads."""
    result = {name: _without_gone(name, one) for name, one in tables.items()}
    if result.get("task") == {"background_prototype": False}:  # true is another method's run
        del result["task"]
    strategy = result.get("strategy")
    if not isinstance(strategy, Mapping) or not any(mark in strategy for mark in MARKS):
        return result
    old = dict(strategy)
    result["label"] = result.get("label") or old.get("name", "")
    schedule = dict(result.get("schedule", {}))
    schedule["sampling"] = old.pop("sampling", "size")
    schedule["partial_work"] = old.pop("tolerate_partial_work", False)
    if old.get("head") == "by-class":
        counts = old.get("head_weights") == "counts"
        result["head"] = {"rows": "counts" if counts else "holders"}
    if old.get("serve", "trained") != "trained":
        result["serve"] = {
            "head": "lda",
            "add": old["serve"] == "both",
            "forget": old.get("forget", 0.3),
            "fade": old.get("fade", 0.0),
        }
    if old.get("name") in ("guided", "protohead"):
        old["name"] = "fedavg"
        if old.get("momentum", 0.9):
            result["server"] = {"optimizer": "sgd", "momentum": old.get("momentum", 0.9)}
    if old.get("weights") in ("balanced", "margins"):
        del old["weights"]
    kept = {name: value for name, value in old.items() if name not in _REMOVED}
    return {**result, "strategy": kept, "schedule": schedule}


def _without_gone(section: str, options: Any) -> Any:
    """A section without the options that are gone."""
    if not isinstance(options, Mapping):
        return options
    gone = ("norm",) if options.get("norm") == "frobenius" else _GONE.get(section, ())
    kept = {name: value for name, value in options.items() if name not in gone}
    if section == "measure" and isinstance(kept.get("what"), list):
        kept["what"] = [name for name in kept["what"] if name != "ece"]
    return kept
