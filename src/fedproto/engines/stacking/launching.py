"""Launches of the kernels: how they are cut into programs, and where they may be used at all.

The cuts were searched for on an H200 with the paper's CNN; with others they are right, not best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from fedproto.engines.stacking import kernels as kernels
except ImportError:  # Triton comes with PyTorch's builds for CUDA alone
    kernels = None  # type: ignore[assignment]

SIDES = (16, 32, 64)
"""Channels that fill the tiles of a matrix product and leave room for others beside."""

MANY = 32
"""Jobs from which on there are enough programs for all of a GPU, however large each is."""


@dataclass(frozen=True)
class Cut:
    """How a kernel is cut into programs.

    Attributes:
        block: Cells per program, or per turn of its loop.
        stages: Turns of the loop whose loads are under way at once.
    """

    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Cuts:
    """A kernel's cuts by the number of jobs and the precision.

    Attributes:
        fast: Many jobs, tf32.
        exact: Many jobs, float32.
        few: Few jobs.
    """

    fast: Cut
    exact: Cut
    few: Cut

    def suiting(self, jobs: int) -> Cut:
        """That for so many jobs, at the precision of the moment."""
        if jobs < MANY:
            return self.few
        return self.fast if precision() == "tf32" else self.exact


CUTS = {
    "forward_taps": Cuts(Cut(32, 2, 3), Cut(16, 2, 4), Cut(16, 4, 3)),
    "forward_patches": Cuts(Cut(32, 2, 1), Cut(64, 4, 1), Cut(32, 2, 1)),
    "input_gradient": Cuts(Cut(32, 2, 2), Cut(16, 2, 3), Cut(16, 4, 3)),
    "weight_gradient_taps": Cuts(Cut(32, 2, 1), Cut(32, 2, 1), Cut(32, 4, 1)),
    "weight_gradient_patches": Cuts(Cut(32, 1, 1), Cut(32, 2, 2), Cut(32, 2, 2)),
}


def precision() -> str:
    """How the kernels multiply float32: as PyTorch's matrix products do at this moment.

    Three products of tf32 parts are as exact as one of float32, and faster on tensor cores.
    """
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


@dataclass(frozen=True)
class ConvKernels:
    """The kernels of one convolution.

    Attributes:
        channels: In and out.
        image: Height and width.
        taps: Side of the kernel.
        filled: Rows of a weight packed by whole patches; 0 where it is packed tap by tap.
    """

    channels: tuple[int, int]
    image: tuple[int, int]
    taps: int
    filled: int

    @property
    def usable(self) -> bool:
        """Whether the shapes suit the kernels and these can be had."""
        ins, outs = self.channels
        inside = self.filled <= 128 if self.filled else ins in SIDES
        return kernels is not None and outs in SIDES and inside

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor, *, pooled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """``[J, B, H, W, I]`` to pooled cells and their codes, or to ``[J, B, H, W, O]``."""
        jobs, batch = x.shape[:2]
        rows, columns = self._cells(whole=pooled)
        shape = (rows, columns) if pooled else self.image
        y = x.new_empty((jobs, batch, *shape, self.channels[1]))
        code = torch.empty_like(y, dtype=torch.uint8) if pooled else None
        name, count = "forward_patches" if self.filled else "forward_taps", batch * rows * columns
        cut = CUTS[name].suiting(jobs)
        self._launch(
            name, cut, (_parts(count, cut.block), jobs),
            x, weight, bias, y, y if code is None else code,
            x.stride(0), weight.stride(0), bias.stride(0), y.stride(0),
            count, rows, columns, *self.image, POOLED=pooled,
        )  # fmt: skip
        return y, code

    def input_gradient(self, dz: Tensor, weight: Tensor) -> Tensor:
        """The gradient ``[J, B, H, W, I]`` of the input, from that of the output, unpooled."""
        jobs, batch = dz.shape[:2]
        rows, columns = self._cells(whole=False)
        dx = dz.new_empty((jobs, batch, *self.image, self.channels[0]))
        count, cut = batch * rows * columns, CUTS["input_gradient"].suiting(jobs)
        self._launch(
            "input_gradient", cut, (_parts(count, cut.block), jobs), dz, weight, dx,
            dz.stride(0), weight.stride(0), dx.stride(0), count, rows, columns, *self.image,
        )  # fmt: skip
        return dx

    def weight_gradient(
        self, x: Tensor, dy: Tensor, code: Tensor | None, subtract_from: Tensor | None = None
    ) -> Tensor:
        """The weight's gradient, packed; or the weight, less its gradient, in place.

        Args:
            x: The input.
            dy: The output's gradient.
            code: Where pooled cells send their gradient; None for one that is not pooled.
            subtract_from: The weight to change.
        """
        jobs, batch = dy.shape[:2]
        rows, columns = self._cells(whole=code is not None)
        count = batch * rows * columns
        ins, outs = self.channels
        taken = (x, dy, dy if code is None else code)
        sizes = (count, rows, columns, *self.image)
        if not self.filled:
            shape = (jobs, self.taps * ins, self.taps * outs)
            out = x.new_empty(shape) if subtract_from is None else subtract_from
            cut = CUTS["weight_gradient_taps"].suiting(jobs)
            self._launch(
                "weight_gradient_taps", cut, (self.taps**2, jobs),
                *taken, out, x.stride(0), dy.stride(0), out.stride(0), *sizes,
                POOLED=code is not None, SUBTRACT=subtract_from is not None,
            )  # fmt: skip
            return out
        cut = CUTS["weight_gradient_patches"].suiting(jobs)
        turns = _parts(_parts(count, cut.block), 8 if jobs >= MANY else 32)
        part = turns * cut.block
        sums = x.new_empty((jobs, _parts(count, part), self.filled, outs))
        self._launch(
            "weight_gradient_patches", cut, (sums.shape[1], jobs), *taken, sums,
            x.stride(0), dy.stride(0), sums.stride(1), *sizes, part, POOLED=code is not None,
        )  # fmt: skip
        gradient = sums.sum(dim=1)
        return gradient if subtract_from is None else subtract_from.sub_(gradient)

    def _cells(self, *, whole: bool) -> tuple[int, int]:
        """Cells down and across: the whole ones, or those that touch the image."""
        height, width = self.image
        return (height // 2, width // 2) if whole else (_parts(height, 2), _parts(width, 2))

    def _launch(
        self, name: str, cut: Cut, grid: tuple[int, ...], *args: Any, **constants: Any
    ) -> None:
        if self.filled:
            args = (*args, self.filled)
            constants["PATCH"] = max(16, 1 << (self.filled - 1).bit_length())
        ins, outs = self.channels
        getattr(kernels, name)[grid](
            *args, INS=ins, OUTS=outs, TAPS=self.taps, BLOCK=cut.block, PRECISION=precision(),
            num_warps=cut.warps, num_stages=cut.stages, **constants,
        )  # fmt: skip


UNITS, STRIP = 32, 64
"""The tile of a dense layer's weight that a program works on."""

