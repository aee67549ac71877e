"""Layers of a stacked network with their own backward passes: dense layers and convolutions.

A layer keeps its weight in the layout that its products need; `pack` and `unpack` convert from and
to the module's own. `forward` gives the output in training and the values that `backward` needs;
`backward` gives the gradients of the input (None for the first layer) and of the parameters. On
CUDA in float32 the products are the kernels of `fedproto.engines.stacking.kernels` where shapes
suit them; elsewhere they are PyTorch's batched products and grouped convolutions, which compute the
same.

Shapes: as in `fedproto.engines.stacking.formulas`; "..." stands for any leading dimensions. Of the
samples of a batch only the `live` ones ``[J, B]`` exist; the others fill it up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.nn.grad import conv2d_input, conv2d_weight

from fedproto.engines.stacking import formulas, launching
from fedproto.engines.stacking.formulas import Fuse, unfused
from fedproto.models.layers import ConvLayer, DenseLayer, NormLayer
from fedproto.types import Tensors


@dataclass(frozen=True)
class Pending:
    """A gradient that is not computed yet.

    Plain gradient descent subtracts it from the weight in place, which saves writing and reading a
    gradient as large as the weight itself.
    """

    compute: Callable[[], Tensor]
    subtract_from: Callable[[Tensor], object]


Gradient: TypeAlias = Tensor | Pending


def product(left: Tensor, right: Tensor) -> Pending:
    """The gradient ``left @ right``, ``[J, M, K]`` and ``[J, K, N]``."""
    return Pending(
        lambda: torch.bmm(left, right), lambda weight: weight.baddbmm_(left, right, alpha=-1)
    )


def computed(gradient: Gradient) -> Tensor:
    """The gradient as a tensor."""
    return gradient.compute() if isinstance(gradient, Pending) else gradient


@dataclass(frozen=True)
class Dense(DenseLayer):
    """A dense layer with ReLU.

    Images lie channels last here, so the columns of a weight that takes one are put in that order.

    Attributes:
        kernels: Whether small batches go through kernels, which read the weight once per pass.
    """

    kernels: bool = False

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

    def evaluate(self, params: Tensors, x: Tensor, live: Tensor) -> Tensor:
        """The output in evaluation."""
        return self.forward(params, x, unfused, live)[0]

    def forward(self, params: Tensors, x: Tensor, fuse: Fuse, live: Tensor) -> tuple[Tensor, Any]:
        """``[J, B, …]`` to ``[J, B, D]``."""
        del live
        x = x.flatten(2)
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if self._uses_kernels(x):
            h = launching.dense_forward(x, weight, bias)
        else:
            h = fuse(formulas.bias_relu)(torch.bmm(x, weight.transpose(1, 2)), bias)
        return h, (x, h)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """The weight's gradient is the product ``dzᵀ x``."""
        x, h = saved
        weight = params[f"{self.name}.weight"]
        dz, db = fuse(formulas.relu_backward)(dy, h)
        gradient, by_kernels = product(dz.transpose(1, 2), x), self._uses_kernels(x)
        if by_kernels:
            gradient = replace(
                gradient, subtract_from=lambda own: launching.dense_descend(dz, x, own)
            )
        gradients: dict[str, Gradient] = {f"{self.name}.weight": gradient, f"{self.name}.bias": db}
        if first:
            return None, gradients
        multiply = launching.dense_input_gradient if by_kernels else torch.bmm
        return multiply(dz, weight), gradients

    def numbers(self, sample: int) -> int:
        """Inputs, products, outputs and their gradients."""
        return sample * (2 * self.inputs + 4 * self.units)

    def _uses_kernels(self, x: Tensor) -> bool:
        return self.kernels and x.shape[1] <= launching.LARGEST_BATCH


