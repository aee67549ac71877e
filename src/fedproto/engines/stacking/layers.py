"""The steps of a stacked network with their own backward passes.

A layer keeps its weight in the layout that its products need; `pack` and `unpack` convert from and
to the module's own. `forward` gives the output in training and the values that `backward` needs;
`backward` gives the gradients of the inputs and of the parameters. On CUDA in float32 the products
are the kernels of `fedproto.engines.stacking.kernels`; elsewhere they are PyTorch's batched
products and grouped convolutions, which compute the same.

Shapes: as in `fedproto.engines.stacking.formulas`; "..." stands for any leading dimensions. Of the
samples of a batch only the `live` ones ``[J, B]`` exist; the others fill it up.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.nn.grad import conv2d_input, conv2d_weight

from fedproto.engines.layers import dropout_factors
from fedproto.engines.stacking import formulas, launching
from fedproto.engines.stacking.formulas import Fuse, unfused
from fedproto.engines.tracing import (
    ConvStep,
    DenseStep,
    DropoutStep,
    LayerStep,
    NormStep,
    PlainStep,
    Step,
)
from fedproto.models.layers import standardized
from fedproto.types import Tensors


@dataclass(frozen=True)
class Pending:
    """A gradient that is not computed yet.

    Plain gradient descent subtracts it from the weight in place, which saves writing and reading a
    gradient as large as the weight itself.
    """

    compute: Callable[[], Tensor]
    subtract_from: Callable[[Tensor], object]


Gradient: TypeAlias = Tensor | Pending


def product(left: Tensor, right: Tensor) -> Pending:
    """The gradient ``left @ right``, ``[J, M, K]`` and ``[J, K, N]``."""
    return Pending(
        lambda: torch.bmm(left, right), lambda weight: weight.baddbmm_(left, right, alpha=-1)
    )


def computed(gradient: Gradient) -> Tensor:
    """The gradient as a tensor."""
    return gradient.compute() if isinstance(gradient, Pending) else gradient


@dataclass(frozen=True, kw_only=True)
class Stacked(Step, abc.ABC):
    """A step of many models at once."""

    @abc.abstractmethod
    def forward(
        self, params: Tensors, xs: Sequence[Tensor], fuse: Fuse, live: Tensor
    ) -> tuple[Any, Any]:
        """The output, and what `backward` needs."""

    @abc.abstractmethod
    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Gradient]]:
        """Gradients of the inputs (unused in the first step) and of the parameters."""

    def evaluate(self, params: Tensors, xs: Sequence[Tensor], live: Tensor) -> Any:
        """The output in evaluation."""
        return self.forward(params, xs, unfused, live)[0]


@dataclass(frozen=True, kw_only=True)
class Layer(Stacked, LayerStep):
    """A step with a weight.

    Attributes:
        kernels: Whether it is computed by kernels.
    """

    kernels: bool = False

    @property
    def weight_name(self) -> str:
        """The name of its weight."""
        return f"{self.name}.weight"

    def pack(self, weight: Tensor) -> Tensor:
        """The module's weight in the layer's layout."""
        return weight

    def unpack(self, weight: Tensor) -> Tensor:
        """The opposite."""
        return weight

    def _bias(self, params: Tensors) -> Tensor | None:
        return params[f"{self.name}.bias"] if self.bias else None


@dataclass(frozen=True, kw_only=True)
class Dense(Layer, DenseStep):
    """A dense layer; small batches may go through kernels, which read the weight once per pass.

    Images lie channels last here, so the columns of a weight that takes one are put in that order.
    """

    def pack(self, weight: Tensor) -> Tensor:
        """Columns from channels first to channels last."""
        if self.image is None:
            return weight
        split: Tensor = weight.unflatten(-1, self.image)
        return split.movedim(-3, -1).reshape(*weight.shape[:-1], self.units_in)

    def unpack(self, weight: Tensor) -> Tensor:
        """Columns from channels last to channels first."""
        if self.image is None:
            return weight
        channels, height, width = self.image
        split: Tensor = weight.unflatten(-1, (height, width, channels))
        return split.movedim(-1, -3).reshape(*weight.shape[:-1], self.units_in)

    def forward(
        self, params: Tensors, xs: Sequence[Tensor], fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """``[J, B, …]`` to ``[J, B, D]``."""
        x, bias, weight = xs[0].flatten(2), self._bias(params), params[self.weight_name]
        if self._uses_kernels(x):
            h = launching.dense_forward(x, weight, bias, relu=self.relu)
        else:
            z = torch.bmm(x, weight.to(x.dtype).transpose(1, 2))
            if self.relu and bias is not None:
                h = fuse(formulas.bias_relu)(z, bias.to(x.dtype))
            else:
                h = z if bias is None else z + bias.to(x.dtype).unsqueeze(1)
                h = h.relu() if self.relu else h
        return h, (x, h if self.relu else None, xs[0].shape)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Gradient]]:
        """The weight's gradient is the product ``dzᵀ x``."""
        x, h, shape = saved
        weight, gradients = params[self.weight_name], dict[str, Gradient]()
        dz, db = dy, None
        if h is not None:
            dz, db = fuse(formulas.relu_backward)(dy, h)
        if self.bias:
            gradients[f"{self.name}.bias"] = dy.sum(dim=1) if db is None else db
        by_kernels = self._uses_kernels(x)
        if x.dtype == weight.dtype:
            gradient = product(dz.transpose(1, 2), x)
        else:
            small = product(dz.transpose(1, 2), x).compute
            gradient = Pending(
                lambda: small().to(weight.dtype), lambda own: own.sub_(small().to(weight.dtype))
            )
        if by_kernels:
            gradient = replace(
                gradient, subtract_from=lambda own: launching.dense_descend(dz, x, own)
            )
        gradients[self.weight_name] = gradient
        if first:
            return [None], gradients
        if by_kernels:
            dx = launching.dense_input_gradient(dz, weight)
        else:
            dx = torch.bmm(dz, weight.to(dz.dtype))
        return [dx.view(shape)], gradients

    def _uses_kernels(self, x: Tensor) -> bool:
        return self.kernels and x.shape[1] <= launching.LARGEST_BATCH


