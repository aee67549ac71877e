"""The run directory: what a run is, what it did, and where it stands.

    run.json          configuration, versions, hardware
    rounds.jsonl      one record a round
    checkpoints/      the state after a round, as safetensors
    clients/          what clients keep between their rounds, for strategies that have them do so

What clients keep is written first, then the round's record is appended and its checkpoint written,
under another name that is then changed in one step. So at any instant there is a whole checkpoint
with all records before it and all that the clients of these records kept; records beyond it are
dropped and computed again when the run goes on.

Everything carries a fingerprint (`fedproto.integrity`) that is compared when it is read: the
description, every record, which is linked to all before it, and every checkpoint, which names its
round and the last record it follows. What cannot be read is never taken for what is not there.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from fedproto.atomic import explained, is_there, write_atomically
from fedproto.client_memory import MemoryOnDisk
from fedproto.config import RunConfig, digest_of, read_config
from fedproto.environment import describe_environment
from fedproto.errors import ConfigError, StoreError
from fedproto.integrity import Chain, DamagedError, sealed, tensors_fingerprint, unsealed
from fedproto.locking import holds_nothing, locked
from fedproto.records import RecordReader
from fedproto.types import RoundRecord, ServerState, part, under

FORMAT = 2
"""Format 1 had no fingerprints; such directories are read and continued, with fingerprints."""

_READABLE = (1, FORMAT)
_CHECKPOINT = re.compile(r"round-(\d{6,})\.safetensors")
CREATION_ENDS_WITHIN = 5.0
"""Seconds to wait for another process that is creating the same directory."""


class RunStore:
    """One run's directory.

    Args:
        path: The directory.
        config: The run's configuration.
        digest: Its fingerprint when the run began. Options that came later, with their defaults,
            do not change it, so a run can be continued by a newer version.
        format: The version of the directory's layout when the run began.
        earlier: What the fingerprint was before the run was given more rounds.
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
        self._chain: Chain | None = None
        self._follows: str | None = None

    @property
    def client_memory(self) -> MemoryOnDisk:
        """What the run's clients keep between their rounds."""
        return MemoryOnDisk(self.path / "clients")

    @staticmethod
    def create(path: Path, config: RunConfig) -> RunStore:
        """Starts a new run directory.

        Raises:
            StoreError: If the directory holds something already or cannot be written.
        """
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            # Locked before looking: of two processes that start here at once, one finds a run.
            with locked(path, CREATION_ENDS_WITHIN):
                if is_run(path):
                    raise StoreError(
                        f"{path} holds a run already; continue it with 'fedproto resume {path}' or"
                        " choose another directory"
                    )
                if not holds_nothing(path):
                    raise StoreError(
                        f"{path} is not empty and holds no run; choose another directory"
                    )
                description = {
                    "format": FORMAT,
                    "config": config.to_dict(),
                    "digest": config.digest(),
                    "environment": describe_environment(),
                }
                write_atomically(path / "run.json", sealed(description))
        return RunStore(path, config, config.digest())

    @staticmethod
    def open(path: Path) -> RunStore:
        """Opens a run directory.

        Raises:
            StoreError: If there is none, or its description is damaged.
        """
        description = read_description(path)
        try:
            config, digest = read_config(description["config"]), digest_of(description["config"])
        except (ConfigError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path / 'run.json'} holds a configuration that cannot be read here: {error};"
                f" {_plugin_hint(description)}"
            ) from None
        if digest != description.get("digest"):
            raise StoreError(
                f"{path / 'run.json'} was changed after the run began; put the original back, or"
                " start a new run with the new configuration"
            )
        return RunStore(path, config, digest, description["format"], description.get("earlier", ()))

    def description(self) -> dict[str, Any]:
        """What ``run.json`` says.

        Raises:
            StoreError: If it is missing or damaged.
        """
        return read_description(self.path)

    def describe(self, **facts: Any) -> None:
        """Adds to ``run.json`` what is known only when a run begins.

        Raises:
            StoreError: If it cannot be written.
        """
        path = self.path / "run.json"
        with explained(path):
            write_atomically(path, sealed(self.description() | facts))

    def reconfigure(self, config: RunConfig) -> None:
        """Goes on under another configuration, which must not change what is done already.

        Raises:
            StoreError: If the description cannot be written.
        """
        self.earlier = (*self.earlier, self.digest)
        self.config, self.digest = config, config.digest()
        self.describe(config=config.to_dict(), digest=self.digest, earlier=list(self.earlier))

    def identity(self) -> dict[str, str]:
        """Fingerprints of what the run was trained on; none before it began, or of old runs."""
        found = self.description().get("identity", {})
        return dict(found) if isinstance(found, dict) else {}

    def records(self) -> list[RoundRecord]:
        """The rounds on record, oldest first; a last line cut short by a kill is left out.

        Raises:
            StoreError: If a line before the last is damaged.
        """
        return self._read_records()[0]

    def _read_records(self, first: int | None = None) -> tuple[list[RoundRecord], RecordReader]:
        """The first records, or all, and their reader."""
        path = self.path / "rounds.jsonl"
        reader = RecordReader(path)
        lines = _content(path).splitlines(keepends=True)
        return reader.read(b"".join(lines[:first])), reader

    def _links(self) -> Chain:
        """The links up to the last record; the file is read for them once."""
        if self._chain is None:
            self._chain = self._read_records()[1].chain
        return self._chain

    def append(self, record: RoundRecord) -> None:
        """Adds a round's record and waits until it is on disk.

        Raises:
            StoreError: If it cannot be written; the file is then as it was before.
        """
        path = self.path / "rounds.jsonl"
        chain = copy.copy(self._links())
        line = chain.add(asdict(record))
        with explained(path), path.open("ab") as file:
            end = file.tell()
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
        self._chain = chain

    def save_checkpoint(self, state: ServerState, *, last: bool = False) -> None:
        """Writes a checkpoint if one is due, and removes old ones.

        Args:
            state: The state after a round.
            last: Whether the run is over.

        Raises:
            StoreError: If it cannot be written; the checkpoints before are untouched.
        """
        every, keep = self.config.store.checkpoint_every, self.config.store.keep
        if every == 0 or (state.round % every and not last):
            return
        tensors = _pack(state)
        about = {
            "format": FORMAT,
            "round": state.round,
            "digest": self.digest,
            "records": self._links().head,
        }
        about["hash"] = tensors_fingerprint(tensors, about)
        # One entry: the file format does not keep the order of several, and equal states should
        # give equal files.
        metadata = {"fedproto": json.dumps(about)}
        path = self.path / "checkpoints" / f"round-{state.round:06d}.safetensors"
        with explained(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, to_safetensors(tensors, metadata))
            old = self.checkpoints()[:-keep] if keep else []
            for outdated in old:
                outdated.unlink()

    def load_checkpoint(self) -> ServerState | None:
        """The newest checkpoint's state; None when there is none.

        Raises:
            StoreError: If it is damaged or belongs to another configuration.
        """
        paths = self.checkpoints()
        if not paths:
            return None
        path = paths[-1]
        before = f"go on from {paths[-2].name}" if len(paths) > 1 else "begin again from round 0"
        try:
            state, self._follows = self.read_checkpoint(path)
        except DamagedError as error:
            raise StoreError(f"checkpoint {path} {error}; delete it to {before}") from None
        return state

    def read_checkpoint(self, path: Path) -> tuple[ServerState, str | None]:
        """A checkpoint's state, and the link of the last record it follows where it names one.

        Raises:
            DamagedError: If it is damaged or belongs to another configuration.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["fedproto"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = _unpack(tensors, int(about["round"]))
            given = about.pop("hash", None)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedError(f"cannot be read ({error})") from None
        if about.get("digest") not in (self.digest, *self.earlier):
            raise DamagedError("belongs to a run of another configuration than run.json beside it")
        unmarked = given is None and self.format == about.get("format") == 1
        if not unmarked and given != tensors_fingerprint(tensors, about):
            raise DamagedError("is damaged: its content is not what its fingerprint says")
        if state.round != _round_of(path):
            raise DamagedError(f"is named after another round than its own, {state.round}")
        return state, about.get("records")

    def go_back_to(self, round_: int) -> list[RoundRecord]:
        """Drops records of rounds from a number on and leftovers of broken writes.

        Returns:
            The records kept.

        Raises:
            StoreError: If a record before that round is missing, or they are not those that the
                checkpoint which was loaded follows.
        """
        kept, reader = self._read_records(round_)
        path = self.path / "rounds.jsonl"
        if len(kept) < round_:
            raise StoreError(
                f"{path} has {len(kept)} records but the checkpoint is of round {round_}; restore"
                " the file from a copy, or start the run again"
            )
        if self._follows not in (None, reader.chain.head):
            raise StoreError(
                f"{path} holds other records than those that the checkpoint of round {round_}"
                " follows; restore the file from a copy, or start the run again"
            )
        with explained(path):
            lines = _content(path).splitlines(keepends=True)[:round_]
            write_atomically(path, b"".join(lines))
            for leftover in self.path.rglob("*.partial"):
                leftover.unlink()
        self._chain = reader.chain
        return kept

    @contextlib.contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Keeps other processes from writing here; released even when this one is killed.

        Args:
            patience: Seconds to wait for another process that is at it.

        Raises:
            StoreError: If another process is at it.
        """
        with contextlib.ExitStack() as stack:
            with explained(self.path):
                stack.enter_context(locked(self.path, patience))
            yield

    def newest_round(self) -> int | None:
        """The round of the newest checkpoint; None when there is none."""
        paths = self.checkpoints()
        return _round_of(paths[-1]) if paths else None

    def checkpoints(self) -> list[Path]:
        """The checkpoints there are, oldest first.

        Raises:
            StoreError: If their folder cannot be read.
        """
        folder = self.path / "checkpoints"
        with explained(folder):
            try:
                names = [path.name for path in folder.iterdir()]
            except FileNotFoundError:
                return []
        return sorted(
            (folder / name for name in names if _CHECKPOINT.fullmatch(name)), key=_round_of
        )


