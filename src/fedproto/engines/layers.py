"""Layers that training in a federation treats specially: batch norm and dropout.

Batch normalisation: whose statistics a model normalises by. `average` treats the running mean and
variance of a layer like weights: clients send them and the server averages them. `frozen` never
changes them: clients train with those of the initial model. `local` never sends them: a state has
none, and each user of a model estimates them from the inputs at hand (a client from its training
inputs, for its prototypes and for the test of its own test part). Scale and shift are weights and
are trained and averaged under all three.

Dropout: masks are a function of job, step and position. PyTorch draws them one after another from a
generator, so that they depend on the device, on the memory layout of tensors and on everything
drawn before. These are hashed: they are the same in every engine and on every device, however many
jobs are trained at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

BatchNormPolicy: TypeAlias = Literal["average", "frozen", "local"]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def tolerate_single_values(model: nn.Module) -> None:
    """Lets a model's batch-norm layers train on a single value per channel.

    Such a value has no variance: a last batch of one sample, or one image whose map has shrunk to
    1×1 as in global pooling. It is normalised by the running statistics and leaves them as they
    are.
    """
    for layer in batch_norms(model).values():
        layer.forward = functools.partial(_normalised, layer)  # type: ignore[method-assign]


def _normalised(layer: _BatchNorm, x: Tensor) -> Tensor:
    training, single = layer.training, x.numel() == x.shape[1]
    layer.training = training and not single
    try:
        return type(layer).forward(layer, x)
    finally:
        layer.training = training


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """A model's batch-norm layers that keep statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def statistics_names(model: nn.Module) -> set[str]:
    """The names of the buffers that are batch-norm statistics."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in batch_norms(model).items()
        for buffer, _ in layer.named_buffers(recurse=False)
    }


def freeze_statistics(model: nn.Module) -> None:
    """Lets a model in training normalise by its statistics and leave them as they are."""
    for layer in batch_norms(model).values():
        layer.eval()


def reset_statistics(model: nn.Module) -> None:
    """Sets a model's statistics to what they are at first: those of another client are not its."""
    for layer in batch_norms(model).values():
        layer.reset_running_stats()


def goes_by_batch(model: nn.Module) -> bool:
    """Whether a model has layers without statistics, which normalise by each batch.

    Such a model is tested client by client, so that clients do not change each other's scores.
    """
    return any(
        isinstance(module, _BatchNorm) and module.running_mean is None for module in model.modules()
    )


@torch.no_grad()
def estimate(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Sets a model's statistics to the mean of those of some batches, and the model to testing."""
    model.eval()
    found = batch_norms(model).values()
    if not found:
        return
    momenta = [layer.momentum for layer in found]
    for layer in found:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over the batches
        layer.train()
    for inputs in batches:
        model(inputs)
    for layer, momentum in zip(found, momenta, strict=True):
        layer.momentum = momentum
    model.eval()


HASHED_DROPOUT = (nn.Dropout, nn.Dropout2d)
"""Layers whose masks are hashed."""

_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BITS = 53


class Masks:
    """What the masks of a model's dropout layers are drawn by.

    Attributes:
        drawn: Whether the model has any such layer.
        seed: Of the job; an integer tensor.
        step: The step's number within the job, likewise.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Takes over the model's dropout layers."""
        self.drawn = False
        self.seed, self.step = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self._place = 0
        for layer in model.modules():
            if isinstance(layer, _DropoutNd) and type(layer) in HASHED_DROPOUT:
                # The instance's own: what a layer is called and what it is stays as it was.
                layer.forward = functools.partial(self._applied, layer)
                self.drawn = True

    def begin_job(self, seed: int) -> None:
        """The next step is a job's first; in place, where a captured step finds it."""
        if self.drawn:
            self.seed.fill_(seed)
            self.step.fill_(-1)

    def begin_step(self) -> None:
        """The next step."""
        if self.drawn:
            self.step += 1

    def begin_pass(self) -> None:
        """A pass through the model, of which a step may make several, all with the same masks."""
        self._place = 0

    def _applied(self, layer: _DropoutNd, x: Tensor) -> Tensor:
        if not layer.training or not layer.p:
            return x
        whole = isinstance(layer, nn.Dropout2d)
        factors = dropout_factors(x, layer.p, whole, self.seed, self.step, self._place)
        self._place += 1
        return x * factors[0]


def dropout_factors(
    x: Tensor, p: float, whole: bool, seed: Tensor, step: Tensor, place: int
) -> Tensor:
    """What the numbers of a batch ``[B, channels, …]`` are multiplied by in several jobs.

    Args:
        x: The batch of any of the jobs, for its shape and type.
        p: The probability of being dropped.
        whole: Whether channels are dropped as a whole.
        seed: Of the jobs, ``[J]``.
        step: Of all jobs.
        place: Of the layer in the model.
    """
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if whole else x.shape
    key = seed
    for number in (step, 0, place):
        key = _hashed(key + _GOLDEN + number)
    index = torch.arange(torch.Size(shape).numel(), device=x.device)
    bits = _shifted(_hashed(key.unsqueeze(1) + index * _GOLDEN), 64 - _BITS)
    keep = (bits >= int(p * 2**_BITS)).view(len(seed), *shape).to(x.dtype)
    return keep * (1 / (1 - p) if p < 1 else 0.0)


def draws_by_generator(model: nn.Module) -> bool:
    """Whether any dropout layer draws from a generator: one whose masks are not hashed."""
    return any(
        isinstance(layer, _DropoutNd) and layer.p > 0 and type(layer) not in HASHED_DROPOUT
        for layer in model.modules()
    )


def _hashed(x: Tensor) -> Tensor:
    """Steele, Lea and Flood's mix of 64 bits (splitmix64); products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left: 64 bits without a sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