@dataclass(frozen=True, kw_only=True)
class Conv(Layer, ConvStep):
    """A convolution, perhaps with ReLU or with ReLU and 2×2 max pooling."""

    def pack(self, weight: Tensor) -> Tensor:
        """``[..., O, I, T, T]`` to ``[..., T·T·I, O]``."""
        moved: Tensor = weight.movedim(-4, -1).movedim(-4, -2)
        return moved.flatten(-4, -2)

    def unpack(self, weight: Tensor) -> Tensor:
        """The opposite of `pack`."""
        split: Tensor = weight.unflatten(-2, (*self.taps, self.channels[0]))
        return split.movedim(-2, -4).movedim(-1, -4).contiguous()

    def forward(
        self, params: Tensors, xs: Sequence[Tensor], fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H', W', O]``."""
        x, bias, weight = xs[0], self._bias(params), params[self.weight_name]
        standard: tuple[Tensor, ...] = ()
        if self.standardize:
            with torch.enable_grad():
                own = weight.detach().requires_grad_()
                standard = own, standardized(own, dim=-2)
            weight = standard[1].detach()
        code = None
        if self.kernels and self.pool != "same":
            y, code = launching.conv_forward(self, x, weight, bias)
        else:
            y = self._convolve(x, weight, bias)
            if self.pool:
                y, code = fuse(formulas.relu_pool)(y, same=self.pool == "same")
            elif self.relu:
                y = y.relu()
        return y, (x, y if self.relu else None, code, weight, standard)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Gradient]]:
        """Through pooling and ReLU, then through the convolution."""
        x, y, code, weight, standard = saved
        bias: Tensor | None = None
        if code is not None:
            dy = dy.view(code.shape)
            bias = fuse(formulas.live_sum)(dy, code) if self.bias else None
        elif y is not None:
            dy, bias = fuse(formulas.relu_backward)(dy, y)
        elif self.bias:
            bias = dy.sum(dim=(1, 2, 3), dtype=formulas.wide(dy))
        gradients: dict[str, Gradient] = {}
        if self.bias and bias is not None:
            gradients[f"{self.name}.bias"] = bias
        gradient = self.weight_gradient(x, dy, code)
        if standard:
            own, used = standard
            (found,) = torch.autograd.grad(used, own, gradient.compute())
            gradients[self.weight_name] = found
        else:
            gradients[self.weight_name] = gradient
        if first:
            return [None], gradients
        if code is not None:
            dy = fuse(formulas.unpool)(dy, code, self.sides)
        return [self.input_gradient(x, weight, dy)], gradients

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = self.unpack(weight).flatten(0, 1).to(x.dtype)
        shift = None if bias is None else bias.flatten().to(x.dtype)
        y = F.conv2d(_side_by_side(x), flat, shift, self.stride, self.padding, groups=len(x))
        return _apart(y, len(x))

    def input_gradient(self, x: Tensor, weight: Tensor, dz: Tensor) -> Tensor:
        """The gradient ``[J, B, H, W, I]`` of the input, from that of the convolution."""
        if self.kernels:
            return launching.conv_input_gradient(self, x, dz, weight)
        jobs, batch = dz.shape[:2]
        size = (batch, jobs * self.channels[0], *self.image)
        flat, out = self.unpack(weight).flatten(0, 1).to(dz.dtype), _side_by_side(dz)
        return _apart(conv2d_input(size, flat, out, self.stride, self.padding, 1, jobs), jobs)

    def weight_gradient(self, x: Tensor, dy: Tensor, code: Tensor | None = None) -> Pending:
        """The packed weight's gradient, from that of the convolution or of pooled cells."""
        if self.kernels and self.pool != "same":
            compute = functools.partial(launching.conv_weight_gradient, self, x, dy, code)
            return Pending(compute, compute)

        def compute_portably() -> Tensor:
            dz = dy if code is None else formulas.unpool(dy, code, self.sides)
            jobs, (ins, outs) = len(x), self.channels
            size = (jobs * outs, ins, *self.taps)
            images = _side_by_side(x), _side_by_side(dz)
            found = conv2d_weight(images[0], size, images[1], self.stride, self.padding, 1, jobs)
            return self.pack(found.unflatten(0, (jobs, outs)))

        return Pending(compute_portably, lambda weight: weight.sub_(compute_portably()))


