"""Recipes: TOML files that describe a run, or a sweep of runs.

A recipe has the sections of `fedproto.config`. Two more make it a sweep: every ``[[variants]]``
table overrides parts of it under a label, and ``[sweep]`` lists values for dotted option names. The
runs are all variants with all combinations of the listed values.

``extends = "mnist"`` starts from another recipe, of which only what differs is written; its
variants and its sweep are taken over or replaced as a whole. ``variants = "methods-digits"`` takes
those of another recipe. A table such as ``[scales.quick]`` holds what differs in a smaller version
of the recipe, which is chosen by its name.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedproto.config.run import RunConfig, flatten, read_config
from fedproto.errors import ConfigError, unknown_name
from fedproto.options.sources import bundled_recipes

_LONGEST_NAME = 150
"""Bytes of a folder's name; file systems allow 255, and files in it have names too."""


def read_recipe(
    source: str, overrides: Iterable[str] = (), scale: str | None = None
) -> dict[str, RunConfig]:
    """Reads a recipe and expands it into runs.

    Args:
        source: A file, or the name of a bundled recipe.
        overrides: ``key=value`` texts that change single options.
        scale: Name of one of the recipe's scales; as the recipe stands by default.

    Returns:
        The configurations by directory name, in the recipe's order.

    Raises:
        ConfigError: If the file cannot be read or says something impossible.
    """
    path = _find(source)
    recipe = _load(path)
    try:
        return expand(apply_overrides(_scaled(recipe, scale), overrides))
    except ConfigError as error:
        raise ConfigError(f"recipe {path.name}: {error}") from None


def _scaled(recipe: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """The recipe without its scales, with the changes of one of them."""
    scales = recipe.pop("scales", {})
    if not isinstance(scales, Mapping) or not all(
        isinstance(one, Mapping) for one in scales.values()
    ):
        raise ConfigError("scales must be sections: write [scales.quick] and the like")
    if scale is None:
        return recipe
    if scale not in scales:
        raise ConfigError(f"--scale: {unknown_name('scale', scale, scales)}")
    if "sweep" in scales[scale]:
        recipe.pop("sweep", None)
    return _merge(recipe, scales[scale])


def _load(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's tables, with those of the recipe that it extends."""
    if path in above:
        chain = " → ".join(one.name for one in (*above, path))
        raise ConfigError(f"recipe {path.name} extends itself: {chain}")
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"recipe {path} cannot be read: {error}") from None

    def other(key: str) -> dict[str, Any]:
        name = recipe.pop(key)
        if not isinstance(name, str):
            raise ConfigError(f"recipe {path.name}: {key} must name a recipe, not {name!r}")
        beside = path.parent / name
        return _load(beside if beside.is_file() else _find(name), (*above, path))

    base = other("extends") if "extends" in recipe else {}
    if isinstance(recipe.get("variants"), str):
        recipe["variants"] = other("variants").get("variants", [])
    if "sweep" in recipe:
        base.pop("sweep", None)
    return _merge(base, recipe)


def apply_overrides(recipe: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Changes options by ``key=value`` texts; values are written as in TOML.

    Raises:
        ConfigError: If a text has no ``=``, or its key is one the recipe sweeps over.
    """
    result = dict(recipe)
    swept = flatten(recipe["sweep"]) if isinstance(recipe.get("sweep"), Mapping) else {}
    for text in overrides:
        key, separator, value = text.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(f"--set {text}: write it as key=value, such as schedule.delta=0.5")
        if key in swept:
            raise ConfigError(f"--set {text}: the recipe sweeps over {key}; set sweep.{key}=[...]")
        _set(result, key, _parse_value(value.strip()))
    return result


def expand(recipe: Mapping[str, Any]) -> dict[str, RunConfig]:
    """The runs that a recipe describes, by directory name.

    Raises:
        ConfigError: If a part is not what it should be.
    """
    base = {key: value for key, value in recipe.items() if key not in ("variants", "sweep")}
    variants, axes = _variants(recipe), _axes(recipe)
    runs: dict[str, RunConfig] = {}
    for variant, values in itertools.product(variants, itertools.product(*axes.values())):
        tables = _merge(base, variant)
        for key, value in zip(axes, values, strict=True):
            _set(tables, key, value)
        config = read_config(tables)
        parts = [config.title, *(_axis_name(*axis) for axis in zip(axes, values, strict=True))]
        name = directory_name("-".join(parts))
        if name in runs:
            raise ConfigError(f"two runs would be called '{name}'; give the variants labels")
        runs[name] = config
    return runs


def directory_name(title: str) -> str:
    """A title as the name of a folder: letters and digits of any script, dots, plus and minus."""
    name = re.sub(r"(?:[^\w.+-]|_)+", "-", unicodedata.normalize("NFC", title).lower()).strip("-")
    if not any(letter.isalnum() for letter in name):
        return "run" if not title.strip() else "run-" + title.encode().hex()[:_LONGEST_NAME]
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name.encode()[: _LONGEST_NAME - 9].decode(errors="ignore") + f"-{mark}"


def _find(source: str) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    recipes = bundled_recipes()
    if source in recipes:
        return recipes[source]
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(f"recipe file {path} does not exist")
    raise ConfigError(unknown_name("recipe", source, recipes))


def _variants(recipe: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    variants = recipe.get("variants") or [{}]
    if not isinstance(variants, list) or not all(isinstance(each, Mapping) for each in variants):
        raise ConfigError("variants must be tables: write [[variants]] above each")
    return variants


def _axes(recipe: Mapping[str, Any]) -> dict[str, list[Any]]:
    sweep = recipe.get("sweep", {})
    if not isinstance(sweep, Mapping):
        raise ConfigError(f"sweep must be a section of lists, not {sweep!r}")
    axes = flatten(sweep)
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{key} must be a list of values, not {values!r}")
    return axes


def _merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with changes; a changed table that names another class starts afresh."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            names = {table["name"] for table in (old, value) if "name" in table}
            value = _merge(old, value) if len(names) < 2 else value
        result[key] = value
    return result


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key in place, copying the tables on the way to it."""
    *path, last = key.split(".")
    for part in path:
        inner = tables.get(part, {})
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{key}: {part} is an option, not a section")
        tables[part] = dict(inner)
        tables = tables[part]
    if last == "name" and tables.get("name") not in (None, value):
        tables.clear()  # the options of another class do not carry over
    tables[last] = value


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _axis_name(key: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = value.get("name", "-".join(str(part) for part in value.values()))
    return f"{key.rsplit('.', 1)[-1]}{value}"
