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
    return torch.where(code == DEAD, 0, dy).sum(dim=(1, 2, 3))


def moments(z: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of every channel over the live samples, ``[J, O]`` each.

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
    """Batch normalisation of ``[J, B, H, W, O]``, then as `relu_pool`."""
    factor = scale * torch.rsqrt(variance + eps)
    centred = z - mean[:, None, None, None]
    return relu_pool(centred * factor[:, None, None, None] + shift[:, None, None, None], same=same)


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

    Statistics that are `frozen` do not depend on z.
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
