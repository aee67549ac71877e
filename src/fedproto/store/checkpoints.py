"""Checkpoints: the state after a round as safetensors, with what it belongs to, fingerprinted."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from fedproto.disk.files import Folder, explained, is_there, open_regular
from fedproto.disk.integrity import HASH, DamagedError, tensors_fingerprint
from fedproto.errors import StoreError
from fedproto.strategies.values import Declarations, initial_tensors
from fedproto.types import ServerState, Tensors, part, under

_NAME = re.compile(r"round-(\d{6,})\.safetensors")


BEST = "best.safetensors"
"""In ``checkpoints``: the served model with the best validation score."""


def write_checkpoint(
    run: Folder, state: ServerState, about: dict[str, Any], name: str | None = None
) -> None:
    """Writes the state after a round, and what else is to be known of it, into ``checkpoints``.

    Raises:
        StoreError: If it cannot be written; what is there is untouched.
    """
    tensors = _pack(state)
    about = {**about, "hash": tensors_fingerprint(tensors, about)}
    # One entry: the file format does not keep the order of several, and equal states should
    # give equal files.
    metadata = {"fedproto": json.dumps(about)}
    name = f"checkpoints/{name or f'round-{state.round:06d}.safetensors'}"
    with explained(run.path / name):
        run.write(name, to_safetensors(tensors, metadata))


def read_checkpoint(path: Path, digests: Collection[str], run_format: int) -> ServerState:
    """A checkpoint's state.

    Raises:
        DamagedError: If it is damaged or belongs to another configuration.
    """
    try:
        metadata, tensors = read_tensors(path)
        about = json.loads(metadata["fedproto"])
        state = _unpack(tensors, int(about["round"]))
        given = about.pop("hash", None)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"cannot be read ({error})") from None
    if about.get("digest") not in digests:
        raise DamagedError("belongs to a run of another configuration than run.json beside it")
    unmarked = given is None and run_format == about.get("format") == 1
    if not unmarked and given != tensors_fingerprint(tensors, about):
        raise DamagedError("is damaged: its content is not what its fingerprint says")
    if path.name != BEST and state.round != round_of(path):
        raise DamagedError(f"is named after another round than its own, {state.round}")
    return state


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file of tensors says about itself, and the tensors."""
    open_regular(path).close()  # a pipe would never end
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints there are, oldest first."""
    with explained(folder):
        try:
            names = [path.name for path in folder.iterdir()]
        except FileNotFoundError:
            return []
    return sorted((folder / name for name in names if _NAME.fullmatch(name)), key=round_of)


def round_of(checkpoint: Path) -> int:
    """The round that a checkpoint is named after."""
    return int(checkpoint.stem.removeprefix("round-"))


_ALSO = "also-model"
"""Group of the groups of models that are tested besides."""

_SERVED, _EARLIER_TRAINED = "served-model", "served/trained"
"""Group of the served model, and the group that held the trained one in an earlier version."""


def _pack(state: ServerState) -> dict[str, Tensor]:
    """One map for all; memory has names with groups of its own."""
    tensors = {**_model(state), **state.memory}
    if state.served_model is not None:
        tensors |= under(_SERVED, _model(state.served_model))
    for name, model in state.also.items():
        tensors |= under(f"{_ALSO}/{name}", _model(model))
    packed: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        # The file format refuses tensors that share their memory, as an average of one model does.
        packed[name] = one.clone() if one.data_ptr() in places else one
        places.add(one.data_ptr())
    return packed


def _model(state: ServerState) -> dict[str, Tensor]:
    return {**under("params", state.params), **under("buffers", state.buffers)}


def _unpack(tensors: dict[str, Tensor], round_: int) -> ServerState:
    def model(named: dict[str, Tensor]) -> ServerState:
        return ServerState(round_, part("params", named), part("buffers", named))

    found, apart = model(tensors), part(_SERVED, tensors)
    served = model(apart) if apart else None
    others = part(_ALSO, tensors)
    also = {
        name: model(part(name, others))
        for name in sorted({name.partition("/")[0] for name in others})
    }
    taken = {*_model(found), *under(_SERVED, apart), *under(_ALSO, others)}
    memory = {name: tensor for name, tensor in tensors.items() if name not in taken}
    if trained := part(_EARLIER_TRAINED, tensors):
        served = found
        params, buffers = (
            {name: trained[name] for name in of} for of in (found.params, found.buffers)
        )
        found = ServerState(round_, params, buffers)
    return replace(found, memory=memory, served_model=served, also=also)


class ClientMemory:
    """What clients keep between their own rounds, by client and round; this one keeps it in RAM.

    A client's memory after a round is kept beside the one before, never in its place. The run's
    records say which of them is valid: the one of the last round in which the client's update was
    accepted. So an update that was refused changes nothing, and a run that goes back to an earlier
    round finds its clients as they were.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, Tensors]] = {}

    def load(self, client: int, round_: int) -> Tensors | None:
        """The memory of a client after a round; None when there is none of that round."""
        kept_round, tensors = self._kept.get(client, (None, None))
        return tensors if kept_round == round_ else None

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Keeps the memory of a client after a round.

        `keep_from` is the earliest round to which the run may go back; older memory is dropped. A
        run that is kept in RAM never goes back.
        """
        self._kept[client] = round_, tensors

    def recall(self, client: int, last_round: int | None, declared: Declarations) -> Tensors | None:
        """A client's memory: initial before its first accepted update; None when it is lost."""
        if last_round is None or not declared:
            return initial_tensors(declared)
        kept = self.load(client, last_round)
        if kept is not None:
            found = {name: (tuple(one.shape), one.dtype) for name, one in kept.items()}
            if found != {name: (one.shape, one.dtype) for name, one in declared.items()}:
                raise StoreError(
                    f"client {client} holds other tensors of round {last_round} than the strategy"
                    " keeps"
                )
        return kept


class ClientMemoryOnDisk(ClientMemory):
    """A folder per client with a file per round, below a name in another folder."""

    def __init__(self, folder: Folder, below: str) -> None:
        super().__init__()
        self._folder = folder
        self._below = below

    def load(self, client: int, round_: int) -> Tensors | None:
        """The content of a file."""
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
