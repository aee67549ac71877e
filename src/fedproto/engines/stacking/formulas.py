"""What lies between the matrix products of a stacked network: patches, pooling, activations.

Every function is a pure map of tensors without a loop over jobs or samples, so that the compiler
can turn each into one or two kernels. A convolution of T×T taps is split in two: patches along the
width of its input (`row_patches`), one matrix product, and a sum of its result shifted along the
height (`sum_shifted_rows`). That moves T times less memory than patches along both, and the
backward pass is the same with the two exchanged.

Shapes: J jobs, B samples of a batch, H × W pixels, I channels in, O channels out, T taps,
C classes, D units. Images lie as [J, B, H, W, channels].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

DEAD = 4
"""The code of a pooled cell that passes no gradient because nothing in it is positive."""


def full_patches(x: Tensor, taps: int, width: int) -> Tensor:
    """Patches along height and width, ``[J, B, H, W, I]`` to ``[J, B·H·W, width]``.

    A patch holds I·T·T numbers, channel first as in a convolution's weight; zeros fill it up to
    the width, whose alignment the fast matrix kernels ask for.
    """
    jobs, batch, height, across, channels = x.shape
    reach = taps // 2
    padded = F.pad(x, (0, 0, reach, reach, reach, reach))
    windows = padded.unfold(2, taps, 1).unfold(3, taps, 1)
    patches = windows.reshape(jobs, batch * height * across, channels * taps * taps)
    return F.pad(patches, (0, width - patches.shape[-1]))


def sum_full_patches(patches: Tensor, shape: torch.Size, taps: int) -> Tensor:
    """The transpose of `full_patches`: every number goes back to the pixel that it came from."""
    jobs, batch, height, width, channels = shape
    windows = patches[..., : channels * taps * taps].reshape(jobs * batch, height * width, -1)
    image = F.fold(windows.transpose(1, 2), (height, width), taps, padding=taps // 2)
    return image.movedim(1, -1).reshape(shape)


def row_patches(x: Tensor, taps: int) -> Tensor:
    """Patches along the width alone, ``[J, B, H, W, I]`` to ``[J, B·H·W, T·I]``."""
    jobs, batch, height, width, channels = x.shape
    reach = taps // 2
    padded = F.pad(x, (0, 0, reach, reach))
    shifted = [padded[:, :, :, tap : tap + width] for tap in range(taps)]
    return torch.stack(shifted, dim=4).view(jobs, batch * height * width, taps * channels)


def sum_row_patches(patches: Tensor, image: tuple[int, int], taps: int) -> Tensor:
    """The transpose of `row_patches`: every number goes back to the pixel that it came from."""
    height, width = image
    reach = taps // 2
    z = patches.view(patches.shape[0], -1, height, width, taps, patches.shape[-1] // taps)
    padded = F.pad(z, (0, 0, 0, 0, reach, reach))
    total = padded[:, :, :, 2 * reach : 2 * reach + width, 0]
    for tap in range(1, taps):
        start = 2 * reach - tap
        total = total + padded[:, :, :, start : start + width, tap]
    return total


def sum_shifted_rows(z: Tensor, image: tuple[int, int], taps: int) -> Tensor:
    """``y[h] = Σ_t z[h + t − T//2, t]``, ``[J, B·H·W, T·O]`` to ``[J, B, H, W, O]``."""
    height, width = image
    reach = taps // 2
    rows = z.view(z.shape[0], -1, height, width, taps, z.shape[-1] // taps)
    padded = F.pad(rows, (0, 0, 0, 0, 0, 0, reach, reach))
    total = padded[:, :, :height, :, 0]
    for tap in range(1, taps):
        total = total + padded[:, :, tap : tap + height, :, tap]
    return total


def shifted_rows(y: Tensor, taps: int) -> Tensor:
    """The transpose of `sum_shifted_rows`, ``[J, B, H, W, O]`` to ``[J, B·H·W, T·O]``."""
    jobs, batch, height, width, channels = y.shape
    reach = taps // 2
    padded = F.pad(y, (0, 0, 0, 0, reach, reach))
    shifted = [padded[:, :, 2 * reach - tap : 2 * reach - tap + height] for tap in range(taps)]
    return torch.stack(shifted, dim=4).view(jobs, batch * height * width, taps * channels)


def bias_relu_pool(y: Tensor, bias: Tensor, *, same: bool = False) -> tuple[Tensor, Tensor]:
    """Bias, 2×2 max pooling and ReLU, ``[J, B, H, W, O]`` to ``[J, B, H//2, W//2, O]``.

    Args:
        y: What a convolution gave.
        bias: ``[J, O]``.
        same: Whether an odd last row or column makes cells of its own, instead of none.

    Returns:
        The pooled cells and, per cell, which of its four pixels was the first maximum (`DEAD`
        where the ReLU stops the gradient): what `unpool` needs. The first of equal maxima counts,
        as in PyTorch: over an empty background equal values are the rule.
    """
    if same:
        y = F.pad(y, (0, 0, 0, y.shape[3] % 2, 0, y.shape[2] % 2), value=-torch.inf)
    height, width = y.shape[2] // 2 * 2, y.shape[3] // 2 * 2
    even, odd = slice(0, None, 2), slice(1, None, 2)
    cells = y[:, :, :height, :width]
    a, b = cells[:, :, even, even], cells[:, :, even, odd]
    c, d = cells[:, :, odd, even], cells[:, :, odd, odd]
    top = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
    code = torch.where(a == top, 0, torch.where(b == top, 1, torch.where(c == top, 2, 3)))
    top = top + bias[:, None, None, None, :]
    return top.relu(), torch.where(top > 0, code, DEAD).to(torch.uint8)


def unpool(dy: Tensor, code: Tensor, image: tuple[int, int]) -> Tensor:
    """The gradient before `bias_relu_pool`, ``[J, B, H//2, W//2, O]`` to ``[J, B, H, W, O]``."""
    jobs, batch, rows, columns, channels = dy.shape
    parts = [torch.where(code == index, dy, 0) for index in range(DEAD)]
    top = torch.stack(parts[:2], dim=4)
    bottom = torch.stack(parts[2:], dim=4)
    cells = torch.stack((top, bottom), dim=3).view(jobs, batch, 2 * rows, 2 * columns, channels)
    height, width = image
    return F.pad(cells, (0, 0, 0, width - 2 * columns, 0, height - 2 * rows))


def live_sum(dy: Tensor, code: Tensor) -> Tensor:
    """The bias's gradient of `bias_relu_pool`, ``[J, O]``."""
    return torch.where(code == DEAD, 0, dy).sum(dim=(1, 2, 3))


def moments(z: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of every channel over the samples that count, ``[J, O]`` each.

    Also the number of values that they are of, ``[J, 1]``.
    """
    weight = live.to(z.dtype)[:, :, None, None, None]
    count = (live.sum(dim=1, keepdim=True) * (z.shape[2] * z.shape[3])).clamp(min=1).to(z.dtype)
    mean = (z * weight).sum(dim=(1, 2, 3)) / count
    distance = (z - mean[:, None, None, None]) * weight
    return mean, distance.square().sum(dim=(1, 2, 3)) / count, count


def moved_statistics(
    running: Tensor,
    variance: Tensor,
    found: tuple[Tensor, ...],
    live: Tensor,
    momentum: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Running mean and variance after a batch; those of a job without samples stay."""
    mean, biased, count = found
    unbiased = biased * count / (count - 1).clamp(min=1)
    share = momentum * live.any(dim=1, keepdim=True).to(mean.dtype)
    return torch.lerp(running, mean, share), torch.lerp(variance, unbiased, share)


def norm_relu_pool(
    z: Tensor,
    mean: Tensor,
    variance: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    *,
    same: bool = False,
) -> tuple[Tensor, Tensor]:
    """Batch normalisation of ``[J, B, H, W, O]``, then as `bias_relu_pool`."""
    factor = scale * torch.rsqrt(variance + eps)
    centred = z - mean[:, None, None, None]
    return bias_relu_pool(centred * factor[:, None, None, None], shift, same=same)


def norm_backward(
    dy: Tensor,
    code: Tensor,
    z: Tensor,
    found: tuple[Tensor, ...],
    scale: Tensor,
    live: Tensor,
    eps: float,
    *,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients before `norm_relu_pool`: of z, of its bias, of scale and of shift.

    With statistics that are `frozen`, these do not depend on z.
    """
    mean, variance, count = found
    height, width = z.shape[2:4]
    gradient = unpool(dy, code, (height, width))
    inverse = torch.rsqrt(variance + eps)
    normed = (z - mean[:, None, None, None]) * inverse[:, None, None, None]
    dscale, dshift = (gradient * normed).sum(dim=(1, 2, 3)), gradient.sum(dim=(1, 2, 3))
    if not frozen:
        weight = live.to(z.dtype)[:, :, None, None, None]
        common = (dshift / count)[:, None, None, None]
        along = (dscale / count)[:, None, None, None]
        gradient = (gradient - common - normed * along) * weight
    dz = gradient * (scale * inverse)[:, None, None, None]
    return dz, dz.sum(dim=(1, 2, 3)), dscale, dshift


def bias_relu(z: Tensor, bias: Tensor) -> Tensor:
    """Bias and ReLU after a dense layer, ``[J, B, D]``."""
    return (z + bias.unsqueeze(1)).relu()


def relu_backward(dh: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients before `bias_relu`: of the products ``[J, B, D]`` and of the bias ``[J, D]``."""
    dz = torch.where(h > 0, dh, 0)
    return dz, dz.sum(dim=1)


def cross_entropy(
    z: Tensor,
    bias: Tensor,
    targets: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Cross-entropy of stacked scores and its gradient.

    Args:
        z: Scores without their bias, ``[J, B, C]``.
        bias: ``[J, C]``.
        targets: ``[J, B]``.
        weight: What each sample counts in the gradient, ``[J, B]``.
        scale: What the scores of a class are multiplied by before the loss sees them, ``[J, C]``.
        offset: And what is added to them then, ``[J, C]``.

    Returns:
        The loss per sample ``[J, B]``, the gradient of the scores and that of the bias.
    """
    scores = z + bias.unsqueeze(1)
    if scale is not None and offset is not None:
        scores = scores * scale.unsqueeze(1) + offset.unsqueeze(1)
    log_p = F.log_softmax(scores, dim=-1)
    hit = targets.unsqueeze(-1) == torch.arange(z.shape[-1], device=z.device)
    loss = -torch.where(hit, log_p, 0).sum(dim=-1)
    dz = (log_p.exp() - hit.to(z.dtype)) * weight.unsqueeze(-1)
    if scale is not None:
        dz = dz * scale.unsqueeze(1)
    return loss, dz, dz.sum(dim=1)
