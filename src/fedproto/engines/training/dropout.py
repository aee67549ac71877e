"""Dropout whose masks are a function of job, step and place, as everything random here is.

PyTorch draws them one after another from a generator, so that they depend on the device, on how
tensors lie in memory and on all that was drawn before. These are hashed: they are the same in every
engine and on every device, however many jobs are trained at once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

KINDS = (nn.Dropout, nn.Dropout2d)
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BITS = 53


class Masks:
    """What the masks of a model's dropout layers are drawn by.

    Attributes:
        drawn: Whether the model has any such layer.
        seed: Of the job; a tensor of whole numbers.
        step: The step's number within the job, likewise.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Takes over the model's dropout layers."""
        self.drawn = False
        self.seed, self.step = torch.zeros((2, 1), dtype=torch.int64, device=device)
        self._part = self._place = 0
        for layer in model.modules():
            if isinstance(layer, _DropoutNd) and type(layer) in KINDS:
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

    def begin_pass(self, part: int = 0) -> None:
        """A pass through the model, of which a step may make several."""
        self._part, self._place = part, 0

    def _applied(self, layer: _DropoutNd, x: Tensor) -> Tensor:
        if not layer.training or not layer.p:
            return x
        whole = isinstance(layer, nn.Dropout2d)
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if whole else x.shape
        key = self.seed
        for number in (self.step, self._part, self._place):
            key = _hashed(key + _GOLDEN + number)
        self._place += 1
        index = torch.arange(torch.Size(shape).numel(), device=x.device)
        bits = _shifted(_hashed(key + index * _GOLDEN), 64 - _BITS)
        keep = (bits >= int(layer.p * 2**_BITS)).view(shape).to(x.dtype)
        return x * (keep * (1 / (1 - layer.p) if layer.p < 1 else 0.0))


def layer_that_draws(model: nn.Module) -> str | None:
    """The first layer that draws from a generator all the same, in words; None without any."""
    for name, layer in model.named_modules():
        if isinstance(layer, _DropoutNd) and layer.p > 0 and type(layer) not in KINDS:
            return f"'{name}' ({type(layer).__name__})"
    return None


def _hashed(x: Tensor) -> Tensor:
    """Steele, Lea and Flood's mix of 64 bits (splitmix64); products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left: 64 bits without a sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
