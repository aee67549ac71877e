"""What clients keep between their own rounds, on disk: see `fedproto.rounds.client_memory`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save as to_safetensors

from fedproto.disk.files import Folder, explained, is_there
from fedproto.disk.integrity import HASH, tensors_fingerprint
from fedproto.errors import StoreError
from fedproto.store.checkpoints import read_tensors
from fedproto.types import Tensors


class MemoryOnDisk:
    """A folder per client with a file per round, below a name in another folder."""

    def __init__(self, folder: Folder, below: str) -> None:
        self._folder = folder
        self._below = below

    def load(self, client: int, round_: int) -> Tensors | None:
        """What a file holds."""
        path = self._path(client, round_)
        return read_kept(path) if is_there(path) else None

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Writes a file, then removes those before the last one that a return could need.

        Raises:
            StoreError: If it cannot be written; what was kept before is untouched.
        """
        path = self._path(client, round_)
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        content = to_safetensors(kept, {HASH: tensors_fingerprint(kept, _about(path))})
        with explained(path):
            self._folder.write(self._name(path), content)
        earlier = [one for one in sorted(path.parent.glob("round-*.safetensors")) if one < path]
        needed = self._path(client, keep_from)
        outdated = [one for one in earlier if one < needed][:-1]
        for one in outdated:
            with contextlib.suppress(OSError):
                self._folder.remove(self._name(one))

    def _path(self, client: int, round_: int) -> Path:
        name = f"{self._below}/{client:06d}/round-{max(round_, 0):06d}.safetensors"
        return self._folder.path / name

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder.path).as_posix()


def read_kept(path: Path) -> Tensors:
    """The tensors of a file, compared with its fingerprint."""
    try:
        metadata, tensors = read_tensors(path)
    except (SafetensorError, OSError) as error:
        raise StoreError(f"{path} cannot be read ({error}); restore it from a copy") from None
    if metadata.get(HASH) != tensors_fingerprint(tensors, _about(path)):
        raise StoreError(f"{path} is not what was written; restore it from a copy")
    return tensors


def _about(path: Path) -> dict[str, int]:
    """What the fingerprint of a file covers beside its tensors."""
    return {"client": int(path.parent.name), "round": int(path.stem.removeprefix("round-"))}