def _side_by_side(x: Tensor) -> Tensor:
    """``[J, B, H, W, channels]`` to ``[B, J·channels, H, W]``, for a grouped convolution."""
    return x.permute(1, 0, 4, 2, 3).flatten(1, 2)


def _apart(y: Tensor, jobs: int) -> Tensor:
    """The opposite of `_side_by_side`."""
    split: Tensor = y.unflatten(1, (jobs, -1))
    return split.permute(1, 0, 3, 4, 2).contiguous()


@dataclass(frozen=True, kw_only=True)
class Norm(Layer, NormStep):
    """Batch or group normalisation, then perhaps a residual sum, ReLU or pooling.

    Under batch normalisation every job is normalised by the statistics of its own batch. Running
    statistics lie among the tensors that the layer is given, and are updated there. A layer that
    keeps none normalises by the batch in evaluation too.

    Attributes:
        frozen: Normalise by the running statistics in training too, and leave them as they are.
    """

    frozen: bool = False

    def evaluate(self, params: Tensors, xs: Sequence[Tensor], live: Tensor) -> Tensor:
        """By the running statistics, where there are any."""
        return replace(self, frozen=True).forward(params, xs, unfused, live)[0]

    def forward(
        self, params: Tensors, xs: Sequence[Tensor], fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """``[J, B, …, O]`` to the same, or to ``[J, B, H//2, W//2, O]``."""
        z, shape = _by_pixel(xs[0]), xs[0].shape
        residual = _by_pixel(xs[1]) if len(xs) > 1 else None
        if self.kernels:
            scale, shift = self._affine(params, z)
            y, *slopes = launching.group_norm(self, z, scale, shift, residual)
            return self._pooled(y.view(shape), fuse, (z, slopes, live, residual is not None))
        running = [params[name] for name in self.statistics]
        if running and self.frozen:
            mean, variance = (one[:, None, None, None] for one in running)
            found = mean, variance, torch.ones_like(mean[..., :1])
        else:
            found = fuse(formulas.moments)(z, live, self.groups)
        if running and not self.frozen:
            if z.shape[2] == 1:  # a single value has no variance: it counts by what is known
                found = self._with_known(found, running)
            moved = fuse(formulas.moved_statistics)(
                *running, found, live & (found[2].flatten(1) > 1), self.momentum
            )
            for old, new in zip(running, moved, strict=True):
                old.copy_(new)
        scale, shift = self._affine(params, z)
        y = fuse(formulas.normed)(
            z, *found[:2], scale, shift, residual, self.eps,
            groups=self.groups, relu=self.relu and not self.pool,
        ).view(shape)  # fmt: skip
        return self._pooled(y, fuse, (z, found, live, residual is not None))

    def _pooled(self, y: Tensor, fuse: Fuse, more: tuple[Any, ...]) -> tuple[Tensor, Any]:
        if not self.pool:
            return y, (_by_pixel(y), None, y.shape, more)
        pooled, code = fuse(formulas.relu_pool)(y, same=self.pool == "same")
        return pooled, (None, code, y.shape, more)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Gradient]]:
        """Through pooling, ReLU and the sum, then through the normalisation."""
        y, code, shape, (z, found, live, summed) = saved
        if code is not None:
            dy = fuse(formulas.unpool)(dy.view(code.shape), code, shape[2:4])
        dy, (scale, _) = _by_pixel(dy.reshape(shape)), self._affine(params, z)
        if self.kernels:
            dy = dy.contiguous()
            dz, dscale, dshift, through = launching.group_norm_backward(
                self, dy, dy if y is None else y, z, found, scale
            )
        else:
            kept = y if self.relu and not self.pool else None
            dz, dscale, dshift, through = fuse(formulas.norm_backward)(
                dy, kept, z, found, scale, live, self.eps, groups=self.groups,
                frozen=self.frozen and bool(self.statistics),
            )  # fmt: skip
        gradients: dict[str, Gradient] = {}
        if self.bias:
            gradients = {self.weight_name: dscale, f"{self.name}.bias": dshift}
        return [dz.view(shape), *([through.view(shape)] if summed else [])], gradients

    def _affine(self, params: Tensors, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.bias:
            return params[self.weight_name], params[f"{self.name}.bias"]
        plain = torch.ones((len(z), z.shape[-1]), dtype=formulas.wide(z), device=z.device)
        return plain, torch.zeros_like(plain)

    def _with_known(
        self, found: tuple[Tensor, Tensor, Tensor], running: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance, count = found
        old = [one[:, None, None, None] for one in running]
        several = count > 1
        return torch.where(several, mean, old[0]), torch.where(several, variance, old[1]), count


def _by_pixel(x: Tensor) -> Tensor:
    """``[J, B, …, O]`` to ``[J, B, P, O]``."""
    return x.flatten(2, -2) if x.dim() > 3 else x.unsqueeze(2)


@dataclass(frozen=True, kw_only=True)
class Plain(Stacked, PlainStep):
    """Any function without parameters, on the samples of all jobs together."""

    def forward(
        self, params: Tensors, xs: Sequence[Any], fuse: Fuse, live: Tensor
    ) -> tuple[Any, Any]:
        """Values that are not tensors pass as they are."""
        with torch.enable_grad():
            own = [
                _samples(x).detach().requires_grad_() if isinstance(x, Tensor) else x for x in xs
            ]
            y = self.function(*own)
        if not isinstance(y, Tensor):
            return y, None
        return _stacked(y.detach(), len(live)), (own, y)

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Gradient]]:
        """By automatic differentiation of this function alone."""
        own, y = saved
        tensors = [x for x in own if isinstance(x, Tensor)]
        found = iter(torch.autograd.grad(y, tensors, _samples(dy), allow_unused=True))
        gradients = [next(found) if isinstance(x, Tensor) else None for x in own]
        return [None if one is None else _stacked(one, len(dy)) for one in gradients], {}