@dataclass(frozen=True)
class Conv(ConvLayer):
    """A convolution that keeps the size, with ReLU and 2×2 max pooling.

    Attributes:
        kernels: Whether it is computed by kernels.
    """

    kernels: bool = False

    def pack(self, weight: Tensor) -> Tensor:
        """``[..., O, I, T, T]`` to ``[..., T·T·I, O]``."""
        moved: Tensor = weight.movedim(-4, -1).movedim(-4, -2)
        return moved.flatten(-4, -2)

    def unpack(self, weight: Tensor) -> Tensor:
        """The opposite of `pack`."""
        split: Tensor = weight.unflatten(-2, (self.taps, self.taps, self.channels[0]))
        return split.movedim(-2, -4).movedim(-1, -4).contiguous()

    def evaluate(self, params: Tensors, x: Tensor, live: Tensor) -> Tensor:
        """The output in evaluation."""
        return self.forward(params, x, unfused, live)[0]

    def forward(self, params: Tensors, x: Tensor, fuse: Fuse, live: Tensor) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H//2, W//2, O]``."""
        del live
        if self.kernels:
            weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
            pooled, code = launching.conv_forward(self, x, weight, bias, pooled=True)
        else:
            pooled, code = fuse(formulas.relu_pool)(self.convolve(params, x), same=self.same)
        return pooled, (x, code)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """Through pooling and ReLU, then through the convolution."""
        x, code = saved
        dy = dy.view(code.shape)
        dx = None
        if not first:
            dx = self.input_gradient(params, fuse(formulas.unpool)(dy, code, self.image))
        return dx, {
            f"{self.name}.weight": self.weight_gradient(x, dy, code),
            f"{self.name}.bias": fuse(formulas.live_sum)(dy, code),
        }

    def convolve(self, params: Tensors, x: Tensor) -> Tensor:
        """``[J, B, H, W, I]`` to ``[J, B, H, W, O]``: no ReLU, no pooling."""
        weight, bias = params[f"{self.name}.weight"], params[f"{self.name}.bias"]
        if self.kernels:
            return launching.conv_forward(self, x, weight, bias, pooled=False)[0]
        flat = self.unpack(weight).flatten(0, 1)
        y = F.conv2d(_grouped(x), flat, bias.flatten(), padding=self.taps // 2, groups=len(x))
        return _ungrouped(y, len(x))

    def input_gradient(self, params: Tensors, dz: Tensor) -> Tensor:
        """The gradient ``[J, B, H, W, I]`` of the input, from that of `convolve`."""
        weight = params[f"{self.name}.weight"]
        if self.kernels:
            return launching.conv_input_gradient(self, dz, weight)
        jobs, batch = dz.shape[:2]
        size = (batch, jobs * self.channels[0], *self.image)
        flat, padding = self.unpack(weight).flatten(0, 1), self.taps // 2
        return _ungrouped(conv2d_input(size, flat, _grouped(dz), 1, padding, 1, jobs), jobs)

    def weight_gradient(self, x: Tensor, dy: Tensor, code: Tensor | None = None) -> Pending:
        """The packed weight's gradient, from that of `convolve` or of pooled cells with codes."""
        if self.kernels:
            compute = functools.partial(launching.conv_weight_gradient, self, x, dy, code)
            return Pending(compute, compute)

        def compute_portably() -> Tensor:
            dz = dy if code is None else formulas.unpool(dy, code, self.image)
            jobs, (ins, outs), padding = len(x), self.channels, self.taps // 2
            size = (jobs * outs, ins, self.taps, self.taps)
            found = conv2d_weight(_grouped(x), size, _grouped(dz), 1, padding, 1, jobs)
            return self.pack(found.unflatten(0, (jobs, outs)))

        return Pending(compute_portably, lambda weight: weight.sub_(compute_portably()))

    def numbers(self, sample: int) -> int:
        """Input, output, pooled cells and their gradients; without kernels also copies of them."""
        pixels = self.image[0] * self.image[1]
        return sample * pixels * sum(self.channels) * (2 if self.kernels else 6)


def _grouped(x: Tensor) -> Tensor:
    """``[J, B, H, W, channels]`` to ``[B, J·channels, H, W]``, for a grouped convolution."""
    return x.permute(1, 0, 4, 2, 3).flatten(1, 2)


def _ungrouped(y: Tensor, jobs: int) -> Tensor:
    """The opposite of `_grouped`."""
    split: Tensor = y.unflatten(1, (jobs, -1))
    return split.permute(1, 0, 3, 4, 2).contiguous()


@dataclass(frozen=True)
class NormedConv(Conv):
    """A convolution with batch normalisation, then ReLU and 2×2 max pooling.

    Every job is normalised by the statistics of its own batch. Running statistics lie among the
    tensors that the layer is given, and are updated there. A layer that keeps none normalises by
    the batch in evaluation too.

    Attributes:
        frozen: Normalise by the running statistics in training too, and leave them as they are.
    """

    norm: NormLayer = field(kw_only=True)
    frozen: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the running mean and variance; empty if there are none."""
        if self.norm.momentum is None:
            return ()
        return f"{self.norm.name}.running_mean", f"{self.norm.name}.running_var"

    def evaluate(self, params: Tensors, x: Tensor, live: Tensor) -> Tensor:
        """By the running statistics, where there are any."""
        return replace(self, frozen=True).forward(params, x, unfused, live)[0]

    def forward(self, params: Tensors, x: Tensor, fuse: Fuse, live: Tensor) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H//2, W//2, O]``."""
        z = self.convolve(params, x)
        running = [params[name] for name in self.statistics]
        if running and self.frozen:
            found = (*running, torch.ones_like(running[0][:, :1]))
        else:
            found = fuse(formulas.moments)(z, live)
        if running and not self.frozen:
            moved = fuse(formulas.moved_statistics)(*running, found, live, self.norm.momentum)
            for old, new in zip(running, moved, strict=True):
                old.copy_(new)
        scale, shift = (params[f"{self.norm.name}.{part}"] for part in ("weight", "bias"))
        pooled, code = fuse(formulas.norm_relu_pool)(
            z, *found[:2], scale, shift, self.norm.eps, same=self.same
        )
        return pooled, (x, z, found, code, live)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """Through pooling, ReLU and normalisation, then through the convolution."""
        x, z, found, code, live = saved
        scale = params[f"{self.norm.name}.weight"]
        frozen = self.frozen and bool(self.statistics)
        dz, dbias, dscale, dshift = fuse(formulas.norm_backward)(
            dy.view(code.shape), code, z, found, scale, live, self.norm.eps, frozen=frozen
        )
        return None if first else self.input_gradient(params, dz), {
            f"{self.name}.weight": self.weight_gradient(x, dz),
            f"{self.name}.bias": dbias,
            f"{self.norm.name}.weight": dscale,
            f"{self.norm.name}.bias": dshift,
        }

    def numbers(self, sample: int) -> int:
        """As the convolution, and its output with two gradients of it."""
        pixels = self.image[0] * self.image[1]
        return super().numbers(sample) + 4 * sample * pixels * self.channels[1]
