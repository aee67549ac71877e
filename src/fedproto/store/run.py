"""The run directory: configuration, records and checkpoints of a run.

    run.json          configuration, versions, hardware
    rounds.jsonl      one record a round
    checkpoints/      the state after a round, as safetensors; the best served model where asked
    clients/          what clients keep between their rounds, for strategies that have them do so

What clients keep is written first, then the round's record is appended and its checkpoint written,
under another name that is then changed in one step. So at any instant there is a whole checkpoint
with all records before it and all that the clients of these records kept; records beyond it are
dropped and computed again when the run continues.

The description, every record and every checkpoint carry a fingerprint (`fedproto.disk.integrity`)
that is compared when they are read. What is damaged or unreadable raises a `StoreError` and is
never treated as missing; a failed write does so too, and leaves what was there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import subprocess
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args, get_origin

import torch

from fedproto.config import RunConfig, digest_of, read_config
from fedproto.config.upgrade import upgraded
from fedproto.disk.files import Folder, content, explained, is_there
from fedproto.disk.integrity import DamagedError, sealed, unsealed
from fedproto.errors import ConfigError, StoreError
from fedproto.options import loaded_plugins
from fedproto.store.checkpoints import (
    BEST,
    ClientMemoryOnDisk,
    checkpoints_in,
    read_checkpoint,
    round_of,
    write_checkpoint,
)
from fedproto.types import RoundRecord, ServerState

FORMAT = 3
"""Format 1 had no fingerprints, runs up to format 2 drew from other random streams: such
directories are read, but not continued."""


class RunStore:
    """One run's directory.

    Attributes:
        digest: That of the configuration when the run began. Options that came later, with their
            defaults, do not change it, so a run can be continued by a newer version.
        format: The version of the directory's layout when the run began.
        earlier: What the digest was before the run was given more rounds.
        first_digest: The first of these; it identifies the run.
        client_memory: The memory of the run's clients.
    """

    def __init__(
        self,
        path: Path,
        config: RunConfig,
        digest: str,
        format: int = FORMAT,
        earlier: Iterable[str] = (),
    ) -> None:
        self.path = path
        self.config = config
        self.digest = digest
        self.format = format
        self.earlier = tuple(earlier)
        self.first_digest = (*self.earlier, digest)[0]
        self.folder = Folder(path)
        self.client_memory = ClientMemoryOnDisk(self.folder, "clients")

    @staticmethod
    def create(path: Path, config: RunConfig) -> RunStore:
        """Starts a new run directory."""
        folder = Folder(path)
        # Locked before looking: of two processes that start here at once, one finds a run.
        with folder.made():
            if is_run(path):
                raise StoreError(
                    f"{path} holds a run already; continue it with 'fedproto resume {path}' or"
                    " choose another directory"
                )
            if not folder.is_empty():
                raise StoreError(f"{path} is not empty and holds no run; choose another directory")
            description = {
                "format": FORMAT,
                "config": config.to_dict(),
                "digest": config.digest(),
                "environment": describe_environment(),
            }
            folder.write("run.json", sealed(description))
        return RunStore(path, config, config.digest())

    @staticmethod
    def open(path: Path, *, to_compare: bool = False) -> RunStore:
        """Opens a run directory; `to_compare` as in `read_config`."""
        description = read_description(path)
        try:
            config = read_config(upgraded(description["config"]), to_compare=to_compare)
            digest = digest_of(description["config"])
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{path / 'run.json'} holds a configuration that cannot be read here: {error};"
                f" {plugin_hint(description)}"
            ) from None
        if digest != description.get("digest"):
            raise StoreError(
                f"{path / 'run.json'} was changed after the run began; restore the original, or"
                " start a new run with the new configuration"
            )
        return RunStore(path, config, digest, description["format"], description.get("earlier", ()))

    def describe(self, **facts: Any) -> None:
        """Adds to ``run.json`` what is known only when a run begins."""
        with explained(self.path / "run.json"):
            self.folder.write("run.json", sealed(read_description(self.path) | facts))

    def reconfigure(self, config: RunConfig) -> None:
        """Continues under another configuration, which must agree in the finished rounds."""
        self.earlier = (*self.earlier, self.digest)
        self.config, self.digest = config, config.digest()
        self.describe(config=config.to_dict(), digest=self.digest, earlier=list(self.earlier))

    def records(self) -> list[RoundRecord]:
        """The rounds on record, oldest first; a last line cut short by a kill is left out."""
        return list(self.iterate_records())

    def iterate_records(self, lines: bytes | None = None) -> Iterator[RoundRecord]:
        """The records one by one, of the file or of some of its lines."""
        file = self.path / "rounds.jsonl"
        text = content(file) if lines is None else lines
        return read_records(text, file, fingerprinted=self.format > 1)

    def append(self, record: RoundRecord) -> None:
        """Adds a round's record and waits until it is on disk."""
        with explained(self.path / "rounds.jsonl"):
            self.folder.append("rounds.jsonl", sealed(asdict(record), indent=None))

    def save_checkpoint(self, state: ServerState, *, last: bool = False) -> None:
        """Writes a checkpoint if one is due, and removes old ones."""
        every, keep = self.config.store.checkpoint_every, self.config.store.keep
        if every == 0 or (state.round % every and not last):
            return
        write_checkpoint(self.folder, state, self._about(state))
        for outdated in self.checkpoints()[:-keep] if keep else []:
            with explained(outdated):
                self.folder.remove(f"checkpoints/{outdated.name}")

    def save_best(self, state: ServerState) -> None:
        """Keeps the served model of a round in place of the best one before, in one step."""
        served = replace(state.served, memory={})
        write_checkpoint(self.folder, served, self._about(state), BEST)

    def load_best(self) -> ServerState:
        """The served model of the round with the best validation score."""
        path = self.path / "checkpoints" / BEST
        if not is_there(path):
            raise StoreError(
                f"{self.path} has no best model; train with store.best = true and validation data"
            )
        return self._read(path, "and use the newest model")

    def _about(self, state: ServerState) -> dict[str, Any]:
        return {"format": FORMAT, "round": state.round, "digest": self.digest}

    def load_checkpoint(self) -> ServerState | None:
        """The newest checkpoint's state; None when there is none."""
        if not (there := self.checkpoints()):
            return None
        *before, path = there
        otherwise = f"continue from {before[-1].name}" if before else "begin again from round 0"
        return self._read(path, f"to {otherwise}")

    def _read(self, path: Path, without: str) -> ServerState:
        try:
            return self.read_checkpoint(path)
        except DamagedError as error:
            raise StoreError(f"checkpoint {path} {error}; delete it {without}") from None

    def read_checkpoint(self, path: Path) -> ServerState:
        """As `fedproto.store.checkpoints.read_checkpoint`, of this run."""
        return read_checkpoint(path, (self.digest, *self.earlier), self.format)

    def go_back_to(self, round_: int) -> list[RoundRecord]:
        """Drops records from a round on and leftovers of broken writes; the records kept."""
        path = self.path / "rounds.jsonl"
        lines = content(path).splitlines(keepends=True)[:round_]
        kept = list(self.iterate_records(b"".join(lines)))
        if len(kept) < round_:
            raise StoreError(
                f"{path} has {len(kept)} records but the checkpoint is of round {round_}; restore"
                " the file from a copy, or start the run again"
            )
        with explained(path):
            self.folder.write(path.name, b"".join(lines))
            self.folder.remove_leftovers()
        return kept

    def newest_round(self) -> int | None:
        """The round of the newest checkpoint; None when there is none."""
        paths = self.checkpoints()
        return round_of(paths[-1]) if paths else None

    def checkpoints(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        return checkpoints_in(self.path / "checkpoints")

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        records = self.records()
        if self.config.stop_reason(records) is None:
            return False
        # A kill between the last record and its checkpoint leaves that round to be done again.
        return self.config.store.checkpoint_every == 0 or self.newest_round() == len(records)


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return is_there(path / "run.json")


def read_description(path: Path) -> dict[str, Any]:
    """The content of ``run.json``."""
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
        description = unsealed(content(file))
        for name, fit in _DESCRIPTION_CHECKS.items():
            if name in description and not fit([description[name]]):
                raise DamagedError(f"its {name} is of the wrong kind")
    except DamagedError as error:
        raise StoreError(
            f"{file} is damaged: {error}; restore it from a copy, or start a new run"
        ) from None
    if description.get("format") not in range(1, FORMAT + 1):
        found = description.get("format")
        raise StoreError(f"{file} is of format {found}; this version reads format {FORMAT}")
    return description


def plugin_hint(description: dict[str, Any]) -> str:
    """The remedy for unknown names."""
    plugins = description.get("environment", {}).get("plugins")
    if not plugins or not isinstance(plugins, list):
        return "if a plugin of yours added it, name it: --plugin FILE"
    return f"the run was made with {' '.join(f'--plugin {plugin}' for plugin in plugins)}"


@functools.cache
def package_versions() -> dict[str, str | None]:
    """Version per package; None where it is not installed."""
    names = "fedproto torch numpy safetensors typer flwr rich matplotlib pillow scikit-learn"
    versions: dict[str, str | None] = dict.fromkeys(names.split())
    for name in versions:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def devices() -> list[str]:
    """The devices that PyTorch can use, in words."""
    gpus = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    cpu = f"cpu: {_processor()}, {os.cpu_count()} cores"
    return [cpu, *(f"cuda:{index}: {name}" for index, name in enumerate(gpus))]


def describe_environment() -> dict[str, Any]:
    """Versions, hardware and commit, for the run directory."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name, found in package_versions().items() if found},
        "devices": devices(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "plugins": list(loaded_plugins()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit of the source tree the package runs from; None for an installed package."""
    tree = Path(__file__).resolve().parents[3]
    if not (tree / ".git").exists():
        return None
    describe = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        shown = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603
        return shown.stdout.strip()
    return None


def read_records(
    content: bytes, path: Path, *, fingerprinted: bool = True
) -> Iterator[RoundRecord]:
    """The records in whole lines; what follows the last line's end is left out.

    Records of version 0.1.0 had no fingerprints; only there may they be missing.
    """
    for number, line in enumerate(content.split(b"\n")[:-1]):
        where = f"{path} line {number + 1}"
        try:
            record = _record(unsealed(line, required=fingerprinted))
        except DamagedError as error:
            raise StoreError(
                f"{where} is damaged: {error}; restore the file from a copy, or start again in"
                " another directory ('fedproto check' says what can be saved)"
            ) from None
        if record.round != number:
            raise StoreError(f"{where} is about round {record.round}, out of order")
        yield record


def _record(data: dict[str, Any]) -> RoundRecord:
    data.pop("chain", None)  # lines of earlier versions have one
    try:
        for name in {"epochs", "attention", "failures"} & data.keys():
            data[name] = {int(client): value for client, value in data[name].items()}
        record = RoundRecord(**data)
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(f"it is not a record: {error}") from None
    for name, fit in _CHECKS.items():
        if not fit([getattr(record, name)]):
            raise DamagedError(f"its {name} has the wrong type")
    return record


def _check_of(hint: Any) -> Callable[[Collection[Any]], bool]:
    """Whether values from JSON have the declared type of a field.

    Many values are checked together: a long run has millions of them.
    """
    origin, members = get_origin(hint), [_check_of(member) for member in get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return lambda values: all(any(fits([value]) for fits in members) for value in values)
    if origin is list:
        return lambda values: _are(values, list) and all(map(members[0], values))
    if origin is dict:
        return lambda values: (
            _are(values, dict)
            and all(members[0](one.keys()) and members[1](one.values()) for one in values)
        )
    if hint is float:  # numbers whose sum could overflow are refused
        return lambda values: _are(values, int, float) and all(abs(one) < 1e300 for one in values)
    if hint is int:
        return lambda values: _are(values, int) and all(abs(one) < 2**63 for one in values)
    return lambda values: _are(values, hint)


def _are(values: Collection[Any], *kinds: type) -> bool:
    return set(map(type, values)).issubset(kinds)


_CHECKS = {name: _check_of(hint) for name, hint in typing.get_type_hints(RoundRecord).items()}

_DESCRIPTION_CHECKS = {
    **dict.fromkeys(("config", "environment", "identity", "data"), _check_of(dict)),
    "engines": _check_of(list[dict]),  # type: ignore[type-arg]
    "earlier": _check_of(list[str]),
}
"""Of the entries of ``run.json``."""
