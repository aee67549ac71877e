"""Convolutions as products of spectra: less arithmetic for wide kernels on small images.

A convolution is, frequency by frequency, a plain product. Images of the sizes met here have so few
frequencies that their Fourier transform is two matrix products with small constant matrices, one
along the width and one along the height. Nothing is approximated: the result differs from the
direct sum by rounding alone.

An image of height H is transformed as one of height N = H + T//2 with zeros below: what a kernel of
T taps reaches for beyond either border is then empty. Images are real, so half of the frequencies
along the width tell all. A complex product is made of real ones: a spectrum's real and imaginary
parts lie below each other as rows of one matrix.

Shapes: H × W pixels, B samples of a batch, I channels in, O channels out, T taps, V frequencies
along the width and N along the height, F = V·N. Images lie as [H, W, B, channels].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Spectra(NamedTuple):
    """Values of the forward pass for the backward pass.

    Attributes:
        x: Of the input: real part, imaginary part and the negative of the real part,
            ``[F, 3·B, I]``. Its first two thirds are ``x`` and its last two thirds ``−i·x``.
        kernel: ``[F, 2, I, O]``.
    """

    x: Tensor
    kernel: Tensor


class SpectralConvolution:
    """Convolutions of one size that keep the image's size, forward and backward."""

    def __init__(self, image: tuple[int, int], taps: int, dtype: torch.dtype) -> None:
        reach = taps // 2
        period = image[0] + reach, image[1] + reach
        # A kernel is laid over the image, not mirrored: its taps count backwards.
        offsets = reach - torch.arange(taps)
        self._taps = taps
        self._images = _Fourier(period, (torch.arange(image[0]), torch.arange(image[1])), dtype)
        self._kernels = _Fourier(period, (offsets, offsets), dtype)

    def forward(self, x: Tensor, kernel: Tensor) -> tuple[Tensor, Spectra]:
        """The convolution of ``[H, W, B, I]`` with ``[T·T, I, O]``: ``[H, W, B, O]``."""
        batch = x.shape[2]
        of_x = self._turned(x)
        square = kernel.view(self._taps, self._taps, -1)
        of_kernel = self._kernels.transform(square, parts=2).view(-1, 2, *kernel.shape[1:])
        # x·(c + d·i) = x·c − (−i·x)·d
        of_y = torch.bmm(of_x[:, : 2 * batch], of_kernel[:, 0])
        of_y.baddbmm_(of_x[:, batch:], of_kernel[:, 1], alpha=-1)
        return self._image(of_y, batch), Spectra(of_x, of_kernel)

    def backward(self, dy: Tensor, saved: Spectra) -> tuple[Tensor, Tensor]:
        """The gradient of the input, ``[H, W, B, I]``, and the spectrum of the kernel's."""
        batch = dy.shape[2]
        of_dy = self._turned(dy)
        real, imaginary = saved.kernel.transpose(2, 3).unbind(1)
        # Transposing conjugates: dy·(c − d·i) = dy·c + (−i·dy)·d, and likewise for the kernel.
        of_dx = torch.bmm(of_dy[:, : 2 * batch], real)
        of_dx.baddbmm_(of_dy[:, batch:], imaginary)
        x = saved.x[:, : 2 * batch].transpose(1, 2)
        # Over the kernel's own spectrum, which is done with and still in the processor's cache.
        of_dkernel = saved.kernel.view(2, *x.shape[:2], dy.shape[3])
        torch.bmm(x, of_dy[:, : 2 * batch], out=of_dkernel[0])
        torch.bmm(x, of_dy[:, batch:], out=of_dkernel[1])
        return self._image(of_dx, batch), of_dkernel

    def descend(self, kernel: Tensor, of_dkernel: Tensor, rate: float) -> None:
        """Subtracts `rate` times the gradient with that spectrum from the kernel, in place."""
        square = kernel.view(self._taps, self._taps, -1)
        spectrum = of_dkernel.view(2, *self._kernels.frequencies, -1).permute(1, 2, 0, 3)
        square.baddbmm_(*self._kernels.last_step_back(spectrum), alpha=-rate)

    def _turned(self, x: Tensor) -> Tensor:
        """An image's spectrum as in `Spectra.x`."""
        return self._images.transform(x.flatten(2), parts=3).view(-1, 3 * x.shape[2], x.shape[3])

    def _image(self, spectrum: Tensor, batch: int) -> Tensor:
        spectrum = spectrum.view(*self._images.frequencies, 2, -1)
        image = torch.bmm(*self._images.last_step_back(spectrum))
        return image.view(*image.shape[:2], batch, -1)


