"""Blocks of a stacked network with their own backward passes: dense layers and convolutions.

A block keeps its weight in the layout its matrix products want; `pack` and `unpack` convert from
and to the module's own. All matrix products are batched over the jobs.

Shapes: as in `fedproto.engines.stacking.formulas`; "..." stands for any leading dimensions.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.fusing import Fuse, unfused
from fedproto.engines.stacking.gradients import Gradient, Product
from fedproto.models.layers import ConvLayer, DenseLayer


class Block(abc.ABC):
    """A layer with weight and bias, and what follows it.

    Attributes:
        name: The layer's name in the module; its tensors are ``name.weight`` and ``name.bias``.
    """

    name: str

    @abc.abstractmethod
    def pack(self, weight: Tensor) -> Tensor:
        """The module's weights ``[..., O, …]`` in this block's layout."""

    @abc.abstractmethod
    def unpack(self, weight: Tensor) -> Tensor:
        """The opposite of `pack`."""

    @abc.abstractmethod
    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """The output in training, and what `backward` needs.

        Args:
            params: The layer's tensors, and others.
            x: The input, ``[J, B, …]``.
            fuse: Makes the parts between the matrix products faster.
            live: Which samples count, ``[J, B]``.
        """

    @abc.abstractmethod
    def encode(self, params: Mapping[str, Tensor], x: Tensor, live: Tensor | None) -> Tensor:
        """The output where nothing is trained; all samples count where `live` is None."""

    @abc.abstractmethod
    def backward(
        self, params: Mapping[str, Tensor], saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """The gradient of the input (None for the first block) and those of weight and bias."""

    @abc.abstractmethod
    def numbers(self, sample: int) -> int:
        """How many numbers a training step keeps at once per job for so many samples."""


@dataclass(frozen=True)
class Dense(DenseLayer, Block):
    """A dense layer with ReLU.

    Images lie channels last here, so the columns of a weight that takes one are put in that order.
    """

    def pack(self, weight: Tensor) -> Tensor:
        """Columns from channels first to channels last."""
        if self.image is None:
            return weight
        split: Tensor = weight.unflatten(-1, self.image)
        return split.movedim(-3, -1).reshape(*weight.shape[:-1], self.inputs)

    def unpack(self, weight: Tensor) -> Tensor:
        """Columns from channels last to channels first."""
        if self.image is None:
            return weight
        channels, height, width = self.image
        split: Tensor = weight.unflatten(-1, (height, width, channels))
        return split.movedim(-1, -3).reshape(*weight.shape[:-1], self.inputs)

    def encode(self, params: Mapping[str, Tensor], x: Tensor, live: Tensor | None) -> Tensor:
        """As in training."""
        del live
        return self._pass(params, x, unfused)[0]

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """``[J, B, …]`` to ``[J, B, D]``."""
        del live
        return self._pass(params, x, fuse)

    def _pass(self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse) -> tuple[Tensor, Any]:
        x = x.flatten(2)
        z = torch.bmm(x, params[f"{self.name}.weight"].transpose(1, 2))
        h = fuse(formulas.bias_relu)(z, params[f"{self.name}.bias"])
        return h, (x, h)

    def backward(
        self, params: Mapping[str, Tensor], saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """The weight's gradient is the product ``dzᵀ x``."""
        x, h = saved
        dz, db = fuse(formulas.relu_backward)(dy, h)
        gradients: dict[str, Gradient] = {
            f"{self.name}.weight": Product(dz.transpose(1, 2), x),
            f"{self.name}.bias": db,
        }
        return None if first else torch.bmm(dz, params[f"{self.name}.weight"]), gradients

    def numbers(self, sample: int) -> int:
        """Inputs, products, outputs and their gradients."""
        return sample * (2 * self.inputs + 4 * self.units)


