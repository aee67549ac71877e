"""Launches of the Triton kernels: how they are cut into programs, and for which shapes they exist.

Shapes: as in `fedproto.engines.stacking.formulas`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedproto.models.layers import ConvLayer, DenseLayer

try:
    from fedproto.engines.stacking import kernels as kernels
except ImportError:  # Triton comes with PyTorch's builds for CUDA alone
    kernels = None  # type: ignore[assignment]

SIDES = (16, 32, 64)
"""Channels that fill the tiles of a matrix product and leave room for others beside."""

MANY = 32
"""Jobs from which on there are enough programs for all of a GPU, however large each is."""

UNITS, STRIP = 32, 64
"""The tile of a dense layer's weight that a program works on."""

LARGEST_BATCH = 64
"""Samples up to which reading the weights is what a dense layer's passes cost."""


class Cut(NamedTuple):
    """How a kernel is cut into programs.

    Attributes:
        block: Cells per program, or per turn of its loop.
        stages: Turns of the loop whose loads are under way at once.
    """

    block: int
    warps: int
    stages: int


# Found by a search on an H200 with the paper's CNN.
CUTS = {
    "forward_taps": {"tf32": Cut(32, 2, 3), "tf32x3": Cut(16, 2, 4), "few": Cut(16, 4, 3)},
    "forward_patches": {"tf32": Cut(32, 2, 1), "tf32x3": Cut(64, 4, 1), "few": Cut(32, 2, 1)},
    "input_gradient": {"tf32": Cut(32, 2, 2), "tf32x3": Cut(16, 2, 3), "few": Cut(16, 4, 3)},
    "weight_taps": {"tf32": Cut(32, 2, 1), "tf32x3": Cut(32, 2, 1), "few": Cut(32, 4, 1)},
    "weight_patches": {"tf32": Cut(32, 1, 1), "tf32x3": Cut(32, 2, 2), "few": Cut(32, 2, 2)},
}
"""Cuts by kernel, and by precision or for few jobs."""


def _cut(kernel: str, jobs: int) -> Cut:
    return CUTS[kernel][precision() if jobs >= MANY else "few"]


def precision() -> str:
    """How the kernels multiply float32: as PyTorch's matrix products do at this moment.

    Three products of tf32 parts are as exact as one of float32, and faster on tensor cores.
    """
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def conv_suits(layer: ConvLayer, *, first: bool) -> bool:
    """Whether the kernels can compute a convolution."""
    ins, outs = layer.channels
    patched = first and ins * layer.taps <= 16 and ins * layer.taps**2 <= 128
    # The kernel that pools leaves an odd last row or column out.
    poolable = layer.norm is not None or not layer.same
    return kernels is not None and outs in SIDES and (ins in SIDES or patched) and poolable