LARGEST_BATCH = 64
"""Samples up to which reading the weights is what a dense layer's passes cost."""


@dataclass(frozen=True)
class DenseKernels:
    """The kernels of one dense layer, made for small batches: each pass reads the weight once."""

    inputs: int
    units: int

    @property
    def usable(self) -> bool:
        """Whether the layer is large enough to be worth it."""
        return kernels is not None and self.inputs >= 512 and self.units >= 64

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """``relu(x wᵀ + b)``, ``[J, B, inputs]`` to ``[J, B, units]``."""
        jobs, batch = x.shape[:2]
        h = x.new_empty((jobs, batch, self.units))
        self._launch(
            "dense_forward", (_parts(self.units, UNITS), jobs), 3, batch, x, weight, bias, h,
            x.stride(0), weight.stride(0), bias.stride(0), h.stride(0),
        )  # fmt: skip
        return h

    def input_gradient(self, dz: Tensor, weight: Tensor) -> Tensor:
        """``dz w``, ``[J, B, inputs]``."""
        jobs, batch = dz.shape[:2]
        dx = dz.new_empty((jobs, batch, self.inputs))
        self._launch(
            "dense_input_gradient", (_parts(self.inputs, STRIP), jobs), 3, batch, dz, weight, dx,
            dz.stride(0), weight.stride(0), dx.stride(0),
        )  # fmt: skip
        return dx

    def descend(self, dz: Tensor, x: Tensor, weight: Tensor) -> None:
        """``weight −= dzᵀ x``."""
        jobs, batch = dz.shape[:2]
        self._launch(
            "dense_descent", (_parts(self.inputs, STRIP), _parts(self.units, UNITS), jobs), 1,
            batch, dz, x, weight, dz.stride(0), x.stride(0), weight.stride(0),
        )  # fmt: skip

    def _launch(
        self, name: str, grid: tuple[int, ...], stages: int, batch: int, *args: Any
    ) -> None:
        getattr(kernels, name)[grid](
            *args, batch, self.inputs, self.units, BATCH=max(16, 1 << (batch - 1).bit_length()),
            UNITS=UNITS, STRIP=STRIP, PRECISION=precision(), num_warps=2, num_stages=stages,
        )  # fmt: skip


def _parts(count: int, size: int) -> int:
    return -(-count // size)
