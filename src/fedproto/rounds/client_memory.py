"""What clients keep between their own rounds, addressed by client and round.

A client's memory after a round is kept beside the one before, never in its place. Which of them is
valid is told by the run's records: the one of the last round in which the client's update was
accepted. So an update that was refused changes nothing, and a run that goes back to an earlier
round finds its clients as they were.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors

from fedproto.disk.atomic import explained, is_there, write_atomically
from fedproto.disk.integrity import HASH, tensors_fingerprint
from fedproto.errors import StoreError
from fedproto.strategies.contract import Declarations, initial_tensors
from fedproto.types import Tensors


class ClientMemory(Protocol):
    """Keeps tensors per client and round."""

    def load(self, client: int, round_: int, declared: Declarations) -> Tensors | None:
        """What a client kept after a round; None when there is nothing of that round."""
        ...

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Keeps tensors, and forgets what nobody can ask for any more.

        Nobody can ask for what is older than `keep_from`, the earliest round to which the run may
        go back.
        """
        ...


def remembered(
    memory: ClientMemory, client: int, last_round: int | None, declared: Declarations
) -> Tensors | None:
    """A client's memory: initial before its first accepted update; None when it is lost."""
    if last_round is None or not declared:
        return initial_tensors(declared)
    return memory.load(client, last_round, declared)


class MemoryInRAM:
    """For runs that are kept nowhere."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Tensors]] = {}

    def load(self, client: int, round_: int, declared: Declarations) -> Tensors | None:
        """The client's newest; such a run never goes back."""
        del declared
        kept_round, tensors = self._kept.get(client, (None, None))
        return tensors if kept_round == round_ else None

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Keeps the newest alone."""
        del keep_from
        self._kept[client] = round_, tensors


class MemoryOnDisk:
    """A folder per client with a file per round."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, client: int, round_: int, declared: Declarations) -> Tensors | None:
        """Reads a file, whose tensors must be those declared."""
        path = self._path(client, round_)
        if not is_there(path):
            return None
        tensors = read_kept(path)
        found = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
        if found != {name: (one.shape, one.dtype) for name, one in declared.items()}:
            raise StoreError(f"{path} holds other tensors than the strategy keeps")
        return tensors

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Writes a file, then removes those before the last one that a return could need.

        Raises:
            StoreError: If it cannot be written; what was kept before is untouched.
        """
        path = self._path(client, round_)
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = to_safetensors(kept, {HASH: tensors_fingerprint(kept, _about(path))})
        with explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        earlier = [one for one in sorted(path.parent.glob("round-*.safetensors")) if one < path]
        needed = self._path(client, keep_from)
        outdated = [one for one in earlier if one < needed][:-1]
        for one in outdated:
            with contextlib.suppress(OSError):
                one.unlink()

    def _path(self, client: int, round_: int) -> Path:
        return self._folder / f"{client:06d}" / f"round-{max(round_, 0):06d}.safetensors"


def read_kept(path: Path) -> Tensors:
    """The tensors of a file, compared with its fingerprint."""
    try:
        with safe_open(path, framework="pt") as file:
            given = (file.metadata() or {}).get(HASH)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({error}); restore it from a copy") from None
    if given != tensors_fingerprint(tensors, _about(path)):
        raise StoreError(f"{path} is not what was written; restore it from a copy")
    return tensors


def _about(path: Path) -> dict[str, int]:
    """What the fingerprint of a file covers beside its tensors."""
    return {"client": int(path.parent.name), "round": int(path.stem.removeprefix("round-"))}
