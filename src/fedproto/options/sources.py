"""What the package holds, read from its sources: names and summaries without any import.

To import a strategy or an engine is to import PyTorch, which takes seconds; its name and its first
sentence are in the text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fedproto.options import Description

_FOLDERS = {"datasets": "data", "sinks": "store/sinks"}
_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")


def bundled_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for folder in _RECIPES for path in sorted(folder.glob("*.toml"))}


def recipe_summary(path: Path) -> str:
    """The first comment line of a recipe: what it is for."""
    first = path.read_text(encoding="utf-8").splitlines()[:1]
    return first[0].lstrip("# ").strip() if first and first[0].startswith("#") else ""


@dataclass(frozen=True)
class Entry:
    """Something that has a name, a summary and perhaps options."""

    name: str
    summary: str
    options: list[Description] = field(default_factory=list)


def summaries(kind: str) -> list[Entry]:
    """Names and summaries of a kind of things, which need no import."""
    if kind == "recipes":
        found = {name: recipe_summary(path) for name, path in bundled_recipes().items()}
    else:
        found = registered(_PACKAGE / _FOLDERS.get(kind, kind))
    if kind == "engines":
        found = {"auto": "The one that suits the device and the work.", **found}
    return [Entry(name, text) for name, text in found.items()]


def docstring(module: str, function: str = "") -> str:
    """The docstring of a module, or of a function in it."""
    tree = _tree(_path(module))
    if not function:
        return ast.get_docstring(tree) or ""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.get_docstring(node) or ""
    return ""


def registered(folder: Path) -> dict[str, str]:
    """The first sentence of every class in a folder's modules that registers itself, by name."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ClassDef):
                summary = (ast.get_docstring(node) or "").split("\n")[0]
                found |= dict.fromkeys(_names(node), summary)
    return dict(sorted(found.items()))


def _names(node: ast.ClassDef) -> Iterator[str]:
    """The names under which a class registers."""
    for one in node.decorator_list:
        if (
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Attribute)
            and one.func.attr == "register"
            and isinstance(one.args[0], ast.Constant)
        ):
            yield str(one.args[0].value)


def _path(module: str) -> Path:
    found = find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(module)
    return Path(found.origin)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
