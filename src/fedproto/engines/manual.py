"""A training step without automatic differentiation, for the package's own small models on a CPU.

What it is worth depends on the processor (docs/evidence/performance.md).
Saved are direct convolutions, the gradient of the images, and gradients that are written only to be
read once and subtracted: every layer has its own backward pass that ends with plain gradient
descent, the dense layers' inside the very product that gives the gradient.

Images lie with their pixels first, [H, W, B, channels]: the layout that lets the first convolution
be one matrix product and the others products of spectra, while to the pooling kernels a batch is
one image of B·channels channels, which they take several at a time.

Shapes: B samples of a batch, H × W pixels, I channels in, O channels out, T taps, D units.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.engines.base import LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine, Step
from fedproto.engines.spectra import Spectra, SpectralConvolution
from fedproto.engines.tracing import ConvStep, DenseStep, trace
from fedproto.rng import Indices
from fedproto.strategies.values import Local, Objective
from fedproto.types import Tensors

WIDE_KERNEL, SMALL_IMAGE = 5, 32
"""Taps from which, and side of an image up to which, convolutions are products of spectra: the
arithmetic saved grows with the taps, that of the transforms with the image."""

Slope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class ManualLayer(abc.ABC):
    """A layer with weight and bias, and what follows it.

    Args:
        name: The layer's name in the module; its tensors are ``name.weight`` and ``name.bias``.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, name: str) -> None:
        self._name = name
        self._proximal = 0.0
        self._received: tuple[Tensor, Tensor] | None = None
        self._linear: tuple[Tensor, Tensor] | None = None

    def load(self, params: Tensors, received: Tensors, objective: Objective) -> None:
        """Takes over weights, in place where their layout suits."""
        self.weight, self.bias = self._pair(params)
        self._proximal = objective.proximal
        self._received = self._pair(received) if self._proximal else None
        self._linear = None if objective.linear is None else self._pair(objective.linear)

    def _pair(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """This layer's weight, in its own layout, and bias."""
        weight = self._packed(tensors[f"{self._name}.weight"].detach())
        return weight, tensors[f"{self._name}.bias"].detach()

    def store(self, params: Tensors) -> None:
        """Puts the weight into the module's tensors, if it is not there already."""
        weight = params[f"{self._name}.weight"]
        if self.weight.data_ptr() != weight.data_ptr():
            weight.copy_(self._unpacked(self.weight))

    def _packed(self, weight: Tensor) -> Tensor:
        """The module's weight in this layer's layout."""
        return weight

    def _unpacked(self, weight: Tensor) -> Tensor:
        """The opposite."""
        return weight

    @abc.abstractmethod
    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """The output, and what `backward` needs."""

    @abc.abstractmethod
    def backward(self, saved: Any, dy: Tensor, rate: float) -> Tensor | None:
        """Moves the weights against their gradient; the input's gradient under those of before.

        The first layer gives none.
        """

    def _descend_objective(self, rate: float) -> None:
        """Moves the weights against the gradient of ``μ/2 ‖w − w_t‖² + ⟨h, w⟩``."""
        if self._received is not None:
            self.weight.lerp_(self._received[0], rate * self._proximal)
            self.bias.lerp_(self._received[1], rate * self._proximal)
        if self._linear is not None:
            self.weight.sub_(self._linear[0], alpha=rate)
            self.bias.sub_(self._linear[1], alpha=rate)


class ManualDense(ManualLayer):
    """A dense layer, with ReLU unless it is the last."""

    def __init__(self, block: DenseStep, *, first: bool) -> None:
        super().__init__(block.name)
        # A batch that comes as images is only laid out in rows.
        self._image = None if first else block.image
        self._relu, self._first = block.relu, first

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """``[B, …]`` or ``[H, W, B, I]`` to ``[B, D]``."""
        x = (x if self._image is None else x.permute(2, 3, 0, 1)).flatten(1)
        y = torch.addmm(self.bias, x, self.weight.t())
        y = y.relu_() if self._relu else y
        return y, (x, y)

    def backward(self, saved: Any, dy: Tensor, rate: float) -> Tensor | None:
        """``w −= rate · dzᵀ x`` as one product."""
        x, y = saved
        dz = torch.ops.aten.threshold_backward(dy, y, 0) if self._relu else dy
        dx = None if self._first else dz @ self.weight
        self._descend_objective(rate)
        self.weight.addmm_(dz.t(), x, alpha=-rate)
        self.bias.sub_(dz.sum(dim=0), alpha=rate)
        if dx is None or self._image is None:
            return dx
        return dx.view(-1, *self._image).permute(2, 3, 0, 1).contiguous()


class _Pooled(ManualLayer):
    """A convolution that keeps the size, with 2×2 max pooling and ReLU."""

    def __init__(self, block: ConvStep) -> None:
        super().__init__(block.name)
        self._block = block

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Images to ``[H//2, W//2, B, O]``."""
        convolved, kept = self._convolve(x)
        z = _as_one_image(convolved)
        top, indices = torch.ops.aten.max_pool2d_with_indices(z, [2, 2], [2, 2])
        y = _as_batch(top, convolved.shape[2]).add_(self.bias).relu_()
        return y, (kept, z, indices, y)

    def backward(self, saved: Any, dy: Tensor, rate: float) -> Tensor | None:
        """Through ReLU, pooling and convolution."""
        kept, z, indices, y = saved
        live = torch.ops.aten.threshold_backward(dy, y, 0)
        # Over what was pooled, of which nothing but the shape is needed any more.
        dz = torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
            _as_one_image(live),
            z,
            [2, 2],
            [2, 2],
            [0, 0],
            [1, 1],
            False,
            indices,
            grad_input=z,
        )
        dx = self._convolve_back(kept, _as_batch(dz, dy.shape[2]), rate)
        self.bias.sub_(live.flatten(0, 2).sum(dim=0), alpha=rate)
        return dx

    @abc.abstractmethod
    def _convolve(self, x: Tensor) -> tuple[Tensor, Any]:
        """The convolution ``[H, W, B, O]``, and what `_convolve_back` needs."""

    @abc.abstractmethod
    def _convolve_back(self, kept: Any, dz: Tensor, rate: float) -> Tensor | None:
        """Moves the weight; returns the gradient of the input."""


class ManualFirstConvolution(_Pooled):
    """A convolution of the images themselves, as one product with their patches."""

    def _packed(self, weight: Tensor) -> Tensor:
        """``[O, I, T, T]`` to ``[I·T·T, O]``."""
        return weight.reshape(len(weight), -1).t().clone(memory_format=torch.contiguous_format)

    def _unpacked(self, weight: Tensor) -> Tensor:
        """The opposite."""
        ins, outs = self._block.channels
        return weight.t().reshape(outs, ins, *self._block.taps)

    def _convolve(self, x: Tensor) -> tuple[Tensor, Any]:
        taps = self._block.taps[0]
        reach = taps // 2
        padded = F.pad(x, (reach, reach, reach, reach)).permute(1, 2, 3, 0).contiguous()
        windows = padded.unfold(1, taps, 1).unfold(2, taps, 1)
        patches = windows.permute(0, 4, 5, 1, 2, 3).reshape(len(self.weight), -1)
        z = patches.t() @ self.weight
        return z.view(*self._block.image, len(x), -1), patches

    def _convolve_back(self, kept: Tensor, dz: Tensor, rate: float) -> None:
        self._descend_objective(rate)
        self.weight.addmm_(kept, dz.flatten(0, 2), alpha=-rate)


class ManualConvolution(_Pooled):
    """A later convolution, as products of spectra."""

    def __init__(self, block: ConvStep, dtype: torch.dtype) -> None:
        super().__init__(block)
        self._convolution = SpectralConvolution(block.image, block.taps[0], dtype)

    def _packed(self, weight: Tensor) -> Tensor:
        """``[O, I, T, T]`` to ``[T·T, I, O]``."""
        moved = weight.permute(2, 3, 1, 0).clone(memory_format=torch.contiguous_format)
        return moved.flatten(0, 1)

    def _unpacked(self, weight: Tensor) -> Tensor:
        """The opposite."""
        square = weight.view(*self._block.taps, *weight.shape[1:])
        return square.permute(3, 2, 0, 1)

    def _convolve(self, x: Tensor) -> tuple[Tensor, Any]:
        return self._convolution.forward(x, self.weight)

    def _convolve_back(self, kept: Spectra, dz: Tensor, rate: float) -> Tensor:
        dx, of_gradient = self._convolution.backward(dz, kept)
        self._descend_objective(rate)
        self._convolution.descend(self.weight, of_gradient, rate)
        return dx


class ManualNetwork:
    """Layers one after another; the last gives the logits."""

    def __init__(self, layers: Sequence[ManualLayer]) -> None:
        self._layers = layers

    @torch.no_grad()
    def load(self, params: Tensors, received: Tensors, objective: Objective) -> None:
        """Takes over the module's tensors, the received ones, and what is added to the loss."""
        for layer in self._layers:
            layer.load(params, received, objective)

    @torch.no_grad()
    def store(self, params: Tensors) -> None:
        """Puts all weights into the module's tensors; until then only some are there."""
        for layer in self._layers:
            layer.store(params)

    @torch.no_grad()
    def step(self, inputs: Tensor, targets: Tensor, slope_of: Slope, rate: float) -> Tensor:
        """One step of gradient descent; returns the batch's loss of before.

        Args:
            inputs: A batch, as the module takes it.
            targets: Its labels.
            slope_of: The loss of logits and targets, and its gradient in the logits.
            rate: Learning rate.
        """
        x, saved = inputs, []
        for layer in self._layers:
            x, kept = layer.forward(x)
            saved.append(kept)
        loss, slope = slope_of(x, targets)
        dy: Any = slope
        for layer in reversed(self._layers):
            # Taken out, so that its memory is free, and in the cache, for what comes next.
            dy = layer.backward(saved.pop(), dy, rate)
        return loss


def manual_network(
    model: nn.Module, input_shape: tuple[int, ...], dtype: torch.dtype
) -> ManualNetwork | None:
    """The manual form of a model; None for other layers, or where nothing is gained."""
    like = next(model.parameters(), torch.zeros(()))
    found = trace(model, torch.zeros((2, *input_shape), dtype=like.dtype, device=like.device))
    if found is None or not all(one.requires_grad for one in model.parameters()):
        return None
    layers: list[ManualLayer] = []
    for index, step in enumerate(found.steps):
        if step.inputs != (index and found.steps[index - 1].output,):
            return None
        if isinstance(step, DenseStep) and step.bias:
            layers.append(ManualDense(step, first=not layers))
        elif not isinstance(step, ConvStep) or not _keeps_size(step):
            return None
        elif not layers:
            layers.append(ManualFirstConvolution(step))
        elif step.taps[0] >= WIDE_KERNEL and max(step.image) <= SMALL_IMAGE:
            layers.append(ManualConvolution(step, dtype))
        else:
            return None
    return ManualNetwork(layers)


def _keeps_size(step: ConvStep) -> bool:
    """Whether a convolution is followed by pooling and has as many outputs as inputs before it."""
    plain = step.stride == (1, 1) and step.bias and not step.standardize and step.pool == "valid"
    return plain and step.sides == step.image and step.taps[0] == step.taps[1]


def _as_one_image(x: Tensor) -> Tensor:
    """``[H, W, B, O]`` as one image of B·O channels, which lie last: ``[1, B·O, H, W]``."""
    return x.reshape(1, *x.shape[:2], -1).permute(0, 3, 1, 2)


def _as_batch(image: Tensor, batch: int) -> Tensor:
    """The opposite of `_as_one_image`."""
    height, width = image.shape[2:]
    return image.permute(0, 2, 3, 1).reshape(height, width, batch, -1)


class ManualTrainer(ReferenceEngine):
    """Trains one job after another on a CPU, images channels last.

    Which step a job takes depends on its options and the model alone, never on time or machine.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(replace(workload, options=replace(workload.options, channels_last=True)))
        self._manual = manual_network(
            self._model, workload.federation.input_shape, workload.options.torch_dtype()
        )

    def _fit(
        self, job: LocalJob, indices: Indices, local: Local, objective: Objective
    ) -> tuple[Tensor, int]:
        """As the reference engine, with the weights in the layouts of the manual layers."""
        found = super()._fit(job, indices, local, objective)
        if self._manual is not None and can_step_manually(job):
            self._manual.store(dict(self._model.named_parameters()))
        return found

    def _stepper(self, job: LocalJob, local: Local, objective: Objective) -> Step:
        network, task = self._manual, self.workload.task
        if network is None or not can_step_manually(job):
            return super()._stepper(job, local, objective)
        network.load(dict(self._model.named_parameters()), job.state.params, objective)

        def slope_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            loss, slope = task.loss_and_slope(objective.calibrate(logits), targets)
            return loss, slope if objective.scale is None else slope * objective.scale.to(slope)

        return lambda inputs, targets: network.step(inputs, targets, slope_of, job.lr)


def can_step_manually(job: LocalJob) -> bool:
    """Whether a job asks for plain gradient descent, with any objective in closed form."""
    return job.train.plain and not job.method.needs.hooks & {"batch_term", "trainable"}
