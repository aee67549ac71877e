"""Recipes: TOML files that describe a run, or a sweep of runs.

A recipe has the sections of `fedproto.config`. Two more make it a sweep: every ``[[variants]]``
table overrides parts of it under a label, and ``[sweep]`` lists values for dotted option names. The
runs are all variants with all combinations of the listed values.

``extends = "mnist"`` starts from another recipe, of which only what differs is written; its
variants and its sweep are taken over or replaced as a whole. ``variants = "methods-digits"`` takes
those of another recipe. The other recipe is a bundled one or one in the same folder, by name, or a
file. A table such as ``[scales.quick]`` holds what differs in a smaller version of the recipe,
which is chosen by its name; ``[tune]`` lists values for `fedproto tune` to choose from.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedproto.config.run import RunConfig, as_table, dotted_names, flatten, read_config
from fedproto.disk.files import check_limit, user_path
from fedproto.errors import ConfigError, unknown_name
from fedproto.options import Options, parse_value
from fedproto.strategies.base import STRATEGIES

_PACKAGE = Path(__file__).resolve().parents[1]
_RECIPES = (_PACKAGE / "recipes", _PACKAGE.parents[1] / "recipes")
_LONGEST_NAME = 150
"""Bytes of a folder's name; file systems allow 255, and files in it have names too."""


def bundled_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for folder in _RECIPES for path in sorted(folder.glob("*.toml"))}


def recipe_summary(path: Path) -> str:
    """The first comment line of a recipe: its purpose."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


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
        ConfigError: If the file cannot be read or an option is invalid.
    """
    with _naming(_find(source).name):
        return expand(read_tables(source, overrides, scale))


def read_tables(
    source: str, overrides: Iterable[str] = (), scale: str | None = None
) -> dict[str, Any]:
    """A recipe's tables as they are written, with those of the recipes that it extends."""
    path = _find(source)
    recipe = _load(path)
    with _naming(path.name):
        return apply_overrides(_scaled(recipe, scale), overrides)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Names the recipe in errors about it."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        raise ConfigError(
            text if text.startswith("recipe ") else f"recipe {name}: {text}"
        ) from None


