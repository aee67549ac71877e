"""The run directory: what a run is, what it did, and where it stands.

    run.json          configuration, versions, hardware
    rounds.jsonl      one record a round
    checkpoints/      the state after a round, as safetensors
    clients/          what clients keep between their rounds, for strategies that have them do so

What clients keep is written first, then the round's record is appended and its checkpoint written,
under another name that is then changed in one step. So at any instant there is a whole checkpoint
with all records before it and all that the clients of these records kept; records beyond it are
dropped and computed again when the run goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from fedproto.atomic import explained, write_atomically
from fedproto.client_memory import MemoryOnDisk
from fedproto.config import RunConfig, digest_of, read_config
from fedproto.environment import describe_environment
from fedproto.errors import ConfigError, StoreError
from fedproto.types import RoundRecord, ServerState, part, under

FORMAT = 1

_LOOK_AGAIN = 0.2
"""Seconds between two looks at a directory that another process uses."""


class RunStore:
    """One run's directory.

    Args:
        path: The directory.
        config: The run's configuration.
        digest: Its fingerprint when the run began. Options that came later, with their defaults,
            do not change it, so a run can be continued by a newer version.
        earlier: What that was before the run was given more rounds.
    """

    def __init__(
        self, path: Path, config: RunConfig, digest: str, earlier: Iterable[str] = ()
    ) -> None:
        self.path = path
        self.config = config
        self.digest = digest
        self.earlier = tuple(earlier)

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
        if is_run(path):
            raise StoreError(
                f"{path} holds a run already; continue it with 'fedproto resume {path}' or choose"
                " another directory"
            )
        if path.is_dir() and any(item.suffix != ".partial" for item in path.iterdir()):
            raise StoreError(f"{path} is not empty and holds no run; choose another directory")
        description = {
            "format": FORMAT,
            "config": config.to_dict(),
            "digest": config.digest(),
            "environment": describe_environment(),
        }
        with explained(path):
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / "run.json", _as_text(description))
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
        return RunStore(path, config, digest, description.get("earlier", ()))

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
            write_atomically(path, _as_text(self.description() | facts))

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
        path = self.path / "rounds.jsonl"
        with explained(path):
            content = path.read_bytes() if path.exists() else b""
        return parse_records(content, path)

    def append(self, record: RoundRecord) -> None:
        """Adds a round's record and waits until it is on disk.

        Raises:
            StoreError: If it cannot be written; the file is then as it was before.
        """
        path = self.path / "rounds.jsonl"
        line = json.dumps(asdict(record), allow_nan=False).encode() + b"\n"
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
        about = {"format": FORMAT, "round": state.round, "digest": self.digest}
        # One entry: the file format does not keep the order of several, and equal states should
        # give equal files.
        metadata = {"fedproto": json.dumps(about)}
        path = self.path / "checkpoints" / f"round-{state.round:06d}.safetensors"
        with explained(path):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, to_safetensors(_pack(state), metadata))
            old = self._checkpoints()[:-keep] if keep else []
            for outdated in old:
                outdated.unlink()

    def load_checkpoint(self) -> ServerState | None:
        """The newest checkpoint's state; None when there is none.

        Raises:
            StoreError: If it is damaged or belongs to another configuration.
        """
        paths = self._checkpoints()
        if not paths:
            return None
        path = paths[-1]
        before = f"go on from {paths[-2].name}" if len(paths) > 1 else "begin again from round 0"
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["fedproto"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = _unpack(tensors, int(about["round"]))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"checkpoint {path} cannot be read ({error}); delete it to {before}"
            ) from None
        if about.get("digest") not in (self.digest, *self.earlier):
            raise StoreError(
                f"checkpoint {path} belongs to a run of another configuration than run.json"
                f" beside it; delete it to {before}"
            )
        return state

    def go_back_to(self, round_: int) -> list[RoundRecord]:
        """Drops records of rounds from a number on and leftovers of broken writes.

        Returns:
            The records kept.

        Raises:
            StoreError: If a record before that round is missing.
        """
        records = self.records()
        if len(records) < round_:
            raise StoreError(
                f"{self.path / 'rounds.jsonl'} has {len(records)} records but the checkpoint is of"
                f" round {round_}; restore the file from a copy, or start the run again"
            )
        path = self.path / "rounds.jsonl"
        with explained(path):
            lines = path.read_bytes().splitlines(keepends=True)[:round_] if path.exists() else []
            write_atomically(path, b"".join(lines))
            for leftover in self.path.rglob("*.partial"):
                leftover.unlink()
        return records[:round_]

    @contextlib.contextmanager
    def locked(self, patience: float = 0.0) -> Iterator[None]:
        """Keeps other processes from writing here; released even when this one is killed.

        Args:
            patience: Seconds to wait for another process that is at it.

        Raises:
            StoreError: If another process is at it.
        """
        try:
            import fcntl
        except ImportError:  # not a POSIX system: no such locks
            yield
            return
        # The directory itself: run.json is replaced while a run begins.
        file = os.open(self.path, os.O_RDONLY)
        try:
            until = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= until:
                        raise StoreError(
                            f"{self.path} is in use by another process; wait for it or stop it"
                        ) from None
                time.sleep(_LOOK_AGAIN)
            yield
        finally:
            os.close(file)

    def newest_round(self) -> int | None:
        """The round of the newest checkpoint; None when there is none."""
        paths = self._checkpoints()
        return int(paths[-1].stem.removeprefix("round-")) if paths else None

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("round-*.safetensors"))


def _as_text(description: dict[str, Any]) -> bytes:
    return json.dumps(description, indent=2).encode() + b"\n"


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
    """Whether a directory holds a run."""
    return (path / "run.json").exists()


def read_description(path: Path) -> dict[str, Any]:
    """What ``run.json`` says.

    Raises:
        StoreError: If it is missing or damaged.
    """
    file = path / "run.json"
    if not file.exists():
        raise StoreError(f"{path} is no run directory: it has no run.json")
    with explained(file):
        text = file.read_bytes()
    try:
        description = json.loads(text)
        version = description["format"]
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{file} is damaged; restore it from a copy, or start a new run") from None
    if version != FORMAT:
        raise StoreError(f"{file} is of format {version}; this version reads format {FORMAT}")
    return dict(description)


def parse_records(content: bytes, path: Path, first: int = 0) -> list[RoundRecord]:
    """The records in a piece of ``rounds.jsonl``; what follows the last line's end is left out.

    Args:
        content: Lines of the file.
        path: The file, for messages.
        first: The round of the first line.

    Raises:
        StoreError: If a line is damaged or out of order.
    """
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=first + 1):
        try:
            record = _read_record(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StoreError(
                f"{path} line {number} is damaged; restore the file from a copy, or start the"
                " run again in another directory"
            ) from None
        if record.round != number - 1:
            raise StoreError(f"{path} line {number} is about round {record.round}, out of order")
        records.append(record)
    return records


def _pack(state: ServerState) -> dict[str, Tensor]:
    """One map for all; memory has names with groups of its own."""
    tensors = {**under("params", state.params), **under("buffers", state.buffers), **state.memory}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _unpack(tensors: dict[str, Tensor], round_: int) -> ServerState:
    params, buffers = part("params", tensors), part("buffers", tensors)
    model = under("params", params).keys() | under("buffers", buffers).keys()
    memory = {name: tensor for name, tensor in tensors.items() if name not in model}
    return ServerState(round_, params, buffers, memory)


def _read_record(data: dict[str, Any]) -> RoundRecord:
    for name in ("epochs", "attention", "failures"):
        data[name] = {int(client): value for client, value in data[name].items()}
    return RoundRecord(**data)