def conv_forward(
    layer: ConvLayer, x: Tensor, weight: Tensor, bias: Tensor, *, pooled: bool
) -> tuple[Tensor, Tensor | None]:
    """``[J, B, H, W, I]`` to pooled cells and their codes, or to ``[J, B, H, W, O]``."""
    height, width = layer.image
    shape = (height // 2, width // 2) if pooled else layer.image
    y = x.new_empty((*x.shape[:2], *shape, layer.channels[1]))
    code = torch.empty_like(y, dtype=torch.uint8) if pooled else None
    cut = _cut("forward_patches" if _patch(layer) else "forward_taps", len(x))
    _convolve(layer, cut, x, weight, bias, y, code, backward=False)
    return y, code


def conv_input_gradient(layer: ConvLayer, dz: Tensor, weight: Tensor) -> Tensor:
    """The gradient ``[J, B, H, W, I]`` of the input, from that of the unpooled output."""
    dx = dz.new_empty((*dz.shape[:4], layer.channels[0]))
    cut = _cut("input_gradient", len(dz))
    _convolve(layer, cut, dz, weight, dz, dx, None, backward=True)
    return dx


def conv_weight_gradient(
    layer: ConvLayer, x: Tensor, dy: Tensor, code: Tensor | None, weight: Tensor | None = None
) -> Tensor:
    """The packed weight's gradient; or `weight`, less its gradient, in place.

    Args:
        layer: The convolution.
        x: Its input.
        dy: The gradient of pooled cells, whose codes are given; or that of the unpooled output.
        code: Which pixel a pooled cell passes its gradient to.
        weight: The packed weight to be changed.
    """
    jobs, patched = len(x), _patch(layer) > 0
    cells = _cells(layer, x, pooled=code is not None)
    cut = _cut("weight_patches" if patched else "weight_taps", jobs)
    size = (layer.taps**2 * layer.channels[0], layer.channels[1])
    programs, part = layer.taps**2, cells[0]
    if patched:
        part = _parts(_parts(part, cut.block), 8 if jobs >= MANY else 32) * cut.block
        programs = _parts(cells[0], part)
        out = x.new_empty((jobs, programs, *size))
    else:
        out = x.new_empty((jobs, *size)) if weight is None else weight
    _launch_conv(
        kernels.weight_gradient, layer, cut, programs, x, dy, dy if code is None else code, out,
        x.stride(0), dy.stride(0), out.stride(int(patched)), *cells, *layer.image, part,
        POOLED=code is not None, SUBTRACT=not patched and weight is not None,
    )  # fmt: skip
    if not patched:
        return out
    gradient = out.sum(dim=1)
    return gradient if weight is None else weight.sub_(gradient)


def _convolve(
    layer: ConvLayer,
    cut: Cut,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    y: Tensor,
    code: Tensor | None,
    *,
    backward: bool,
) -> None:
    cells = _cells(layer, x, pooled=code is not None)
    _launch_conv(
        kernels.convolve, layer, cut, _parts(cells[0], cut.block),
        x, weight, bias, y, y if code is None else code,
        x.stride(0), weight.stride(0), bias.stride(0), y.stride(0), *cells, *layer.image,
        POOLED=code is not None, BACKWARD=backward,
    )  # fmt: skip


def _launch_conv(
    kernel: Any, layer: ConvLayer, cut: Cut, programs: int, x: Tensor, *args: Any, **constants: Any
) -> None:
    ins, outs = layer.channels
    kernel[programs, len(x)](
        x, *args, INS=ins, OUTS=outs, TAPS=layer.taps, PATCH=_patch(layer), BLOCK=cut.block,
        PRECISION=precision(), num_warps=cut.warps, num_stages=cut.stages, **constants,
    )  # fmt: skip


def _cells(layer: ConvLayer, x: Tensor, *, pooled: bool) -> tuple[int, int, int]:
    """2×2 cells in all, down and across: the complete ones, or those that touch the image."""
    rows, columns = (side // 2 if pooled else _parts(side, 2) for side in layer.image)
    return x.shape[1] * rows * columns, rows, columns


def _patch(layer: ConvLayer) -> int:
    """Width of a patch where inputs of few channels are read as whole patches; else 0."""
    ins, _ = layer.channels
    return 0 if ins in SIDES else _power(ins * layer.taps**2)


def dense_suits(layer: DenseLayer) -> bool:
    """Whether a dense layer is large enough for kernels; those that read an image are."""
    large = layer.image is not None and layer.inputs >= 512 and layer.units >= 64
    return kernels is not None and large


def dense_forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``relu(x wᵀ + b)``, ``[J, B, inputs]`` to ``[J, B, units]``."""
    h = x.new_empty((*x.shape[:2], weight.shape[1]))
    _launch_dense("dense_forward", weight, [_parts(weight.shape[1], UNITS)], 3, x, weight, bias, h)
    return h


def dense_input_gradient(dz: Tensor, weight: Tensor) -> Tensor:
    """``dz w``, ``[J, B, units]`` to ``[J, B, inputs]``."""
    dx = dz.new_empty((*dz.shape[:2], weight.shape[2]))
    _launch_dense(
        "dense_input_gradient", weight, [_parts(weight.shape[2], STRIP)], 3, dz, weight, dx
    )
    return dx


def dense_descend(dz: Tensor, x: Tensor, weight: Tensor) -> None:
    """``weight −= dzᵀ x``."""
    programs = [_parts(weight.shape[2], STRIP), _parts(weight.shape[1], UNITS)]
    _launch_dense("dense_descent", weight, programs, 1, dz, x, weight)


def _launch_dense(
    name: str, weight: Tensor, programs: Sequence[int], stages: int, *tensors: Tensor
) -> None:
    """Runs a kernel on tensors ``[J, …]``, the first of which is a batch."""
    (jobs, units, inputs), batch = weight.shape, tensors[0].shape[1]
    getattr(kernels, name)[*programs, jobs](
        *tensors, *(one.stride(0) for one in tensors), batch, inputs, units, BATCH=_power(batch),
        UNITS=UNITS, STRIP=STRIP, PRECISION=precision(), num_warps=2, num_stages=stages,
    )  # fmt: skip


@dataclass(frozen=True)
class MlpStep:
    """A step of plain gradient descent of two dense layers and a head, in one kernel.

    A step of such a model is so little work that a GPU spends it on starting kernels.
    """

    layers: tuple[DenseLayer, DenseLayer, DenseLayer]
    batch: int

    @property
    def _sides(self) -> tuple[int, ...]:
        """Inputs of the first layer, units of both, and classes."""
        return self.layers[0].inputs, *(layer.units for layer in self.layers)

    @property
    def usable(self) -> bool:
        """Whether the model is small enough, and the kernel exists."""
        largest = (16, 128, 128, 512, 32)
        needed = (self.batch, *self._sides)
        return kernels is not None and all(a <= b for a, b in zip(needed, largest, strict=True))

    def __call__(
        self, jobs: int, tensors: Sequence[Tensor], starts: Mapping[str, int], *, proximal: bool
    ) -> None:
        """Makes the next step of the leading jobs; the count is left to the caller.

        Args:
            jobs: The number of unfinished jobs.
            tensors: The first twelve arguments of the kernel.
            starts: Where each tensor begins in a model's row.
            proximal: Whether any job is pulled to the received weights.
        """
        samples, rows = tensors[2:4]
        channels, hidden, _, classes = self._sides
        offsets = [
            starts[f"{layer.name}.{part}"] for layer in self.layers for part in ("weight", "bias")
        ]
        kernels.mlp_step[(jobs,)](
            *tensors, rows.stride(0), len(samples), self.batch, *self._sides, *offsets,
            BATCH=_power(self.batch), IN=_power(channels), HIDDEN=_power(hidden), CHUNK=32,
            CLASSES=_power(classes), PROXIMAL=proximal, PRECISION=precision(), num_warps=8,
            num_stages=1,
        )  # fmt: skip


def _parts(count: int, size: int) -> int:
    return -(-count // size)


def _power(number: int) -> int:
    """The next power of two, at least the smallest side of a matrix product."""
    return max(16, 1 << (number - 1).bit_length())