class _Fourier:
    """The Fourier transform of real numbers on a rectangle, as matrix products."""

    def __init__(
        self, period: tuple[int, int], positions: tuple[Tensor, Tensor], dtype: torch.dtype
    ) -> None:
        height, width = period
        half = width // 2 + 1
        self.frequencies = half, height
        down, across = _waves(height, height, positions[0]), _waves(half, width, positions[1])
        rows, columns = len(positions[0]), len(positions[1])
        both = torch.stack((across.real, across.imag)).view(2 * half, columns)
        self._across = both.to(dtype).expand(rows, -1, -1)
        product = _real_product(down)
        turned = torch.cat((product, -product[:, :1]), dim=1)
        self._down = {
            parts: turned[:, :parts].reshape(-1, 2 * rows).to(dtype).expand(half, -1, -1)
            for parts in (2, 3)
        }
        # Back again is the transpose over the number of frequencies. A wave across counts for its
        # mirror image too, unless it is its own.
        own = (torch.arange(half) * 2) % width == 0
        weight = torch.where(own, 1.0, 2.0).double().view(half, 1, 1) / (height * width)
        back = torch.stack((across.real, across.imag), dim=1) * weight
        back = back.view(2 * half, columns).t().contiguous()
        self._across_back = back.to(dtype).expand(rows, -1, -1)
        by_part = product.permute(1, 3, 2, 0).reshape(2, 2 * rows, height).to(dtype)
        self._down_back = [part.expand(half, -1, -1) for part in by_part]

    def transform(self, x: Tensor, *, parts: int) -> Tensor:
        """``[H, W, P]`` to ``[V, N·parts, P]``; a third part is the first with its sign turned."""
        across = torch.bmm(self._across, x)
        by_frequency = across.view(2 * len(x), self.frequencies[0], -1).transpose(0, 1)
        return torch.bmm(self._down[parts], by_frequency)

    def last_step_back(self, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        """From ``[V, N, 2, P]`` two matrices per row whose product is the image ``[H, W, P]``.

        The product is left to the caller, who may want it added to something.
        """
        real, imaginary = self._down_back
        by_frequency = torch.bmm(real, spectrum[:, :, 0])
        by_frequency.baddbmm_(imaginary, spectrum[:, :, 1])
        rows = len(self._across_back)
        by_row = by_frequency.view(-1, rows, by_frequency.shape[2]).transpose(0, 1)
        return self._across_back, by_row


def _waves(number: int, period: int, positions: Tensor) -> Tensor:
    """``exp(−2πi·f·p / period)`` for the first frequencies f and all positions p."""
    turns = torch.arange(number).unsqueeze(1) * positions % period
    angle = -2 * math.pi * turns.double() / period
    return torch.complex(angle.cos(), angle.sin())


def _real_product(matrix: Tensor) -> Tensor:
    """A complex matrix ``[A, B]`` as a real one, ``[A, 2, B, 2]``: parts out, parts in."""
    real, imaginary = matrix.real, matrix.imag
    to_real = torch.stack((real, -imaginary), dim=-1)
    to_imaginary = torch.stack((imaginary, real), dim=-1)
    return torch.stack((to_real, to_imaginary), dim=1)
