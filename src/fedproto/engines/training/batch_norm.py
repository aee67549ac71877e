"""Batch normalisation in a federation: whose statistics a model normalises by.

`average` treats the running mean and variance of a layer like weights: clients send them and the
server averages them. `frozen` never changes them: clients train with those of the initial model.
`local` never sends them: a state has none, and whoever uses a model estimates them from the inputs
at hand (a client from its training inputs, for its prototypes and for the test of its own test
part). Scale and shift are weights and are trained and averaged under all three.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BatchNormPolicy: TypeAlias = Literal["average", "frozen", "local"]


def tolerate_single_values(model: nn.Module) -> None:
    """Lets a model's batch-norm layers train on a single value per channel.

    Such a value has no variance: a last batch of one sample, or one image whose map has shrunk to
    1×1 as in global pooling. It is normalised by the running statistics and leaves them as they
    are.
    """
    for layer in layers(model).values():
        layer.register_forward_pre_hook(_before)
        layer.register_forward_hook(_after, always_call=True)


def _before(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
    (values,) = arguments
    if layer.training and values.numel() == values.shape[1]:
        layer.training = False
        layer.__dict__["single_value"] = True


def _after(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
    del arguments, output
    if layer.__dict__.pop("single_value", False):
        layer.training = True


def layers(model: nn.Module) -> dict[str, _BatchNorm]:
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
        for name, layer in layers(model).items()
        for buffer, _ in layer.named_buffers(recurse=False)
    }


def freeze(model: nn.Module) -> None:
    """Lets a model in training normalise by its statistics and leave them as they are."""
    for layer in layers(model).values():
        layer.eval()


def forget(model: nn.Module) -> None:
    """Sets a model's statistics to what they are at first: those of another client are not its."""
    for layer in layers(model).values():
        layer.reset_running_stats()


def goes_by_batch(model: nn.Module) -> bool:
    """Whether a model has layers without statistics, which normalise each batch by its own.

    Such a model is tested client by client, so that nobody's samples change another's scores.
    """
    return any(
        isinstance(module, _BatchNorm) and module.running_mean is None for module in model.modules()
    )


@torch.no_grad()
def estimate(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Sets a model's statistics to the mean of those of some batches, and the model to testing."""
    model.eval()
    found = layers(model).values()
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
