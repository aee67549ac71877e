"""Batch normalisation in a stack: every job by the statistics of its own batch, or by given ones.

Shapes: as in `fedproto.engines.stacking.formulas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.blocks import Block, Conv
from fedproto.engines.stacking.fusing import Fuse, unfused
from fedproto.engines.stacking.gradients import Gradient


@dataclass(frozen=True)
class Normed(Block):
    """A convolution with batch normalisation, then ReLU and 2×2 max pooling.

    Where the layer keeps no statistics, every batch is normalised by its own, also in tests.

    Attributes:
        norm: The normalising layer's name; its running statistics lie among the tensors that a
            block is given, and are changed there.
        momentum: What a batch's statistics count in the running ones; None where there are none.
        frozen: Normalise by the running statistics, also in training, and leave them as they are.
    """

    conv: Conv
    norm: str
    eps: float
    momentum: float | None
    frozen: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        """The convolution's name."""
        return self.conv.name

    @property
    def keeps(self) -> bool:
        """Whether there are running statistics."""
        return self.momentum is not None

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the running mean and variance; none where there are none."""
        return (f"{self.norm}.running_mean", f"{self.norm}.running_var") * self.keeps

    def pack(self, weight: Tensor) -> Tensor:
        """As the convolution does."""
        return self.conv.pack(weight)

    def unpack(self, weight: Tensor) -> Tensor:
        """As the convolution does."""
        return self.conv.unpack(weight)

    def encode(self, params: Mapping[str, Tensor], x: Tensor, live: Tensor | None) -> Tensor:
        """By the running statistics, or by the batch's own where there are none."""
        z, _ = self.conv.convolve(params, x, unfused)
        if self.keeps:
            mean, variance = (params[name] for name in self.statistics)
        else:
            every = z.new_ones(z.shape[:2], dtype=torch.bool) if live is None else live
            mean, variance, _ = formulas.moments(z, every)
        return formulas.norm_relu_pool(
            z, mean, variance, *self._learned(params), self.eps, same=self.conv.same
        )[0]

    def forward(
        self, params: Mapping[str, Tensor], x: Tensor, fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H//2, W//2, O]``."""
        z, kept = self.conv.convolve(params, x, fuse)
        running = [params[name] for name in self.statistics]
        if running and self.frozen:
            found = (*running, torch.ones_like(running[0][:, :1]))
        else:
            found = fuse(formulas.moments)(z, live)
        if running and not self.frozen:
            moved = fuse(formulas.moved_statistics)(*running, found, live, self.momentum)
            for old, new in zip(running, moved, strict=True):
                old.copy_(new)
        pooled, code = fuse(formulas.norm_relu_pool)(
            z, *found[:2], *self._learned(params), self.eps, same=self.conv.same
        )
        return pooled, (kept, z, found, code, live)

    def backward(
        self, params: Mapping[str, Tensor], saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Tensor | None, dict[str, Gradient]]:
        """Through pooling, ReLU and normalisation, then through the convolution."""
        kept, z, found, code, live = saved
        scale, _ = self._learned(params)
        dz, dbias, dscale, dshift = fuse(formulas.norm_backward)(
            dy.view(code.shape),
            code,
            z,
            found,
            scale,
            live,
            self.eps,
            frozen=self.frozen and self.keeps,
        )
        dx, dweight = self.conv.convolve_backward(params, kept, dz, fuse, first=first)
        return dx, {
            f"{self.name}.weight": dweight,
            f"{self.name}.bias": dbias,
            f"{self.norm}.weight": dscale,
            f"{self.norm}.bias": dshift,
        }

    def numbers(self, sample: int) -> int:
        """What the convolution keeps, and its output with two gradients of it."""
        pixels = self.conv.image[0] * self.conv.image[1]
        return self.conv.numbers(sample) + 4 * sample * pixels * self.conv.channels[1]

    def _learned(self, params: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return params[f"{self.norm}.weight"], params[f"{self.norm}.bias"]