SEED, STEP = "dropout/seed", "dropout/step"
"""What masks depend on, among a network's tensors while it is trained: per job, and of all."""


@dataclass(frozen=True, kw_only=True)
class Dropout(Stacked, DropoutStep):
    """Dropout by masks of each job's own."""

    def evaluate(self, params: Tensors, xs: Sequence[Tensor], live: Tensor) -> Tensor:
        """Nothing is dropped."""
        return xs[0]

    def forward(
        self, params: Tensors, xs: Sequence[Tensor], fuse: Fuse, live: Tensor
    ) -> tuple[Tensor, Any]:
        """Masks are those of the module's own layout, channels first."""
        (x,) = xs
        image = x.dim() == 5
        one = x[0].movedim(-1, 1) if image else x[0]
        factors = dropout_factors(one, self.p, self.whole, params[SEED], params[STEP], self.place)
        factors = factors.movedim(2, -1) if image else factors
        return x * factors, factors

    def backward(
        self, params: Tensors, saved: Any, dy: Tensor, fuse: Fuse, *, first: bool
    ) -> tuple[Sequence[Tensor | None], dict[str, Gradient]]:
        """By the same masks."""
        return [dy * saved], {}


def _samples(x: Tensor) -> Tensor:
    """``[J, B, …]`` to ``[J·B, …]``, images channels first."""
    flat: Tensor = x.flatten(0, 1)
    return flat.permute(0, 3, 1, 2).contiguous() if flat.dim() == 4 else flat


def _stacked(x: Tensor, jobs: int) -> Tensor:
    """The opposite of `_samples`."""
    moved: Tensor = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
    split: Tensor = moved.unflatten(0, (jobs, -1))
    return split.contiguous()
