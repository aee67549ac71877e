"""Identity of a run's data and model: fingerprints of samples, partition, layers and weights.

A configuration names data and model; it does not hold them. So a run also keeps fingerprints of
what they were, and does not continue on, or count as, anything else.

Up to `WHOLE_BYTES` of samples are read completely, and as many evenly spread bytes of larger ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.data.samples import MappedSamples, TensorSamples
from fedproto.errors import ConfigError, StoreError
from fedproto.store import RunStore, is_run
from fedproto.types import POOLED, ServerState

WHOLE_BYTES = 1 << 28
CHUNK_BYTES = 1 << 24

PARTS = {
    "samples": "the samples",
    "partition": "which client has which samples",
    "classes": "the classes, the shape of inputs or the task",
    "module": "the model's layers",
    "weights": "the model's initial weights",
}
"""The content of each fingerprint, in words."""

SEEDED = "; a module of your own has the same initial weights if it is built with the same seed"


def data_identity(federation: Federation) -> dict[str, str]:
    """Fingerprints of a federation's classes, samples and partition, where they are at hand."""
    facts = (federation.num_classes, federation.input_shape, federation.task)
    found = {"classes": _digest([repr(facts).encode()])}
    samples = federation.samples
    if not isinstance(samples, TensorSamples | MappedSamples):
        return found  # the clients have them, in a real federation
    found["samples"] = _digest(_content(samples))
    shares = (
        federation.train_sizes,
        federation.train_indices(POOLED),
        federation.test_sizes,
        federation.test_indices,
        federation.validation,
    )
    found["partition"] = _digest(part.astype(np.int64).tobytes() for part in shares)
    return found


def model_identity(model: nn.Module, initial: ServerState) -> dict[str, str]:
    """Fingerprints of a module's layers and of the weights that training starts from."""
    layers = [
        f"{name} {type(layer).__qualname__}({layer.extra_repr()})"
        for name, layer in model.named_modules()
    ]
    tensors = {**initial.params, **initial.buffers}
    shapes = [f"{name} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())]
    return {
        "module": _digest(line.encode() for line in [*layers, *shapes]),
        "weights": _digest(_bytes(tensor) for _, tensor in sorted(tensors.items())),
    }


def check_same(was: Mapping[str, str], now: Mapping[str, str], where: object) -> None:
    """Checks that a run's data and model have the fingerprints of before."""
    changed = [name for name in PARTS if name in was and name in now and was[name] != now[name]]
    if changed:
        different = dict.fromkeys(PARTS[name] for name in changed)
        advice = SEEDED if "weights" in changed else ""
        raise StoreError(
            f"{where} holds a run that was trained on something else: {' and '.join(different)}"
            f" changed since; choose another directory, or restore the original{advice}"
        )


def _content(samples: TensorSamples | MappedSamples) -> Iterator[bytes]:
    """The bytes of samples: all, or `WHOLE_BYTES` of them, evenly spread."""
    if isinstance(samples, MappedSamples):
        relabel = None if samples.relabel is None else samples.relabel.tolist()
        yield repr((samples.mean, samples.std, relabel)).encode()
    for tensor in (samples.inputs, samples.targets):
        yield f"{tensor.dtype} {tuple(tensor.shape)}".encode()
        row_bytes = tensor[0].nbytes
        step = max(1, -(-len(tensor) * row_bytes // WHOLE_BYTES))
        at_once = step * max(1, CHUNK_BYTES // max(row_bytes, 1))
        for start in range(0, len(tensor), at_once):
            yield _bytes(tensor[start : start + at_once : step])


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def reference_state(directory: str) -> ServerState:
    """The last state of a run."""
    state = RunStore.open(Path(directory)).load_checkpoint()
    if state is None:
        raise ConfigError(
            f"measure.reference {directory} has no checkpoint; train it with"
            " store.checkpoint_every above 0"
        )
    return state.served


def check_reference(config: RunConfig) -> str | None:
    """Checks that a run's reference, where it needs one, is a model to compare with.

    Raises:
        ConfigError: If it is missing, unfinished, not centrally trained, or of other data or model.
    """
    if not config.measure.takes("mmd"):
        return None
    directory = config.measure.reference
    wanted = "a finished run of strategy 'centralized' with the same [data] and [model]"
    if directory is None:
        raise ConfigError(f"measure 'mmd' needs measure.reference, the directory of {wanted}")
    where = f"measure.reference {directory}"
    if not is_run(Path(directory)):
        raise ConfigError(f"{where} is not a run directory; name that of {wanted}")
    store = RunStore.open(Path(directory))
    if not store.config.strategy.pooled:
        title = store.config.title
        raise ConfigError(f"{where} is a run of '{title}', not centrally trained; name {wanted}")
    for section in ("data", "model"):
        if getattr(store.config, section) != getattr(config, section):
            raise ConfigError(f"{where} has another [{section}] than this run; name {wanted}")
    if not store.finished:
        raise ConfigError(f"{where} is not finished; first 'fedproto resume {directory}'")
    if store.config.seed != config.seed:
        return (
            f"{where} began from the initial weights of seed {store.config.seed}, this run from"
            f" those of seed {config.seed}: their features cannot be compared"
        )
    return None
