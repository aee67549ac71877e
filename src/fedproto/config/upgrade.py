"""Configurations of earlier versions, read as the sections of today.

Until version 0.1 options that combine with every strategy belonged to strategies: sampling, partial
work, the head by class, the served model; and ``guided`` and ``protohead`` were strategies of their
own. Run directories of that version stay readable through `upgraded`; what a run did that no option
of today says is named by `options_without_successor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MARKS = ("tolerate_partial_work", "sampling")
"""Options that every strategy had, and none has today."""

_REMOVED = (
    *("balance", "rehearsal", "rehearsed", "head_others", "head_weights", "sharpness"),
    *("max_attention", "head", "flip", "serve", "forget", "fade", "momentum"),
)
"""Options of strategies that are sections today, or are gone; records of their runs remain."""


def upgraded(tables: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration as tables that `fedproto.config.read_config` reads."""
    result, strategy = dict(tables), tables.get("strategy")
    if isinstance(kept := result.get("store"), Mapping):  # an option that changed no result is gone
        result["store"] = {name: value for name, value in kept.items() if name != "exact"}
    if isinstance(kept := result.get("measure"), Mapping):
        result["measure"] = {name: value for name, value in kept.items() if name != "estimator"}
    if isinstance(kept := result.get("aggregate"), Mapping):
        result["aggregate"] = {name: value for name, value in kept.items() if name != "krum"}
    if not isinstance(strategy, Mapping) or not any(mark in strategy for mark in _MARKS):
        return result
    old = dict(strategy)
    result["label"] = result.get("label") or old.get("name", "")
    schedule = dict(result.get("schedule", {}))
    schedule["sampling"] = old.pop("sampling", "size")
    schedule["partial_work"] = old.pop("tolerate_partial_work", False)
    if old.get("head") == "by-class":
        counts = old.get("head_weights") == "counts"
        rows = {"rows": "counts" if counts else "holders"}
        result["head"] = {**rows, **({"flip": old["flip"]} if old.get("flip") else {})}
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


def options_without_successor(tables: Mapping[str, Any]) -> list[str]:
    """Options of a stored strategy that changed its results, and that `upgraded` has to leave out.

    Such a run can be shown and compared, but is not a run of the configuration it is read as.
    """
    old = tables.get("strategy")
    if not isinstance(old, Mapping) or not any(mark in old for mark in _MARKS):
        return []
    by_class = old.get("head") == "by-class"
    took_effect = {
        "weights": old.get("weights") == "balanced",
        "rehearsal": old.get("rehearsal", 0) != 0,
        "head_others": by_class and old.get("head_others", 0) != 0,
        "head_weights": by_class and old.get("head_weights") == "margins",
        "sharpness": old.get("sharpness") is not None,
        "max_attention": old.get("max_attention") is not None,
    }
    return [name for name, took in took_effect.items() if took]
