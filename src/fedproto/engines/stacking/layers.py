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
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

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


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Pending:
    """The gradient ``left @ right``, ``[J, M, K]`` and ``[J, K, N]``, of a weight of that type."""

    def compute() -> Tensor:
        return torch.bmm(left, right).to(dtype)

    if left.dtype == dtype:
        return Pending(compute, lambda weight: weight.baddbmm_(left, right, alpha=-1))
    return Pending(compute, lambda weight: weight.sub_(compute()))


def computed(gradient: Gradient) -> Tensor:
    """The gradient as a tensor."""
    return gradient.compute() if isinstance(gradient, Pending) else gradient


@dataclass(frozen=True)
class Pass:
    """What all steps of a pass through a network have in common.

    Attributes:
        params: Weights and running statistics by name.
        live: Which samples exist ``[J, B]``.
        fuse: Compiles the parts between the products.
        masks: The jobs' seeds ``[J]`` and the number of the step, by which dropout draws; None in
            evaluation.
        frozen: Whether to normalise by running statistics and to leave them as they are.
    """

    params: Tensors
    live: Tensor
    fuse: Fuse = unfused
    masks: tuple[Tensor, Tensor] | None = None
    frozen: bool = True


Gradients: TypeAlias = tuple[Sequence[Tensor | None], dict[str, Gradient]]
"""Gradients of a step's inputs (unused in the first step) and of its parameters."""


