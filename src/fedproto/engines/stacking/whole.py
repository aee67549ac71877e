"""A whole step as one kernel, for small models of dense layers.

A step of such a model is so little work that a GPU spends it on starting kernels; and since a
round lasts as long as its largest client, that is what a sweep waits for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedproto.engines.stacking import launching

LARGEST = {"batch": 16, "channels": 128, "hidden": 128, "features": 512, "classes": 32}
CHUNK, WARPS = 32, 8


@dataclass(frozen=True)
class StepState:
    """What a step of all jobs reads and changes, ``[J, …]`` where nothing else is said.

    Attributes:
        received: Where they are drawn to; the weights themselves where none is.
        last_epoch: The step at which each job's last epoch begins.
        proximal: Strength of the pull.
        count: Steps made so far; one number.
    """

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    rows: Tensor
    received: Tensor
    start: Tensor
    steps: Tensor
    last_epoch: Tensor
    rate: Tensor
    proximal: Tensor
    count: Tensor
    loss: Tensor


@dataclass(frozen=True)
class MlpStep:
    """A step of plain gradient descent of two dense layers with ReLU and a head.

    Attributes:
        sides: Numbers per sample that go in, of the two layers, and classes.
        layers: The layers' names, in order.
    """

    batch: int
    sides: tuple[int, int, int, int]
    layers: tuple[str, str, str]

    @property
    def usable(self) -> bool:
        """Whether the model is small enough, and the kernel can be had."""
        needed = (self.batch, *self.sides)
        return launching.kernels is not None and all(
            side <= most for side, most in zip(needed, LARGEST.values(), strict=True)
        )

    def __call__(self, jobs: int, state: StepState, starts: Mapping[str, int]) -> None:
        """Makes the next step of the leading jobs; the count is left to the caller."""
        channels, hidden, _, classes = self.sides
        offsets = [starts[f"{name}.{part}"] for name in self.layers for part in ("weight", "bias")]
        launching.kernels.mlp_step[(jobs,)](
            *vars(state).values(), state.rows.stride(0), len(state.samples), self.batch,
            *self.sides, *offsets,
            BATCH=_power(self.batch), IN=_power(channels), HIDDEN=_power(hidden), CHUNK=CHUNK,
            CLASSES=_power(classes), PROXIMAL=state.received is not state.rows,
            PRECISION=launching.precision(), num_warps=WARPS, num_stages=1,
        )  # fmt: skip


def _power(number: int) -> int:
    """The next power of two, at least what a matrix product takes."""
    return max(16, 1 << (number - 1).bit_length())