def _plugin_hint(description: dict[str, Any]) -> str:
    """What to do about names that are not known here."""
    try:
        plugins = [str(plugin) for plugin in description["environment"]["plugins"]]
    except (KeyError, TypeError):
        plugins = []
    if not plugins:
        return "if a plugin or a program of yours added it, name that: --plugin FILE"
    return f"the run was made with {' '.join(f'--plugin {plugin}' for plugin in plugins)}"


def is_run(path: Path) -> bool:
    """Whether a directory holds a run.

    Raises:
        StoreError: If that cannot be found out.
    """
    return is_there(path / "run.json")


def read_description(path: Path) -> dict[str, Any]:
    """What ``run.json`` says.

    Raises:
        StoreError: If it is missing or damaged.
    """
    file = path / "run.json"
    if not is_there(file):
        raise StoreError(f"{path} is no run directory: it has no run.json")
    content = _content(file)
    try:
        description, marked = unsealed(content)
        version = description.get("format")
        if version != 1 and version in _READABLE and not marked:
            raise DamagedError("its fingerprint is missing")
    except DamagedError as error:
        raise StoreError(
            f"{file} is damaged: {error}; restore it from a copy, or start a new run"
        ) from None
    if version not in _READABLE:
        raise StoreError(f"{file} is of format {version}; this version reads format {FORMAT}")
    return description


def _content(path: Path) -> bytes:
    """What a file holds; nothing where there is none."""
    with explained(path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""


def _round_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("round-"))


def _pack(state: ServerState) -> dict[str, Tensor]:
    """One map for all; memory has names with groups of its own."""
    tensors = {**under("params", state.params), **under("buffers", state.buffers), **state.memory}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _unpack(tensors: dict[str, Tensor], round_: int) -> ServerState:
    params, buffers = part("params", tensors), part("buffers", tensors)
    model = under("params", params).keys() | under("buffers", buffers).keys()
    memory = {name: tensor for name, tensor in tensors.items() if name not in model}
    return ServerState(round_, params, buffers, memory)
