"""Options and registries: classes by the names that users write.

A strategy, a data set, a model and every section of a recipe is a frozen dataclass whose fields
know their type, range and meaning. The same checks run whether it is built in Python or read from a
recipe, and `fedproto list` prints from the same declarations. (Written here rather than taken from
a validation library because the core has to run on GPU images to which nothing can be added.)

A new strategy or the like is one file in its package's folder with a class that carries
`@REGISTRY.register`: the registry imports every module of the folder by itself. Other packages add
theirs through the entry-point group ``fedproto.plugins``; `load_plugin` imports a single file.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import os
import pkgutil
import sys
import threading
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from fedproto.errors import ConfigError, unknown_name

T = TypeVar("T")
O = TypeVar("O", bound="Options")  # noqa: E741 - the letter stands for Options

_DECLARED: dict[type, dict[str, tuple[Any, Mapping[str, Any]]]] = {}


def option(
    default: T,
    help: str,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
) -> T:
    """Declares a field of an `Options` class.

    Args:
        default: The value when none is given.
        help: Its effect, unit and special values, in a few words.
        at_least: The smallest valid number.
        at_most: The largest valid number.
        above: The number a valid one must exceed.

    Returns:
        A dataclass field; typed as the default so that type checkers see the field's own type.
    """
    limits = {"at_least": at_least, "at_most": at_most, "above": above}
    field: Any = dataclasses.field(
        default=default,
        metadata={"help": help, "limits": {k: v for k, v in limits.items() if v is not None}},
    )
    return typing.cast("T", field)


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of all option classes: checks every field when it is built.

    A subclass that only changes the default of an option gives the value alone.
    """

    def __post_init__(self) -> None:
        for name, (hint, told) in _declared(type(self)).items():
            value = _checked(getattr(self, name), hint, name, told.get("limits", {}))
            object.__setattr__(self, name, value)

    def check_given(self, names: Collection[str]) -> None:
        """Refuses options, of those that were given, that have no effect."""


def read_options(cls: type[O], given: Mapping[str, Any], where: str) -> O:
    """Builds options from a table read from outside."""
    names = [field.name for field in dataclasses.fields(cls)]
    for name in given:
        if name not in names:
            raise ConfigError(f"{where}: {unknown_name('option', name, names)}")
    try:
        made = cls(**given)
        made.check_given(given)
        return made
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}" if where else str(error)) from None


def options_to_dict(options: Options) -> dict[str, Any]:
    """The options as a plain table that `read_options` reads back."""
    return {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(options)
        if (value := getattr(options, field.name)) is not None
    }


@dataclasses.dataclass(frozen=True)
class Description:
    """One option for display."""

    name: str
    type: str
    default: Any
    help: str


def describe(cls: type[Options]) -> list[Description]:
    """Lists an option class's fields with type, range, default and meaning."""
    declared = _declared(cls)
    return [
        Description(
            name=field.name,
            type=_type_name(hint, told.get("limits", {})),
            default=field.default,
            help=told.get("help", ""),
        )
        for field in dataclasses.fields(cls)
        for hint, told in [declared[field.name]]
    ]


def _declared(cls: type[Options]) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Type and metadata of every option; the metadata of the nearest class that gives any."""
    if cls in _DECLARED:
        return _DECLARED[cls]
    hints = typing.get_type_hints(cls)
    known = [vars(one).get("__dataclass_fields__", {}) for one in cls.__mro__]

    def told(name: str) -> Mapping[str, Any]:
        found = (fields[name].metadata for fields in known if name in fields)
        return next(filter(None, found), {})

    _DECLARED[cls] = {
        one.name: (hints[one.name], told(one.name)) for one in dataclasses.fields(cls)
    }
    return _DECLARED[cls]


def parse_value(text: str) -> Any:
    """A value as TOML writes it; what is none is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def plain(value: Any) -> Any:
    """A scalar of NumPy or PyTorch as Python's own; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _checked(value: Any, hint: Any, name: str, limits: Mapping[str, float]) -> Any:
    if hint is Any:
        return value
    converted, fits = _convert(plain(value), hint)
    if not fits:
        number = isinstance(value, (int, float)) and abs(value) < math.inf
        size = " of ordinary size" if number and not _is_ordinary(value) else ""
        raise ConfigError(f"{name} must be {_type_name(hint)}{size}, not {value!r}")
    if isinstance(converted, int | float) and not (
        limits.get("at_least", -math.inf) <= converted <= limits.get("at_most", math.inf)
        and converted > limits.get("above", -math.inf)
    ):
        raise ConfigError(f"{name} must be{_range_text(limits)}, not {value!r}")
    return converted


def _convert(value: Any, hint: Any) -> tuple[Any, bool]:
    """The value in the hinted type, and whether it fits it at all."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        tried = [_convert(value, member) for member in members]
        return next(((one, True) for one, fits in tried if fits), (value, False))
    if origin is Literal:
        return value, value in members and not isinstance(value, bool)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            return value, False
        found = [_convert(plain(member), members[0]) for member in value]
        return tuple(member for member, _ in found), all(fits for _, fits in found)
    if isinstance(value, bool):
        return value, hint is bool
    if hint is float:
        number = isinstance(value, (int, float)) and _is_ordinary(value)
        # Without the sign of a zero, which numpy takes for one below zero.
        return (float(value) + 0.0, True) if number else (value, False)
    if hint is int:
        return value, isinstance(value, int) and _is_ordinary(value)
    return value, isinstance(value, hint) and (hint is not str or is_unicode(value))