@dataclass(frozen=True, kw_only=True)
class Stacked(Step, abc.ABC):
    """A step of many models at once."""

    @abc.abstractmethod
    def forward(self, on: Pass, xs: Sequence[Tensor]) -> tuple[Any, Any]:
        """The output, and what `backward` needs."""

    @abc.abstractmethod
    def backward(self, on: Pass, saved: Any, dy: Tensor, *, first: bool) -> Gradients:
        """The gradients, from that of the output."""


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

    def _bias(self, on: Pass) -> Tensor | None:
        return on.params[f"{self.name}.bias"] if self.bias else None


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

    def forward(self, on: Pass, xs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """``[J, B, …]`` to ``[J, B, D]``."""
        x, bias, weight = xs[0].flatten(2), self._bias(on), on.params[self.weight_name]
        if self._uses_kernels(x):
            h = launching.dense_forward(x, weight, bias, relu=self.relu)
        else:
            z = torch.bmm(x, weight.to(x.dtype).transpose(1, 2))
            if self.relu and bias is not None:
                h = on.fuse(formulas.bias_relu)(z, bias.to(x.dtype))
            else:
                h = z if bias is None else z + bias.to(x.dtype).unsqueeze(1)
                h = h.relu() if self.relu else h
        return h, (x, h if self.relu else None, xs[0].shape)

    def backward(self, on: Pass, saved: Any, dy: Tensor, *, first: bool) -> Gradients:
        """The weight's gradient is the product ``dzᵀ x``."""
        x, h, shape = saved
        weight, gradients = on.params[self.weight_name], dict[str, Gradient]()
        dz, db = dy, None
        if h is not None:
            dz, db = on.fuse(formulas.relu_backward)(dy, h)
        if self.bias:
            gradients[f"{self.name}.bias"] = dy.sum(dim=1) if db is None else db
        gradient = product(dz.transpose(1, 2), x, weight.dtype)
        if self._uses_kernels(x):
            gradient = replace(
                gradient, subtract_from=lambda own: launching.dense_descend(dz, x, own)
            )
        gradients[self.weight_name] = gradient
        if first:
            return [None], gradients
        if self._uses_kernels(x):
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

    def forward(self, on: Pass, xs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """``[J, B, H, W, I]`` to ``[J, B, H', W', O]``."""
        x, bias, weight = xs[0], self._bias(on), on.params[self.weight_name]
        standard: tuple[Tensor, ...] = ()
        if self.standardize:
            with torch.enable_grad():
                own = weight.detach().requires_grad_()
                standard = own, standardized(own, dim=-2)
            weight = standard[1].detach()
        code, plain = None, None
        if self.kernels:
            y, code = launching.conv_forward(self, x, weight, bias)
        else:
            plain = self._convolve(x, weight, bias)
            y = plain[0].detach()
            if self.pool:
                y, code = on.fuse(formulas.relu_pool)(y, same=self.pool == "same")
            elif self.relu:
                y = y.relu()
        return y, (x, y if self.relu else None, code, weight, standard, plain)

    def backward(self, on: Pass, saved: Any, dy: Tensor, *, first: bool) -> Gradients:
        """Through pooling and ReLU, then through the convolution."""
        x, y, code, weight, standard, plain = saved
        bias: Any = None
        if code is not None:
            dy = dy.view(code.shape)
            bias = on.fuse(formulas.live_sum)(dy, code) if self.bias else None
        elif y is not None:
            dy, bias = on.fuse(formulas.relu_backward)(dy, y)
        elif self.bias:
            bias = dy.sum(dim=(1, 2, 3), dtype=formulas.wide(dy))
        gradients: dict[str, Gradient] = {f"{self.name}.bias": bias} if self.bias else {}
        dz = dy
        if code is not None and not (self.kernels and first):
            dz = on.fuse(formulas.unpool)(dy, code, self.sides)
        if self.kernels:
            compute = functools.partial(launching.conv_weight_gradient, self, x, dy, code)
            gradients[self.weight_name] = Pending(compute, compute)
            dx = None if first else launching.conv_input_gradient(self, x, dz, weight)
        else:
            z, own = plain
            gradients[self.weight_name], *dxs = torch.autograd.grad(z, own[: 2 - first], dz)
            dx = None if first else dxs[0].contiguous()
        if standard:
            own, used = standard
            gradient = computed(gradients[self.weight_name])
            (gradients[self.weight_name],) = torch.autograd.grad(used, own, gradient)
        return [dx], gradients

    def _convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """By PyTorch's own convolution; also the weight and input to differentiate it by."""
        convolve = functools.partial(F.conv2d, stride=self.stride, padding=self.padding)
        with torch.enable_grad():
            own = weight.detach().requires_grad_(), x.detach().requires_grad_()
            images, filters = own[1].movedim(-1, 2), self.unpack(own[0]).to(x.dtype)
            z = vmap(convolve)(images, filters).movedim(2, -1)
            shift = 0 if bias is None else bias.to(x.dtype)[:, None, None, None]
            return (z + shift).contiguous(), own


@dataclass(frozen=True, kw_only=True)
class Norm(Layer, NormStep):
    """Batch or group normalisation, then perhaps a residual sum, ReLU or pooling.

    Under batch normalisation every job is normalised by the statistics of its own batch. Running
    statistics lie among the tensors that the layer is given, and are updated there. A layer that
    keeps none normalises by the batch in evaluation too.
    """

    def forward(self, on: Pass, xs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """``[J, B, …, O]`` to the same, or to ``[J, B, H//2, W//2, O]``."""
        z, shape = _by_pixel(xs[0]), xs[0].shape
        residual = _by_pixel(xs[1]) if len(xs) > 1 else None
        scale, shift = self._affine(on, z)
        if self.kernels:
            y, *slopes = launching.group_norm(self, z, scale, shift, residual)
            return self._pooled(on, y.view(shape), (z, slopes, residual is not None))
        running = [on.params[name] for name in self.statistics]
        if running and on.frozen:
            mean, variance = (one[:, None, None, None] for one in running)
            found = mean, variance, torch.ones_like(mean[..., :1])
        else:
            found = on.fuse(formulas.moments)(z, on.live, self.groups)
        if running and not on.frozen:
            if z.shape[2] == 1:  # a single value has no variance: it counts by what is known
                found = self._with_known(found, running)
            moved = on.fuse(formulas.moved_statistics)(
                *running, found, on.live & (found[2].flatten(1) > 1), self.momentum
            )
            for old, new in zip(running, moved, strict=True):
                old.copy_(new)
        y = on.fuse(formulas.normed)(
            z, *found[:2], scale, shift, residual, self.eps,
            groups=self.groups, relu=self.relu and not self.pool,
        ).view(shape)  # fmt: skip
        return self._pooled(on, y, (z, found, residual is not None))

    def _pooled(self, on: Pass, y: Tensor, more: tuple[Any, ...]) -> tuple[Tensor, Any]:
        if not self.pool:
            return y, (_by_pixel(y), None, y.shape, more)
        pooled, code = on.fuse(formulas.relu_pool)(y, same=self.pool == "same")
        return pooled, (None, code, y.shape, more)

    def backward(self, on: Pass, saved: Any, dy: Tensor, *, first: bool) -> Gradients:
        """Through pooling, ReLU and the sum, then through the normalisation."""
        y, code, shape, (z, found, summed) = saved
        if code is not None:
            dy = on.fuse(formulas.unpool)(dy.view(code.shape), code, shape[2:4])
        dy, (scale, _) = _by_pixel(dy.reshape(shape)), self._affine(on, z)
        if self.kernels:
            dy = dy.contiguous()
            dz, dscale, dshift, through = launching.group_norm_backward(
                self, dy, dy if y is None else y, z, found, scale
            )
        else:
            kept = y if self.relu and not self.pool else None
            dz, dscale, dshift, through = on.fuse(formulas.norm_backward)(
                dy, kept, z, found, scale, on.live, self.eps, groups=self.groups,
                frozen=on.frozen and bool(self.statistics),
            )  # fmt: skip
        gradients: dict[str, Gradient] = {}
        if self.bias:
            gradients = {self.weight_name: dscale, f"{self.name}.bias": dshift}
        return [dz.view(shape), *([through.view(shape)] if summed else [])], gradients

    def _affine(self, on: Pass, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.bias:
            return on.params[self.weight_name], on.params[f"{self.name}.bias"]
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

    def forward(self, on: Pass, xs: Sequence[Any]) -> tuple[Any, Any]:
        """Values that are not tensors pass as they are."""
        with torch.enable_grad():
            own = [
                _samples(x).detach().requires_grad_() if isinstance(x, Tensor) else x for x in xs
            ]
            y = self.function(*own)
        if not isinstance(y, Tensor):
            return y, None
        return _stacked(y.detach(), len(on.live)), (own, y)

    def backward(self, on: Pass, saved: Any, dy: Tensor, *, first: bool) -> Gradients:
        """By automatic differentiation of this function alone."""
        own, y = saved
        tensors = [x for x in own if isinstance(x, Tensor)]
        found = iter(torch.autograd.grad(y, tensors, _samples(dy), allow_unused=True))
        gradients = [next(found) if isinstance(x, Tensor) else None for x in own]
        return [None if one is None else _stacked(one, len(dy)) for one in gradients], {}


@dataclass(frozen=True, kw_only=True)
class Dropout(Stacked, DropoutStep):
    """Dropout by masks of each job's own."""

    def forward(self, on: Pass, xs: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Masks are those of the module's own layout, channels first; none in evaluation."""
        (x,) = xs
        if on.masks is None:
            return x, None
        image = x.dim() == 5
        one = x[0].movedim(-1, 1) if image else x[0]
        factors = dropout_factors(one, self.p, self.whole, *on.masks, self.place)
        factors = factors.movedim(2, -1) if image else factors
        return x * factors, factors

    def backward(self, on: Pass, saved: Any, dy: Tensor, *, first: bool) -> Gradients:
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


def stacked_step(step: Step, *, kernels: bool) -> Stacked:
    """The stacked form of a traced step, by kernels if asked for and wherever shapes suit them."""
    kinds: dict[type[Step], Any] = {
        DenseStep: Dense,
        ConvStep: Conv,
        NormStep: Norm,
        DropoutStep: Dropout,
        PlainStep: Plain,
    }
    more = {"kernels": kernels and launching.suits(step)} if isinstance(step, LayerStep) else {}
    made: Stacked = kinds[type(step)](**vars(step), **more)
    return made