def _scaled(recipe: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """The recipe without its scales, with the changes of one of them."""
    scales = recipe.pop("scales", {})
    tables = scales.values() if isinstance(scales, Mapping) else [scales]
    if not all(isinstance(table, Mapping) for table in tables):
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
    flatten(recipe)  # refuses what is nested too deeply for all that follows

    def other(key: str) -> dict[str, Any]:
        name = recipe.pop(key)
        if not isinstance(name, str):
            raise ConfigError(f"recipe {path.name}: {key} must name a recipe, not {name!r}")
        return _load(_find(name, path.parent), (*above, path))

    base = other("extends") if "extends" in recipe else {}
    if isinstance(recipe.get("variants"), str):
        recipe["variants"] = other("variants").get("variants", [])
    if "sweep" in recipe:
        base.pop("sweep", None)
    return _merge(base, recipe)


def apply_overrides(recipe: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Changes options by ``key=value`` texts; values are written as in TOML."""
    result = dict(recipe)
    swept = flatten(recipe["sweep"]) if isinstance(recipe.get("sweep"), Mapping) else {}
    for text in overrides:
        key, separator, value = text.partition("=")
        key = key.strip()
        if not separator or not key:
            raise ConfigError(f"--set {text}: write it as key=value, such as schedule.delta=0.5")
        if key in swept:
            raise ConfigError(f"--set {text}: the recipe sweeps over {key}; set sweep.{key}=[...]")
        set_option(result, key, parse_value(value.strip()))
    return result


def expand(recipe: Mapping[str, Any]) -> dict[str, RunConfig]:
    """The runs that a recipe describes, by directory name."""
    return combine(variants_of(recipe), axes_of(recipe.get("sweep", {}), "sweep"))


def combine(
    variants: Sequence[Mapping[str, Any]], axes: Mapping[str, Sequence[Any]]
) -> dict[str, RunConfig]:
    """All variants with all combinations of options' values, by directory name."""
    check_limit("runs", len(variants) * math.prod(map(len, axes.values())), "the sweep")
    runs: dict[str, RunConfig] = {}
    for variant, values in itertools.product(variants, itertools.product(*axes.values())):
        tables = dict(variant)
        for key, value in zip(axes, values, strict=True):
            set_option(tables, key, value)
        config = read_config(tables)
        parts = [config.title, *(_axis_name(*axis) for axis in zip(axes, values, strict=True))]
        name = directory_name("-".join(parts))
        if name in runs:
            raise ConfigError(
                f"two runs would have the name '{name}'; give the variants labels, and name"
                " each value once"
            )
        runs[name] = config
    return runs


def _axis_name(key: str, value: Any) -> str:
    """An option and its value in a directory's name."""
    if isinstance(value, Mapping):
        value = value.get("name", "-".join(str(part) for part in value.values()))
    return f"{key.rsplit('.', 1)[-1]}{value}"


def directory_name(title: str) -> str:
    """A title as the name of a folder: letters and digits of any script, dots, plus and minus."""
    name = re.sub(r"(?:[^\w.+-]|_)+", "-", unicodedata.normalize("NFC", title).lower()).strip("-")
    if not any(letter.isalnum() for letter in name):
        return "run" if not title.strip() else "run-" + title.encode().hex()[:_LONGEST_NAME]
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:8]
    return name.encode()[: _LONGEST_NAME - 9].decode(errors="ignore") + f"-{mark}"


def _find(source: str, *folders: Path) -> Path:
    """A recipe's file: beside another one, from the current folder, or a bundled one."""
    path = Path(source)
    for found in (*(user_path(str(folder / source)) for folder in folders), user_path(source)):
        if found is not None and found.is_file():
            return found
    beside = {one.stem: one for folder in folders for one in folder.glob("*.toml")}
    recipes = beside | bundled_recipes()
    if source in recipes:
        return recipes[source]
    if path.suffix == ".toml" or len(path.parts) > 1:
        raise ConfigError(f"recipe file {path} does not exist")
    raise ConfigError(unknown_name("recipe", source, recipes))


def variants_of(recipe: Mapping[str, Any], *, tuned: bool = False) -> list[dict[str, Any]]:
    """The tables of every variant with what all share; `tuned` keeps the section of tuning."""
    variants = recipe.get("variants") or [{}]
    if not isinstance(variants, list) or not all(isinstance(each, Mapping) for each in variants):
        raise ConfigError("variants must be tables: write [[variants]] above each")
    left_out = {"variants", "sweep"} | (set() if tuned else {"tune"})
    base = {key: value for key, value in recipe.items() if key not in left_out}
    merged = [_merge(base, variant) for variant in variants]
    return [
        {key: value for key, value in tables.items() if key not in left_out} for tables in merged
    ]


def axes_of(section: Any, where: str) -> dict[str, list[Any]]:
    """The values to try per option, by dotted names."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where} must be a section of lists, not {section!r}")
    axes = {}
    for key, values in flatten(section).items():
        axes[key] = [] if isinstance(values, str) or not isinstance(values, Iterable) else [*values]
        if not axes[key]:
            raise ConfigError(f"{where}.{key} must be a list of values, not {values!r}")
    return axes


def recipe_text(tables: Mapping[str, Any]) -> str:
    """Tables as a recipe: an option a line by its dotted name, then the variants."""

    def lines(options: Mapping[str, Any]) -> list[str]:
        return [f"{key} = {_toml(value)}" for key, value in flatten(options).items()]

    text = lines({key: value for key, value in tables.items() if key != "variants"})
    for variant in tables.get("variants", []):
        text += ["", "[[variants]]", *lines(variant)]
    return "\n".join(text) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_toml(one)}' for name, one in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)  # Python's numbers are TOML's
    # JSON's strings are TOML's, but for control characters that TOML escapes and JSON need not.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in text)


def _merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with changes; a changed table that names another class replaces the old one."""
    result = dict(base)
    for key, value in change.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            same = "name" not in old or "name" not in value or old["name"] == value["name"]
            value = _merge(old, value) if same else value
        result[key] = value
    return result


def set_option(tables: dict[str, Any], key: str, value: Any) -> None:
    """Sets an option by its dotted name in place, copying the tables on the way to it."""
    *path, last = key.split(".")
    for part in path:
        inner = tables.get(part, {})
        if not (isinstance(inner, Options | Mapping) or (isinstance(inner, str) and part in NAMED)):
            raise ConfigError(f"{key}: {part} is {inner!r}, not a section of options")
        tables[part] = dict(as_table(inner, part))
        tables = tables[part]
    if last == "name" and tables.get("name") not in (None, value):
        tables.clear()  # the options of another class do not carry over
    tables[last] = value


ROUNDS = 50
"""Number of rounds of a run from Python, by default."""

COMMON = {
    "rounds": "schedule",
    "cohort": "schedule",
    "delta": "schedule",
    "epochs": "train",
    "batch_size": "train",
    "lr": "train",
    "device": "engine",
}
"""Options that are keywords of their own, and the sections they are in."""

NAMED = ("data", "model", "strategy", "engine")
"""Sections that a name alone may stand for."""

_PARTS = tuple(item.name for item in fields(RunConfig))


def as_tables(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Sections and common options, given as keywords, as the tables of a recipe."""
    tables: dict[str, Any] = {"schedule": {}}
    tables |= {name: value for name, value in keywords.items() if name in _PARTS}
    tables["schedule"] = {"rounds": ROUNDS, **as_table(tables["schedule"], "schedule")}
    for name, value in keywords.items():
        if name not in _PARTS:
            set_option(tables, dotted_keyword(name), value)
    return tables


def dotted_keyword(name: str) -> str:
    """The dotted name of a common option; sections and dotted names as they are."""
    if "." in name or name in _PARTS:
        return name
    if name in COMMON:
        return f"{COMMON[name]}.{name}"
    sections = [dotted.partition(".")[0] for dotted in dotted_names(name)]
    strategies = map(STRATEGIES.get, STRATEGIES.names())
    if any(name in (item.name for item in fields(one)) for one in strategies):
        sections.append("strategy")
    if sections:
        forms = " or ".join(f"{section}={{'{name}': ...}}" for section in sections)
        forms = forms.replace("strategy={", "strategy={'name': ..., ")
        raise ConfigError(
            f"keyword '{name}' belongs to a section; write {forms}, or '{sections[0]}.{name}' in a"
            " grid"
        )
    raise ConfigError(unknown_name("keyword", name, [*_PARTS, *COMMON]))
