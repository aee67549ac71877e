"""Blocks whose passes are kernels of `fedproto.engines.stacking.kernels`, for float32 on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.blocks import Conv, Dense
from fedproto.engines.stacking.fusing import Fuse
from fedproto.engines.stacking.gradients import Gradient, Pending, Product
from fedproto.engines.stacking.launching import LARGEST_BATCH, ConvKernels, DenseKernels


@dataclass(frozen=True)
class ConvGradient(Pending):
    """The gradient of a convolution's weight."""

    kernels: ConvKernels
    x: Tensor
    dy: Tensor
    code: Tensor | None

    def tensor(self) -> Tensor:
        """The gradient itself, packed."""
        return self.kernels.weight_gradient(self.x, self.dy, self.code)

    def subtract_from(self, weight: Tensor) -> None:
        """``weight −= gradient``."""
        self.kernels.weight_gradient(self.x, self.dy, self.code, subtract_from=weight)


@dataclass(frozen=True)
class KernelConv(Conv):
    """A convolution that writes no patches."""

    @property
    def portable(self) -> Conv:
        """The same without kernels."""
        return Conv(self.name, self.channels, self.image, self.taps, self.same)

    @property
    def kernels(self) -> ConvKernels:
        """What carries out the passes."""
        filled = self.patch if self.full else 0
        return ConvKernels(self.channels, self.image, self.taps, filled)

    def convolve(self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H, W, O]``: no ReLU, no pooling."""
        del fuse
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        return self.kernels.forward(x, weight, bias, pooled=False)[0], x

    def convolve_backward(
        self, params: Mapping[str, Tensor], saved: Any, dz: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, Gradient]:
        """The weight's gradient waits until it is asked for."""
        del fuse
        gradient = ConvGradient(self.kernels, saved, dz, None)
        weight = params[f"{self.name}.weight"]
        return None if first else self.kernels.input_gradient(dz, weight), gradient

    def _pass(self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse) -> tuple[Tensor, Any]:
        del fuse
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        pooled, code = self.kernels.forward(x, weight, bias, pooled=True)
        return pooled, (x, code)

    def backward(
        self, params: Mapping[str, Tensor], saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """The weight's gradient waits until it is asked for."""
        x, code = saved
        dy = dy.view(code.shape)
        gradients: dict[str, Gradient] = {
            f"{self.name}.weight": ConvGradient(self.kernels, x, dy, code),
            f"{self.name}.bias": fuse(formulas.live_sum)(dy, code),
        }
        if first:
            return None, gradients
        dz = fuse(formulas.unpool)(dy, code, self.image)
        return self.kernels.input_gradient(dz, params[f"{self.name}.weight"]), gradients

    def numbers(self, sample: int) -> int:
        """The input with its gradient, the pooled cells with theirs and their codes."""
        ins, outs = self.channels
        pixels = self.image[0] * self.image[1]
        return sample * pixels * (2 * ins + 2 * outs)


@dataclass(frozen=True)
class DenseGradient(Product):
    """The gradient of a dense layer's weight, ``dzᵀ x``."""

    kernels: DenseKernels

    def subtract_from(self, weight: Tensor) -> None:
        """``weight −= dzᵀ x``."""
        self.kernels.descend(self.left.transpose(1, 2), self.right, weight)


@dataclass(frozen=True)
class KernelDense(Dense):
    """A dense layer for small batches."""

    @property
    def portable(self) -> Dense:
        """The same without kernels."""
        return Dense(self.name, self.inputs, self.units, self.image)

    @property
    def kernels(self) -> DenseKernels:
        """What carries out the passes."""
        return DenseKernels(self.inputs, self.units)

    def _pass(self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse) -> tuple[Tensor, Any]:
        if x.shape[1] > LARGEST_BATCH:
            return super()._pass(params, x, fuse)
        x = x.flatten(2)
        h = self.kernels.forward(x, params[f"{self.name}.weight"], params[f"{self.name}.bias"])
        return h, (x, h)

    def backward(
        self, params: Mapping[str, Tensor], saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """The weight's gradient waits until it is asked for."""
        x, h = saved
        if x.shape[1] > LARGEST_BATCH:
            return super().backward(params, saved, dy, fuse, first=first)
        weight = f"{self.name}.weight"
        dz, db = fuse(formulas.relu_backward)(dy, h)
        gradients: dict[str, Gradient] = {
            weight: DenseGradient(dz.transpose(1, 2), x, self.kernels),
            f"{self.name}.bias": db,
        }
        return None if first else self.kernels.input_gradient(dz, params[weight]), gradients
