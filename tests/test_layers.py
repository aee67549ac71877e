"""The rooms of the house and which may know which: imports only point downwards."""

from __future__ import annotations

import ast
from pathlib import Path

import fedproto

SOURCE = Path(fedproto.__file__).parent

LAYERS = (
    {"errors", "version"},
    {"callback", "options", "types"},
    {"equations", "rng", "disk"},
    {"data", "strategies"},
    {"models"},
    {"engines"},
    {"measures"},
    {"config"},
    {"store"},
    {"rounds"},
    {"flower"},
    {"report"},
    {"api"},
    {"", "cli"},
    {"__main__"},
)
"""From the ground up: what stands in a layer imports from the layers before it, and itself."""


def modules() -> dict[str, Path]:
    """All modules by their dotted names below the package; the package itself is ``""``."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """What a module imports of the package, inside of functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            inside = {name for name in full.values() if name.removeprefix("fedproto.") in known}
            found |= inside or {node.module}
    ours = {name for name in found if name.partition(".")[0] == "fedproto"}
    return {name.removeprefix("fedproto").removeprefix(".") for name in ours}


def edges() -> set[tuple[str, str]]:
    """Which package or module at the top of the source imports from which other."""
    known = modules()
    return {
        (own, other)
        for name, path in known.items()
        for target in imports(path, known)
        if (own := name.partition(".")[0]) != (other := target.partition(".")[0])
        # A callback is handed what layers above it make; it names their types alone.
        and own != "callback"
    }


def test_imports_point_downwards():
    height = {name: place for place, layer in enumerate(LAYERS) for name in layer}
    assert {name.partition(".")[0] for name in modules()} == set(height)
    assert [(own, other) for own, other in sorted(edges()) if height[own] <= height[other]] == []


def test_nothing_installed_imports_the_reproduction():
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [one for one in names if (one or "").partition(".")[0] == "paper"], name


def test_a_configuration_knows_neither_flower_nor_analysis():
    assert not {("config", "flower"), ("config", "analysis")} & edges()


TESTS = Path(__file__).parent


def test_tests_stand_in_the_rooms_they_are_about():
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("test_*.py"))}
    assert folders - {"docs", "paper"} <= set().union(*LAYERS)


def test_no_test_imports_another():
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [name]
            assert not any(each.startswith("test_") for each in names), path


def test_engines_know_models_by_their_descriptions_and_not_each_other():
    known = modules()
    engines = {name: path for name, path in known.items() if name.startswith("engines")}
    for name, path in engines.items():
        found = imports(path, known)
        models = {one for one in found if one.startswith("models.")}
        assert models <= {"models.adapter", "models.base", "models.layers"}, name
        if name in ("engines.processes", "engines.pool", "engines.manual"):
            assert not {one for one in found if one.startswith("engines.stacking")}, name
