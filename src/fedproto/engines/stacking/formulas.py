"""The elementwise parts of a stacked network, between its matrix products.

Every function is a pure map of tensors without a loop over jobs or samples, so that the compiler
can turn each into one or two kernels.

Shapes: J jobs, B samples of a batch, H × W pixels, I channels in, O channels out, T taps,
C classes, D units. Images lie as [J, B, H, W, channels].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.utils._pytree import tree_leaves

Function: TypeAlias = Callable[..., Any]
Fuse: TypeAlias = Callable[[Function], Function]
"""Compiles a function of tensors, or leaves it as it is."""

DEAD = 4
"""The code of a pooled cell that passes no gradient because nothing in it is positive."""


def unfused(function: Function) -> Function:
    """Leaves a function as it is."""
    return function


class Compiled:
    """Compiles functions of stacked tensors, each once for any number of jobs."""

    def __init__(self) -> None:
        self._known: dict[Function, Function] = {}
        # Which softmax algorithm the compiler chooses is nothing that a user could change.
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")

    def __call__(self, function: Function) -> Function:
        """The compiled form; the first dimension of tensors may vary from call to call."""
        if function not in self._known:
            compiled = torch.compile(function)

            def call(*args: Any, **kwargs: Any) -> Any:
                for leaf in tree_leaves(args):
                    if isinstance(leaf, Tensor) and leaf.dim():
                        torch._dynamo.maybe_mark_dynamic(leaf, 0)
                return compiled(*args, **kwargs)

            self._known[function] = call
        return self._known[function]


def relu_pool(y: Tensor, *, same: bool = False) -> tuple[Tensor, Tensor]:
    """2×2 max pooling and ReLU, ``[J, B, H, W, O]`` to ``[J, B, H//2, W//2, O]``.

    Args:
        y: The output of a convolution, bias included.
        same: Whether an odd last row or column makes cells of its own, instead of none.

    Returns:
        The pooled cells and, per cell, which of its four pixels was the first maximum (`DEAD`
        where the ReLU stops the gradient), for `unpool`. The first of equal maxima gets the
        gradient, as in PyTorch: over an empty background equal values are the rule.
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
    return top.relu(), torch.where(top > 0, code, DEAD).to(torch.uint8)


def unpool(dy: Tensor, code: Tensor, image: tuple[int, int]) -> Tensor:
    """The gradient before `relu_pool`, ``[J, B, H//2, W//2, O]`` to ``[J, B, H, W, O]``."""
    jobs, batch, rows, columns, channels = dy.shape
    parts = [torch.where(code == index, dy, 0) for index in range(DEAD)]
    top = torch.stack(parts[:2], dim=4)
    bottom = torch.stack(parts[2:], dim=4)
    cells = torch.stack((top, bottom), dim=3).view(jobs, batch, 2 * rows, 2 * columns, channels)
    height, width = image
    return F.pad(cells, (0, 0, 0, width - 2 * columns, 0, height - 2 * rows))


def live_sum(dy: Tensor, code: Tensor) -> Tensor:
    """The gradient of a bias before `relu_pool`, ``[J, O]``."""
    return torch.where(code == DEAD, 0, dy).sum(dim=(1, 2, 3), dtype=wide(dy))


def wide(z: Tensor) -> torch.dtype:
    """The type to sum numbers in: float32 for those of half precision."""
    return torch.float32 if z.itemsize < 4 else z.dtype


def moments(z: Tensor, live: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means and variances that a normalisation divides by, of values ``[J, B, P, O]``.

    Args:
        z: Values of P pixels.
        live: Which samples exist; the others do not count.
        groups: Of channels, each normalised on its own in each sample; 0 for channels that are
            normalised over the batch.

    Returns:
        Means and variances, ``[J, 1, 1, 1, O]`` of channels or ``[J, B, 1, G, 1]`` of groups, and
        how many values each is of, ``[J, 1, 1, 1, 1]``.
    """
    z, over = _grouped(z, groups)
    if groups:
        count = torch.full_like(z[:, :1, :1, :1, :1], z.shape[2] * z.shape[4])
        mean = z.mean(dim=over, keepdim=True)
        return mean, (z - mean).square().mean(dim=over, keepdim=True), count
    weight = live.to(z.dtype)[:, :, None, None, None]
    count = (live.sum(dim=1) * z.shape[2]).clamp(min=1).to(z.dtype)[:, None, None, None, None]
    mean = (z * weight).sum(dim=over, keepdim=True) / count
    distance = (z - mean) * weight
    return mean, distance.square().sum(dim=over, keepdim=True) / count, count


def _grouped(z: Tensor, groups: int) -> tuple[Tensor, tuple[int, int]]:
    """Values as ``[J, B, P, G, O/G]``, and the dimensions that are normalised together."""
    together = (2, 4) if groups else (1, 2)
    return z.to(wide(z)).unflatten(-1, (max(groups, 1), -1)), together


def moved_statistics(
    running: Tensor,
    variance: Tensor,
    found: tuple[Tensor, ...],
    live: Tensor,
    momentum: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Running mean and variance after a batch; those of a job without samples stay."""
    mean, biased, count = (one.flatten(1) for one in found)
    unbiased = biased * count / (count - 1).clamp(min=1)
    share = momentum * live.any(dim=1, keepdim=True).to(mean.dtype)
    return torch.lerp(running, mean, share), torch.lerp(variance, unbiased, share)


def normed(
    z: Tensor,
    mean: Tensor,
    variance: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    eps: float,
    *,
    groups: int,
    relu: bool,
) -> Tensor:
    """Normalised values ``[J, B, P, O]`` in scale and shift ``[J, O]``, plus a residual."""
    own, _ = _grouped(z, groups)
    y = (own - mean) * torch.rsqrt(variance + eps)
    sides = (len(z), 1, 1, *own.shape[3:])
    y = (y * scale.view(sides) + shift.view(sides)).flatten(3)
    if residual is not None:
        y = y + residual
    return (y.relu() if relu else y).to(z.dtype)


def norm_backward(
    dy: Tensor,
    y: Tensor | None,
    z: Tensor,
    found: tuple[Tensor, ...],
    scale: Tensor,
    live: Tensor,
    eps: float,
    *,
    groups: int,
    frozen: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients before `normed`: of z, of scale and shift ``[J, O]``, and of the residual.

    Args:
        dy: The gradient of the output ``[J, B, P, O]``.
        y: The output, where it passed a ReLU.
        z: Input of `normed`.
        found: What `moments` gave.
        scale: ``[J, O]``.
        live: Which samples exist.
        eps: As in `normed`.
        groups: As in `moments`.
        frozen: Whether the statistics do not depend on z.
    """
    gradient = dy if y is None else torch.where(y > 0, dy, 0)
    mean, variance, count = found
    own, together = _grouped(z, groups)
    slope, _ = _grouped(gradient, groups)
    inverse = torch.rsqrt(variance + eps)
    standard = (own - mean) * inverse
    dscale, dshift = (slope * standard).sum(dim=(1, 2)), slope.sum(dim=(1, 2))
    slope = slope * scale.view(len(z), 1, 1, *own.shape[3:])
    if not frozen:
        # Single values are normalised by known statistics, which do not depend on them.
        share = 1 / count if groups else torch.where(count > 1, 1 / count, 0)
        common = slope.sum(dim=together, keepdim=True) * share
        along = (slope * standard).sum(dim=together, keepdim=True) * share
        weight = live.to(own.dtype)[:, :, None, None, None]
        slope = (slope - common - standard * along) * weight
    dz = (slope * inverse).flatten(3).to(z.dtype)
    return dz, dscale.flatten(1), dshift.flatten(1), gradient


def bias_relu(z: Tensor, bias: Tensor) -> Tensor:
    """Bias and ReLU after a dense layer, ``[J, B, D]``."""
    return (z + bias.unsqueeze(1)).relu()


def relu_backward(dh: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients before bias and ReLU: of the products ``[J, …, D]`` and of the bias ``[J, D]``."""
    dz = torch.where(h > 0, dh, 0)
    return dz, dz.sum(dim=tuple(range(1, dz.dim() - 1)), dtype=wide(dz))


def cross_entropy(
    z: Tensor,
    bias: Tensor,
    targets: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Cross-entropy of stacked logits and its gradient.

    Args:
        z: Logits without their bias, ``[J, B, C]``.
        bias: ``[J, C]``.
        targets: ``[J, B]``.
        weight: The samples' weights in the gradient, ``[J, B]``.
        scale: Factors of the logits in the loss, ``[J, C]``.
        offset: Added to the scaled logits, ``[J, C]``.

    Returns:
        The loss per sample ``[J, B]``, the gradient of the logits and that of the bias.
    """
    logits = z + bias.unsqueeze(1)
    if scale is not None and offset is not None:
        logits = logits * scale.unsqueeze(1) + offset.unsqueeze(1)
    log_p = F.log_softmax(logits, dim=-1)
    hit = targets.unsqueeze(-1) == torch.arange(z.shape[-1], device=z.device)
    loss = -torch.where(hit, log_p, 0).sum(dim=-1)
    dz = (log_p.exp() - hit.to(z.dtype)) * weight.unsqueeze(-1)
    if scale is not None:
        dz = dz * scale.unsqueeze(1)
    return loss, dz, dz.sum(dim=1)
