"""Checkpoints: the state after a round as safetensors, with what it belongs to, fingerprinted."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping
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


def tensors_file(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> bytes:
    """Tensors in memory of the CPU and their description, with a fingerprint of both."""
    about = {**about, HASH: tensors_fingerprint(tensors, about)}
    # One entry: the file format does not keep the order of several, and equal states should
    # give equal files.
    return to_safetensors(dict(tensors), {"fedproto": json.dumps(about)})


def read_tensors(path: Path, *, required: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors of such a file.

    Raises:
        DamagedError: If it is damaged, or carries no fingerprint though one is required.
    """
    try:
        open_regular(path).close()  # a pipe would never end
        with safe_open(path, framework="pt") as file:
            about = dict(json.loads(file.metadata()["fedproto"]))
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedError(f"cannot be read ({error})") from None
    given = about.pop(HASH, None)
    if (given is not None or required) and given != tensors_fingerprint(tensors, about):
        raise DamagedError("is damaged: its content does not match its fingerprint")
    return about, tensors


def write_checkpoint(
    run: Folder, state: ServerState, about: dict[str, Any], name: str | None = None
) -> None:
    """Writes the state after a round with its metadata into ``checkpoints``."""
    name = f"checkpoints/{name or f'round-{state.round:06d}.safetensors'}"
    with explained(run.path / name):
        run.write(name, tensors_file(_pack(state), about))


def read_checkpoint(path: Path, digests: Collection[str], run_format: int) -> ServerState:
    """A checkpoint's state.

    Raises:
        DamagedError: If it is damaged or belongs to another configuration.
    """
    about, tensors = read_tensors(path, required=run_format > 1)
    if about.get("digest") not in digests:
        raise DamagedError("belongs to a run with another configuration than run.json")
    round_ = about.get("round")
    if not isinstance(round_, int) or (path.name != BEST and round_ != round_of(path)):
        raise DamagedError(f"has a name of another round than its own, {round_}")
    return _unpack(tensors, round_)


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


_SERVED, _ALSO = "served-model", "also-model"
"""Groups of the tensors of the served model, and of models that are tested besides."""


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

    served, others = part(_SERVED, tensors), part(_ALSO, tensors)
    groups = ("params", "buffers", _SERVED, _ALSO)
    return replace(
        model(tensors),
        memory={
            name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in groups
        },
        served_model=model(served) if served else None,
        also={
            name: model(part(name, others))
            for name in sorted({name.partition("/")[0] for name in others})
        },
    )


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
        # A view would keep the tensors of all clients that were trained together.
        self._kept[client] = round_, {name: one.clone() for name, one in tensors.items()}

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
        path = self._folder.path / self._name(client, round_)
        return read_kept(path) if is_there(path) else None

    def save(self, client: int, round_: int, tensors: Tensors, *, keep_from: int) -> None:
        """Writes a file, then removes those before the last one that a return could need."""
        name = self._name(client, round_)
        path = self._folder.path / name
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with explained(path):
            self._folder.write(name, tensors_file(kept, _about(path)))
        needed = min(round_, keep_from)
        for outdated in [one for one in checkpoints_in(path.parent) if round_of(one) < needed][:-1]:
            with contextlib.suppress(OSError):
                self._folder.remove(self._name(client, round_of(outdated)))

    def _name(self, client: int, round_: int) -> str:
        return f"{self._below}/{client:06d}/round-{max(round_, 0):06d}.safetensors"


def read_kept(path: Path) -> Tensors:
    """The tensors of a client's file, compared with its fingerprint."""
    try:
        about, tensors = read_tensors(path)
        if about != _about(path):
            raise DamagedError("is of another client or round than its name says")
    except DamagedError as error:
        raise StoreError(f"{path} {error}; restore it from a copy") from None
    return tensors


def _about(path: Path) -> dict[str, int]:
    """What a client's file says about itself."""
    return {"client": int(path.parent.name), "round": round_of(path)}
