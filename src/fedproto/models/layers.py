"""Layers that PyTorch lacks and that engines know."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

EPSILON = 1e-5


def standardized(filters: Tensor, dim: int) -> Tensor:
    """Filters less their mean, over their standard deviation, along the dimension of their taps."""
    centred = filters - filters.mean(dim=dim, keepdim=True)
    return centred / (filters.std(dim=dim, keepdim=True) + EPSILON)


class StandardizedConv2d(nn.Conv2d):
    """A convolution with weight standardisation (Qiao et al. 2019).

    Every filter is used as ``(w − mean) / (std + ε)`` over its inputs and taps.
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[B, channels, H, W]`` to ``[B, out, H / stride, W / stride]``."""
        weight = standardized(self.weight.flatten(1), dim=1).view_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)