@dataclass(frozen=True)
class Conv(ConvLayer, Block):
    """A convolution that keeps the size, with ReLU and 2×2 max pooling; `Normed` has any norm."""

    @property
    def full(self) -> bool:
        """Whether patches along both sides are used: they are small where channels are few."""
        return self.channels[0] * self.taps <= 16

    @property
    def patch(self) -> int:
        """Numbers in a full patch, rounded up to the alignment of fast matrix kernels."""
        return -(-self.channels[0] * self.taps**2 // 4) * 4

    def pack(self, weight: Tensor) -> Tensor:
        """``[..., O, I, T, T]`` to ``[..., I·T·T, O]``, or to ``[..., T·I, T·O]`` by side."""
        ins, outs = self.channels
        lead = weight.shape[:-4]
        if self.full:
            flat = weight.reshape(*lead, outs, ins * self.taps**2).transpose(-1, -2)
            return torch.nn.functional.pad(flat, (0, 0, 0, self.patch - flat.shape[-2]))
        order = [*range(len(lead)), -1, -3, -2, -4]
        return weight.permute(order).reshape(*lead, self.taps * ins, self.taps * outs)

    def unpack(self, weight: Tensor) -> Tensor:
        """The opposite of `pack`."""
        ins, outs = self.channels
        lead = weight.shape[:-2]
        if self.full:
            flat = weight[..., : ins * self.taps**2, :].transpose(-1, -2)
            return flat.reshape(*lead, outs, ins, self.taps, self.taps)
        split = weight.reshape(*lead, self.taps, ins, self.taps, outs)
        return split.permute([*range(len(lead)), -1, -3, -2, -4]).contiguous()

    def encode(self, params: Mapping[str, Tensor], x: Tensor, live: Tensor | None) -> Tensor:
        """As in training."""
        del live
        return self._pass(params, x, unfused)[0]

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H//2, W//2, O]``."""
        del live
        return self._pass(params, x, fuse)

    def convolve(self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H, W, O]``: no ReLU, no pooling."""
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if self.full:
            patches = fuse(formulas.full_patches)(x, self.taps, self.patch)
            y = torch.bmm(patches, weight).view(*x.shape[:4], self.channels[1])
        else:
            patches = fuse(formulas.row_patches)(x, self.taps)
            y = fuse(formulas.sum_shifted_rows)(torch.bmm(patches, weight), self.image, self.taps)
        return y + bias[:, None, None, None], patches

    def _pass(self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse) -> tuple[Tensor, Any]:
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if self.full:
            patches = fuse(formulas.full_patches)(x, self.taps, self.patch)
            y = torch.bmm(patches, weight).view(*x.shape[:4], self.channels[1])
            pooled, code = fuse(formulas.bias_relu_pool)(y, bias, same=self.same)
        else:
            patches = fuse(formulas.row_patches)(x, self.taps)
            z = torch.bmm(patches, weight)
            pooled, code = fuse(_sum_and_pool)(z, bias, self.image, self.taps, same=self.same)
        return pooled, (patches, code)

    def backward(
        self, params: Mapping[str, Tensor], saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """Through pooling and ReLU, then through the convolution."""
        patches, code = saved
        dy = dy.view(code.shape)
        bias_gradient = fuse(formulas.live_sum)(dy, code)
        if self.full:
            dz = fuse(formulas.unpool)(dy, code, self.image)
        else:
            dz = fuse(_unpool_and_shift)(dy, code, self.image, self.taps)
        dx, weight_gradient = self._convolve_backward(params, patches, dz, fuse, first=first)
        return dx, {f"{self.name}.weight": weight_gradient, f"{self.name}.bias": bias_gradient}

    def convolve_backward(
        self, params: Mapping[str, Tensor], saved: Any, dz: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, Gradient]:
        """From the gradient of what `convolve` gave to those of the input and of the weight."""
        if not self.full:
            dz = fuse(formulas.shifted_rows)(dz, self.taps)
        return self._convolve_backward(params, saved, dz, fuse, first=first)

    def _convolve_backward(
        self, params: Mapping[str, Tensor], patches: Tensor, dz: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, Gradient]:
        """The input's gradient is the forward pass with patches and shifts exchanged."""
        weight = params[f"{self.name}.weight"]
        if not self.full:
            gradient = Product(patches.transpose(1, 2), dz)
            if first:
                return None, gradient
            dpatches = torch.bmm(dz, weight.transpose(1, 2))
            return fuse(formulas.sum_row_patches)(dpatches, self.image, self.taps), gradient
        jobs, batch = dz.shape[:2]
        pixels = self.image[0] * self.image[1]
        dz = dz.reshape(jobs, batch * pixels, -1)
        # Sample by sample first: one product over all pixels of a batch is one long sum in few
        # blocks of threads, far too little for a GPU.
        by_sample = torch.bmm(
            patches.view(jobs * batch, pixels, -1).transpose(1, 2),
            dz.view(jobs * batch, pixels, -1),
        )
        total = by_sample.view(jobs, batch, *by_sample.shape[1:]).sum(dim=1)
        if first:
            return None, total
        dpatches = torch.bmm(dz, weight.transpose(1, 2))
        shape = torch.Size((jobs, batch, *self.image, self.channels[0]))
        return formulas.sum_full_patches(dpatches, shape, self.taps), total

    def numbers(self, sample: int) -> int:
        """Patches, products, pooled cells and their gradients."""
        ins, outs = self.channels
        pixels = self.image[0] * self.image[1]
        wide = self.patch + 4 * outs if self.full else self.taps * (4 * ins + 5 * outs)
        return sample * pixels * (wide + 2 * outs)


def _sum_and_pool(
    z: Tensor, bias: Tensor, image: tuple[int, int], taps: int, *, same: bool
) -> tuple[Tensor, Tensor]:
    return formulas.bias_relu_pool(formulas.sum_shifted_rows(z, image, taps), bias, same=same)


def _unpool_and_shift(dy: Tensor, code: Tensor, image: tuple[int, int], taps: int) -> Tensor:
    return formulas.shifted_rows(formulas.unpool(dy, code, image), taps)
