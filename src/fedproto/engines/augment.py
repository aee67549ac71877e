"""Augmentation: random scale, crop and flip of training images and their label maps.

What happens to an image is a pure function of seed, round, client, epoch and the image's place
among the client's own, so it is the same in every engine and for every strategy. A whole batch is
transformed at once, on whatever device it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.samples import upload
from fedproto.errors import ConfigError
from fedproto.options import Options, option
from fedproto.rng import Purpose, stream
from fedproto.rng.schedule import BatchOrder
from fedproto.types import VOID

_DRAWS = 4


@dataclass(frozen=True)
class AugmentOptions(Options):
    """Augmentation of training images; by default none."""

    flip: bool = option(False, "mirror images horizontally with probability 1/2")
    scale: tuple[float, ...] = option(
        (1.0, 1.0), "range of the random factor by which an image is resized"
    )
    pad: int = option(
        0, "zero padding on each side before a random crop of the image's size", at_least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.scale) != 2 or not 0 < self.scale[0] <= self.scale[1]:
            raise ConfigError(
                f"scale must be a smallest and a largest factor above 0, not {list(self.scale)}"
            )

    @property
    def active(self) -> bool:
        """Whether there is any augmentation."""
        return self != AugmentOptions()

    def check_fits(self, input_shape: tuple[int, ...]) -> None:
        """Checks that inputs of a shape can be augmented."""
        if self.active and len(input_shape) != 3:
            raise ConfigError(f"augment works on images, not on inputs of shape {input_shape}")

    def draws(self, order: BatchOrder, epoch: int) -> NDArray[np.float64]:
        """Numbers between 0 and 1 for every sample of a client in one epoch, ``[n, 4]``."""
        rng = stream(order.seed, Purpose.AUGMENT, order.round, order.client, epoch)
        return rng.random_sample((order.num_examples, _DRAWS))

    def apply(
        self, inputs: Tensor, targets: Tensor, draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Varies a batch.

        An image is resized by a factor between the two of `scale`, the larger ones as rarely as the
        smaller ones (uniform in the logarithm), and a window of its former size is cut out at
        random. Where the image is smaller than the window it lies somewhere in it; around it are
        zeros (the mean colour of normalised images) and void. `pad` is the usual padded random
        crop: the window is moved by whole pixels, and may leave the image by this number.

        Label maps ``[B, H, W]`` follow their images; labels ``[B]`` stay as they are.
        """
        plan = self.plan(draws, tuple(inputs.shape[-2:]))
        plan = plan.to(inputs.dtype) if plan.is_floating_point() else plan
        return self.vary(inputs, targets, upload(plan, inputs.device))

    def plan(self, draws: NDArray[np.float64], size: tuple[int, ...]) -> Tensor:
        """The transforms for images of a size: integer `moves`, or else maps ``[B, 2, 3]``.

        A map leads from places in the window to places in the image.
        """
        if self.moves_only:
            return torch.from_numpy(self.moves(draws))
        return torch.from_numpy(self._affine(draws, size))

    @property
    def moves_only(self) -> bool:
        """Whether images keep their size and are only shifted by whole pixels, or mirrored."""
        return self.scale == (1.0, 1.0)

    def moves(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Shift of each image in pixels, down and to the right, and whether it is mirrored.

        Where `moves_only` holds, ``[B, 3]``.
        """
        starts = np.floor(draws[:, 1:3] * (2 * self.pad + 1)) - self.pad
        mirrored = (draws[:, 3:] < 0.5) & self.flip
        return np.concatenate([starts[:, ::-1], mirrored], axis=1).astype(np.int64)

    def vary(self, inputs: Tensor, targets: Tensor, plan: Tensor) -> tuple[Tensor, Tensor]:
        """Augments a batch by its `plan`."""
        if not plan.is_floating_point():
            index = torch.arange(len(inputs), device=inputs.device)
            images = gather_moved(inputs.permute(0, 2, 3, 1), index, plan, 0).permute(0, 3, 1, 2)
            if targets.dim() == 1:
                return images.contiguous(), targets
            return images.contiguous(), gather_moved(targets[..., None], index, plan, VOID)[..., 0]
        grid = F.affine_grid(plan, [len(inputs), 1, *inputs.shape[-2:]], align_corners=False)
        varied = F.grid_sample(inputs, grid, mode="bilinear", align_corners=False)
        if targets.dim() == 1:
            return varied, targets
        # Outside of the image lie zeros: shifted by it, void is zero.
        shifted = (targets - VOID).unsqueeze(1).to(inputs.dtype)
        moved = F.grid_sample(shifted, grid, mode="nearest", align_corners=False)
        return varied, moved.squeeze(1).to(targets.dtype) + VOID

    def _affine(self, draws: NDArray[np.float64], size: tuple[int, ...]) -> NDArray[np.float64]:
        """The maps ``[B, 2, 3]`` from places in the window to places in the image, both in [-1, 1].

        In pixels along one side: the window's start lies at ``u·(s·size − size)`` of the image
        resized by s, which is left of the image or inside of it as s is below 1 or above.
        """
        low, high = self.scale
        scale = low * (high / low) ** draws[:, 0]
        theta = np.zeros((len(draws), 2, 3))
        # The map's first row is about x (width), its second about y (height).
        for row, side in ((0, 1), (1, 0)):
            room = scale * size[side] - size[side]
            start = draws[:, 1 + row] * room
            if self.pad:
                start = np.floor(draws[:, 1 + row] * (np.floor(room) + 2 * self.pad + 1)) - self.pad
            theta[:, row, row] = size[side] / (scale * size[side])
            theta[:, row, 2] = (2 * start + size[side]) / (scale * size[side]) - 1
        if self.flip:
            theta[:, 0, 0] *= np.where(draws[:, 3] < 0.5, -1.0, 1.0)
        return theta


def gather_moved(inputs: Tensor, index: Tensor, moves: Tensor, outside: float) -> Tensor:
    """Images ``[N, H, W, channels]`` at some indices ``[…]``, moved and mirrored ``[…, 3]``."""
    height, width = inputs.shape[1:3]
    down, right, mirrored = (moves[..., one, None] for one in range(3))
    row = torch.arange(height, device=inputs.device) + down
    column = torch.arange(width, device=inputs.device)
    column = torch.where(mirrored > 0, width - 1 - column, column) + right
    rows, columns = (row >= 0) & (row < height), (column >= 0) & (column < width)
    exists = rows[..., :, None, None] & columns[..., None, :, None]
    row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
    found = inputs[index[..., None, None], row[..., :, None], column[..., None, :]]
    return torch.where(exists, found, outside)
