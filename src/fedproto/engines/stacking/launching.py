"""Launches of the Triton kernels: how they are cut into programs, and for which shapes they exist.

Shapes: as in `fedproto.engines.stacking.formulas`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedproto.engines.tracing import ConvStep, DenseStep, NormStep, Step

try:
    from fedproto.engines.stacking import kernels as kernels
except ImportError:  # Triton comes with PyTorch's builds for CUDA alone
    kernels = None  # type: ignore[assignment]

PROGRAMS = 1024
"""Programs that are enough for all of a GPU."""

UNITS, STRIP = 32, 64
"""The tile of a dense layer's weight that a program works on."""

LARGEST_BATCH = 64
"""Samples up to which reading the weights is what a dense layer's passes cost."""


class Cut(NamedTuple):
    """How a kernel is cut into programs.

    Attributes:
        rows: Pixels per program, or per turn of its loop.
        columns: Channels per program, at most.
        depth: Numbers of a patch per turn of the loop, or per program.
        products: How float32 is multiplied: by tf32, or by parts in bfloat16, which is more exact
            and, where an operand lies across, faster.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    products: str


# Found by a search on an H200 with LeNet, ResNet-18 and the paper's CNN.
ANY = 2**31
EXACT = {ANY: Cut(64, 64, 32, 4, 2, "tf32x3")}
# Strips of 64 in three stages Triton 3.6 compiles to another convolution, shifted by a pixel.
HALF = {
    32: Cut(128, 64, 32, 4, 3, "tf32"),
    127: Cut(128, 64, 64, 4, 3, "tf32"),
    ANY: Cut(128, 128, 32, 4, 3, "tf32"),
}
CUTS = {
    "forward": {
        "tf32": {
            15: Cut(128, 64, 32, 4, 3, "bf16x3"),
            32: Cut(128, 64, 32, 2, 2, "tf32"),
            ANY: Cut(128, 64, 64, 4, 3, "bf16x3"),
        },
        "tf32x3": EXACT,
        "bf16": HALF,
    },
    "input": {
        "tf32": {127: Cut(128, 64, 32, 4, 3, "tf32"), ANY: Cut(64, 128, 32, 4, 3, "tf32")},
        "tf32x3": EXACT,
        "bf16": HALF,
    },
    "weight": {
        "tf32": {
            15: Cut(32, 64, 128, 4, 3, "tf32"),
            32: Cut(64, 64, 64, 2, 1, "tf32"),
            127: Cut(64, 64, 128, 4, 2, "bf16x3"),
            ANY: Cut(64, 128, 64, 4, 2, "bf16x3"),
        },
        "tf32x3": {ANY: Cut(32, 64, 64, 4, 2, "tf32x3")},
        "bf16": {
            15: Cut(64, 64, 128, 4, 2, "tf32"),
            127: Cut(32, 64, 128, 4, 3, "tf32"),
            ANY: Cut(64, 128, 128, 4, 3, "tf32"),
        },
    },
    "weight by cells": {
        "tf32": {
            1: Cut(16, 64, 32, 2, 1, "tf32"),
            15: Cut(16, 64, 64, 4, 1, "tf32"),
            32: Cut(32, 64, 64, 4, 1, "tf32"),
        },
    },
}
"""Cuts by kernel, by precision, and by the largest number of channels that are read."""

FEW = 12
"""Numbers in a row of taps from which on it is worth to be read as a strip."""

MANY = 32
"""Channels up to which strips are read; in bfloat16 those of more are too deep, see `HALF`."""


def precision() -> str:
    """How the kernels multiply float32: as PyTorch's matrix products do at this moment.

    Three products of tf32 parts are as exact as one of float32, and faster on tensor cores.
    """
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _numbers(x: Tensor) -> str:
    """What cuts depend on: bfloat16, or how float32 is multiplied."""
    return "bf16" if x.dtype == torch.bfloat16 else precision()


def _cut(kernel: str, step: ConvStep, x: Tensor) -> tuple[Cut, bool]:
    """The cut of a kernel, no larger than the layer; and whether it reads strips."""
    cuts = CUTS[kernel][_numbers(x)]
    written, read = step.channels[kernel != "input"], step.channels[kernel == "input"]
    cut = next(cut for most, cut in cuts.items() if read <= most)
    strip = step.taps[1] * read
    strips = kernel == "forward" and read % cut.depth > 0 and strip >= FEW and read <= MANY
    depth = min(cut.depth, _power(strip if strips else strip * step.taps[0]))
    return cut._replace(columns=min(cut.columns, _power(written)), depth=depth), strips


def suits(step: Step) -> bool:
    """Whether the kernels can compute a step, and gain by it."""
    gains = False
    if isinstance(step, ConvStep):
        gains = step.stride[0] == step.stride[1] and step.pool != "same"
    elif isinstance(step, NormStep):
        gains = step.groups > 0 and step.bias
    elif isinstance(step, DenseStep):
        # Others are so small that PyTorch's products are as fast.
        gains = step.image is not None and step.units_in >= 512 and step.units >= 64
    return kernels is not None and gains


def conv_forward(
    step: ConvStep, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """``[J, B, H, W, I]`` to ``[J, B, H', W', O]``, and the codes of pooled cells."""
    height, width = step.sides
    pooled = bool(step.pool)
    shape = (height // 2, width // 2) if pooled else (height, width)
    y = x.new_empty((*x.shape[:2], *shape, step.channels[1]))
    code = torch.empty_like(y, dtype=torch.uint8) if pooled else None
    count, shift = x.shape[1] * shape[0] * shape[1], weight if bias is None else bias
    cut, strips = _cut("forward", step, x)
    programs = _parts(count, cut.rows // 4 if pooled else cut.rows)
    _convolve(
        step, cut, programs, count, x, weight, shift, y, y if code is None else code,
        IN_HEIGHT=step.image[0], IN_WIDTH=step.image[1], HEIGHT=height, WIDTH=width,
        BIASED=bias is not None, RELU=step.relu, POOLED=pooled, BACKWARD=False, STRIPS=strips,
    )  # fmt: skip
    return y, code


def conv_input_gradient(step: ConvStep, x: Tensor, dz: Tensor, weight: Tensor) -> Tensor:
    """The gradient ``[J, B, H, W, I]`` of the input x, from that of the unpooled output."""
    dx, (height, width) = torch.empty_like(x), step.sides
    count = x.shape[1] * step.image[0] * step.image[1]
    cut, _ = _cut("input", step, x)
    _convolve(
        step, cut, _parts(count, cut.rows), count, dz, weight, weight, dx, dx,
        IN_HEIGHT=height, IN_WIDTH=width, HEIGHT=step.image[0], WIDTH=step.image[1],
        BIASED=False, RELU=False, POOLED=False, BACKWARD=True, STRIPS=False,
    )  # fmt: skip
    return dx


def _convolve(
    step: ConvStep, cut: Cut, programs: int, count: int, x: Tensor, weight: Tensor, bias: Tensor,
    y: Tensor, code: Tensor, **constants: Any,
) -> None:  # fmt: skip
    kernels.convolve[programs, _parts(y.shape[-1], cut.columns), len(x)](
        x, weight, bias, y, code, x.stride(0), weight.stride(0), bias.stride(0), y.stride(0),
        count, **_geometry(step, cut), **constants,
    )  # fmt: skip


def conv_weight_gradient(
    step: ConvStep, x: Tensor, dy: Tensor, code: Tensor | None, weight: Tensor | None = None
) -> Tensor:
    """The packed weight's gradient; or `weight`, less its gradient, in place.

    Args:
        step: The convolution.
        x: Its input.
        dy: The gradient of pooled cells, whose codes are given; or that of the unpooled output.
        code: Which pixel a pooled cell passes its gradient to.
        weight: The packed weight to be changed.
    """
    (height, width), (ins, outs) = step.sides, step.channels
    known = CUTS["weight by cells"].get(_numbers(x), {})
    cells = code is not None and any(ins <= most for most in known)
    cut, _ = _cut("weight by cells" if cells else "weight", step, x)
    inner = step.taps[0] * step.taps[1] * ins
    rows = dy.shape[1] * dy.shape[2] * dy.shape[3] * (1 if code is None or cells else 4)
    tiles = _parts(inner, cut.depth) * _parts(outs, cut.columns)
    # As many parts as fill the device, each of several turns; few numbers, for each is compiled.
    turns = (2 if cells else 8) * cut.rows
    parts = max(1, min(PROGRAMS // (tiles * len(x)), rows // turns))
    parts = 1 << (parts.bit_length() - 1)
    part = _parts(_parts(rows, parts), cut.rows) * cut.rows
    parts = _parts(rows, part)
    whole = parts == 1
    size, kind = (len(x), parts, inner, outs), torch.float32
    out = weight if whole and weight is not None else x.new_empty(size, dtype=kind)
    kernels.weight_gradient[tiles, parts, len(x)](
        x, dy, dy if code is None else code, out, x.stride(0), dy.stride(0),
        out.stride(0) if out is weight else inner * outs, rows, part,
        IN_HEIGHT=step.image[0], IN_WIDTH=step.image[1], HEIGHT=height, WIDTH=width,
        POOLED=code is not None, CELLS=cells, SUBTRACT=out is weight, **_geometry(step, cut),
    )  # fmt: skip
    if out is weight:
        return out
    gradient = out[:, 0] if whole else out.sum(dim=1)
    return gradient if weight is None else weight.sub_(gradient)


def _products(kind: str) -> str:
    """A way to multiply float32 that this Triton has."""
    known = getattr(kernels, "KNOWN_PRODUCTS", ())
    return kind if kind in known else "tf32"


def _geometry(step: ConvStep, cut: Cut) -> dict[str, Any]:
    """The arguments that all kernels of a convolution have in common."""
    return {
        "INS": step.channels[0],
        "OUTS": step.channels[1],
        "DOWN": step.taps[0],
        "ALONG": step.taps[1],
        "STRIDE": step.stride[0],
        "PAD_DOWN": step.padding[0],
        "PAD_ALONG": step.padding[1],
        "ROWS": cut.rows,
        "COLUMNS": cut.columns,
        "DEPTH": cut.depth,
        "PRECISION": _products(cut.products),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


TILE = 4096
"""Numbers of a group that are normalised at once."""


def group_norm(
    step: NormStep, z: Tensor, scale: Tensor, shift: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output ``[J, B, P, O]``, and means and reciprocal deviations ``[J, B, G]``."""
    y = torch.empty_like(z)
    mean, rate = z.new_empty((2, *z.shape[:2], step.groups), dtype=torch.float32)
    kernels.group_norm[z.shape[0] * z.shape[1], step.groups](
        z, y if residual is None else residual, scale, shift, y, mean, rate, scale.stride(0),
        z.shape[1], z.shape[2], step.eps, **_slab(step, z), SUMMED=residual is not None,
        RELU=step.relu and not step.pool,
    )  # fmt: skip
    return y, mean, rate