def _is_ordinary(value: float) -> bool:
    """Whether a number is one of 63 bits, or of 32 bits floating-point, where all is computed."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return value == 0 or 1e-37 < abs(value) < 1e37


def is_unicode(text: str) -> bool:
    """Whether a string can be written; lone halves of characters cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _range_text(limits: Mapping[str, float]) -> str:
    words = {"above": "above", "at_least": "at least", "at_most": "at most"}
    parts = [f"{words[name]} {limits[name]:.12g}" for name in words if name in limits]
    return f" {' and '.join(parts)}" if parts else ""


def _type_name(hint: Any, limits: Mapping[str, float] | None = None) -> str:
    """A type in words; numbers with their range."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        named = (_type_name(member, limits).removeprefix("one of ") for member in members)
        *first, last = ", ".join(named).split(", ")
        return f"{', '.join(first)} or {last}"
    if origin is Literal:
        return "one of " + ", ".join(map(repr, members))
    if origin is tuple:
        return f"a list of {_type_name(members[0]).partition(' ')[2]}s"
    if hint in (int, float):
        return ("an integer" if hint is int else "a number") + _range_text(limits or {})
    known = {bool: "true or false", str: "a string", type(None): "none"}
    return known.get(hint, getattr(hint, "__name__", str(hint)))


C = TypeVar("C")

OURS = "fedproto."
"""The modules of this package, whose names others cannot take."""

_loaded: list[str] = []


class Registry(Generic[T]):
    """Classes of one kind, by the name users write."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, type[T]] = {}
        self._searched = False
        self._searching = threading.RLock()

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        """Decorator that makes a class known under a name."""
        if not isinstance(name, str):
            raise ConfigError(f"register {self.kind} under a name: @….register('mine')")

        def add(cls: type[C]) -> type[C]:
            known = self._entries.get(name)
            owners = [one.__module__ for one in (known, cls) if one is not None]
            if len({owner.startswith(OURS) for owner in owners}) > 1:
                raise ConfigError(
                    f"{self.kind} '{name}' is one of fedproto's own; register {cls.__name__} under"
                    " another name"
                )
            if known is not None and known.__qualname__ != cls.__qualname__:
                raise ConfigError(f"{self.kind} '{name}' is registered twice: {known} and {cls}")
            self._entries[name] = cls  # type: ignore[assignment]
            return cls

        return add

    def get(self, name: str, where: str = "") -> type[T]:
        """The class of that name; an error begins with `where` it was given, such as an option."""
        entries = self._all()
        if name not in entries:
            unknown = unknown_name(self.kind, name, entries)
            raise ConfigError(f"{where}: {unknown}" if where else unknown)
        return entries[name]

    def stand_in(self, name: str, base: type[T], given: Mapping[str, Any]) -> T:
        """Options under an unknown name, which can be read but not used."""
        values = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
        fields = [(key, Any, None) for key in given]
        own: Any = dataclasses.make_dataclass("Unknown", fields, bases=(base,), frozen=True)
        own.stands_for, own.__abstractmethods__ = name, frozenset()
        return typing.cast("T", own(**values))

    def name_of(self, cls: type) -> str:
        """The name under which a class is known."""
        if "stands_for" in vars(cls):
            return str(vars(cls)["stands_for"])
        for name, known in self._all().items():
            if known is cls:
                return name
        raise ConfigError(
            f"{self.kind} class {cls.__name__} has no name: decorate it with the register decorator"
        )

    def names(self) -> list[str]:
        """All names, in alphabetical order."""
        return sorted(self._all())

    def _all(self) -> dict[str, type[T]]:
        from importlib.metadata import entry_points  # slow to import

        with self._searching:  # another thread would find those that are imported by now
            if not self._searched:
                self._searched = True
                package = importlib.import_module(self._package)
                for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
                    importlib.import_module(f"{self._package}.{module.name}")
                for entry in entry_points(group="fedproto.plugins"):
                    entry.load()
        return self._entries


def load_plugin(source: str) -> None:
    """Imports a module by name, or a Python file by path, so that its classes register."""
    try:
        if source.endswith(".py"):
            _import_file(Path(source))
            source = str(Path(source).resolve())
        else:
            importlib.import_module(source)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"plugin '{source}' cannot be imported: {error}") from error
    if source not in _loaded:
        _loaded.append(source)


def load_plugins() -> None:
    """Imports the plugins of ``FEDPROTO_PLUGINS``, separated as in ``PATH``, once in a process."""
    for source in os.environ.get("FEDPROTO_PLUGINS", "").split(os.pathsep):
        if source and source not in _loaded:
            load_plugin(source)


def loaded_plugins() -> tuple[str, ...]:
    """Plugins that `load_plugin` has imported, for other processes."""
    return tuple(_loaded)


def _import_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"plugin file {path} does not exist")
    name = f"fedproto_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"plugin file {path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
