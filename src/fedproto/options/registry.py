"""Finding strategies, data sets, models, tasks and engines by name.

A new one is one file in its package's folder with a class that carries `@REGISTRY.register`: the
registry imports every module of the folder by itself. Other packages add theirs through the
entry-point group ``fedproto.plugins`` (a module to import), and a single file can be named with
`load_plugin`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from fedproto.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

T = TypeVar("T")
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

    def register(self, name: str) -> Callable[[type[C]], type[C]]:
        """Decorator that makes a class known under a name."""

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

    def get(self, name: str) -> type[T]:
        """The class of that name."""
        entries = self._all()
        if name not in entries:
            raise ConfigError(unknown_name(self.kind, name, entries))
        return entries[name]

    def stand_in(self, name: str, base: type[T], given: Mapping[str, Any]) -> T:
        """Options under a name that is not known here, to be read but not to be used."""

        def unknown(*_: Any) -> Any:
            raise ConfigError(unknown_name(self.kind, name, self._all()))

        methods: Iterable[str] = getattr(base, "__abstractmethods__", ())
        own = dataclasses.make_dataclass(
            "Unknown",
            [(key, Any, None) for key in given],
            bases=(base,),
            namespace={"stands_for": name, **dict.fromkeys(methods, unknown)},
            frozen=True,
        )
        values = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
        made: T = own(**values)
        return made

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
        if not self._searched:
            self._searched = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")
            for entry in _installed():
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


def _installed() -> EntryPoints:
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    return entry_points(group="fedproto.plugins")


def extended() -> bool:
    """Whether there are plugins, named or installed, so that sources here do not tell all."""
    return bool(_loaded or _installed())


def loaded_plugins() -> tuple[str, ...]:
    """What `load_plugin` has imported, for processes that need the same."""
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