def group_norm_backward(
    step: NormStep, dy: Tensor, y: Tensor, z: Tensor, found: Sequence[Tensor], scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of z, of scale and shift ``[J, O]``, and of the residual."""
    dz, summed = torch.empty_like(z), len(step.inputs) > 1
    through = torch.empty_like(z) if summed else dy
    each = z.new_empty((2, *z.shape[:2], z.shape[3]), dtype=torch.float32)
    kernels.group_norm_backward[z.shape[0] * z.shape[1], step.groups](
        dy, y, z, scale, *found, dz, through, each[0], each[1], scale.stride(0), z.shape[1],
        z.shape[2], **_slab(step, z), SUMMED=summed, RELU=step.relu and not step.pool,
    )  # fmt: skip
    dscale, dshift = each.sum(dim=2)
    return dz, dscale, dshift, through


def _slab(step: NormStep, z: Tensor) -> dict[str, int]:
    """How a group of a sample is read."""
    width = step.channels // step.groups
    side = max(4, _power(width, 1))
    rows = max(1, min(TILE // side, _power(z.shape[2], 1)))
    return {
        "CHANNELS": step.channels,
        "WIDTH": width,
        "SIDE": side,
        "ROWS": rows,
        "TURNS": _parts(z.shape[2], rows),
        "num_warps": 4,
    }


def dense_forward(x: Tensor, weight: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    """``x wᵀ + b``, perhaps with ReLU, ``[J, B, inputs]`` to ``[J, B, units]``."""
    h = x.new_empty((*x.shape[:2], weight.shape[1]))
    _multiply(weight, x.mT, h.mT, (UNITS, STRIP, 3), bias, relu=relu)
    return h


def dense_input_gradient(dz: Tensor, weight: Tensor) -> Tensor:
    """``dz w``, ``[J, B, units]`` to ``[J, B, inputs]``."""
    dx = dz.new_empty((*dz.shape[:2], weight.shape[2]))
    _multiply(weight.mT, dz.mT, dx.mT, (STRIP, UNITS, 3))
    return dx


def dense_descend(dz: Tensor, x: Tensor, weight: Tensor) -> None:
    """``weight −= dzᵀ x``."""
    _multiply(dz.mT, x, weight, (UNITS, _power(x.shape[1]), 1), subtract=True)


def _multiply(
    a: Tensor, b: Tensor, out: Tensor, cut: tuple[int, int, int], bias: Tensor | None = None,
    *, relu: bool = False, subtract: bool = False,
) -> None:  # fmt: skip
    """The product ``[J, M, K]`` by ``[J, K, N]``, cut by M, K and the stages of its loop."""
    (jobs, rows, inner), columns, shift = a.shape, b.shape[2], a if bias is None else bias
    width = STRIP if subtract else _power(columns)
    strides = [one.stride(side) for one in (a, b, out) for side in (1, 2)]
    kernels.dense[_parts(columns, width), _parts(rows, cut[0]), jobs](
        a, b, shift, out, *(one.stride(0) for one in (a, b, shift, out)), rows, columns, inner,
        *strides, BIASED=bias is not None, RELU=relu, SUBTRACT=subtract, ROWS=cut[0],
        COLUMNS=width, DEPTH=cut[1], PRECISION=precision(), num_warps=2, num_stages=cut[2],
    )  # fmt: skip


@dataclass(frozen=True)
class MlpStep:
    """A step of plain gradient descent of two dense layers and a head, in one kernel.

    A step of such a model is so little work that a GPU spends it on starting kernels.
    """

    layers: Sequence[DenseStep]
    batch: int

    @classmethod
    def of(cls, steps: Sequence[Step], batch: int) -> MlpStep | None:
        """For two dense layers and a head, if they are small enough and the kernel exists."""
        layers = [step for step in steps if isinstance(step, DenseStep) and step.bias]
        known = len(steps) == 3 and [step.relu for step in layers] == [True, True, False]
        if kernels is None or not known:
            return None
        step, largest = cls(layers, batch), (16, 128, 128, 512, 32)
        fits = all(a <= b for a, b in zip((batch, *step._sides), largest, strict=True))
        return step if fits else None

    @property
    def _sides(self) -> tuple[int, ...]:
        """Inputs of the first layer, units of both, and classes."""
        return self.layers[0].units_in, *(layer.units for layer in self.layers)

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


def _power(number: int, least: int = 16) -> int:
    """The next power of two, by default at least the smallest side of a matrix product."""
    return max(least, 1 << (number - 1).bit_length())
