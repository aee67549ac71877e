"""Networks over stacked weights: one forward and backward pass for many models at once.

`LayerNetwork` has its own backward pass, for models that describe their layers.
`fedproto.engines.stacking.functional` does the same for a user's module, through `torch.func`.

Shapes: J jobs, B samples of a batch, D feature channels, C classes, P numbers in a model's row.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedproto.engines.base import Workload
from fedproto.engines.stacking import formulas, launching
from fedproto.engines.stacking.formulas import Fuse
from fedproto.engines.stacking.launching import MlpStep
from fedproto.engines.stacking.layers import (
    Conv,
    Dense,
    Gradient,
    NormedConv,
    product,
)
from fedproto.models.layers import DenseLayer, layers_of
from fedproto.types import Tensors


@dataclass(frozen=True)
class Term:
    """A strategy's batch term for all jobs of a stack.

    Attributes:
        one: One job's term of features, logits, targets, weights, and its part of `inputs`.
        inputs: Whatever else the term depends on, stacked over jobs.
    """

    one: Callable[..., Tensor]
    inputs: tuple[Any, ...]

    def gradients(
        self, features: Tensor, logits: Tensor, targets: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the term in the features ``[J, B, D]`` and in the logits ``[J, B, C]``."""
        found: tuple[Tensor, Tensor] = vmap(grad(self.one, argnums=(0, 1)))(
            features, logits, targets, weight, *self.inputs
        )
        return found


@dataclass(frozen=True)
class StepBatch:
    """The batches of a step of all jobs, and the local objective.

    Attributes:
        x: Inputs ``[J, B, …]``.
        targets: ``[J, B]``.
        weight: The samples' weights, ``[J, B]``; 0 for those that only fill up a batch.
        calibration: Factors and offsets of the logits in the loss, ``[J, C]`` each; or none.
        term: The strategy's batch term; None for none.
        seed: The jobs' seeds for dropout, ``[J]``.
        step: The number of the step.
    """

    x: Tensor
    targets: Tensor
    weight: Tensor
    calibration: tuple[Tensor, ...]
    term: Term | None
    seed: Tensor
    step: Tensor


class Network(abc.ABC):
    """Stacked models of one architecture.

    Attributes:
        statistics: The running means and variances that models keep beside their weights, by name,
            with their shapes. They lie among the tensors that a network is given; training changes
            them there.
        by_batch: Whether a sample's features depend on which others it is tested with.
        draws: Whether training draws random numbers.
    """

    statistics: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    by_batch: bool = False
    draws: bool = False

    def portable(self) -> Network | None:
        """The same network without kernels; None if it has none."""
        return None

    def whole_step(self, batch: int) -> MlpStep | None:
        """Plain gradient descent in one kernel, where there is one for such models."""
        del batch
        return None

    @abc.abstractmethod
    def frozen(self) -> Network:
        """The same network with statistics that training neither uses nor changes."""

    def lay_out(self, inputs: Tensor) -> Tensor:
        """The samples' inputs ``[N, …]`` in the network's own layout."""
        return inputs

    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """The module's stacked tensors ``[J, …]`` in the network's own layout."""
        return dict(params)

    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """The opposite of `pack`; fresh tensors."""
        return {name: tensor.clone() for name, tensor in params.items()}

    @abc.abstractmethod
    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Features ``[J, B, D]`` of inputs ``[J, B, …]``, of which only the live ones exist."""

    @abc.abstractmethod
    def logits(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Logits ``[J, B, C]`` of inputs ``[J, B, …]``, of which only the live ones exist."""

    @abc.abstractmethod
    def gradients(
        self, params: Tensors, batch: StepBatch, fuse: Fuse
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """The cross-entropy per sample ``[J, B]``, and gradients of its weighted sum by name.

        The batch term is part of the gradients, not of the loss. `fuse` compiles the parts between
        the matrix products.
        """

    @abc.abstractmethod
    def numbers(self, batch: int) -> int:
        """How many numbers a step keeps at once per job, besides weights and gradients."""


class LayerNetwork(Network):
    """Layers one after another; the last gives the logits, the one before it the features."""

    def __init__(
        self, layers: Sequence[Dense | Conv], head: Dense, *, one_kernel: bool = False
    ) -> None:
        """Takes the layers; `one_kernel` asks for steps in one kernel where models have one."""
        self.layers, self.head, self._one_kernel = tuple(layers), head, one_kernel
        self._weight, self._bias = f"{head.name}.weight", f"{head.name}.bias"
        norms = [layer for layer in self.layers if isinstance(layer, NormedConv)]
        self.statistics = {name: (norm.channels[1],) for norm in norms for name in norm.statistics}
        self.by_batch = not all(norm.statistics for norm in norms)

    def portable(self) -> LayerNetwork | None:
        """The same network by PyTorch's own products."""
        used = [layer.kernels for layer in self.layers]
        if not any(used) and self.whole_step(1) is None:
            return None
        return LayerNetwork([replace(layer, kernels=False) for layer in self.layers], self.head)

    def whole_step(self, batch: int) -> MlpStep | None:
        """For two dense layers and a head."""
        dense = [layer for layer in (*self.layers, self.head) if isinstance(layer, Dense)]
        if not self._one_kernel or len(self.layers) != 2 or len(dense) != 3:
            return None
        step = MlpStep((dense[0], dense[1], dense[2]), batch)
        return step if step.usable else None

    def frozen(self) -> LayerNetwork:
        """The same network with statistics that training neither uses nor changes."""
        layers = [
            replace(layer, frozen=True) if isinstance(layer, NormedConv) else layer
            for layer in self.layers
        ]
        return LayerNetwork(layers, self.head, one_kernel=self._one_kernel)

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Channels last for images, flat for anything else."""
        if isinstance(self.layers[0], Conv):
            return inputs.movedim(1, -1).contiguous()
        return inputs.flatten(1).contiguous()

    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """Weights layer by layer; biases as they are."""
        packed = dict(params)
        for layer in (*self.layers, self.head):
            name = f"{layer.name}.weight"
            packed[name] = layer.pack(params[name]).contiguous()
        return packed

    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """The opposite of `pack`."""
        own = dict(params)
        for layer in (*self.layers, self.head):
            name = f"{layer.name}.weight"
            own[name] = layer.unpack(params[name])
        return {
            name: tensor.clone() if tensor.data_ptr() == params[name].data_ptr() else tensor
            for name, tensor in own.items()
        }

    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The output of the last layer but the head, in the module's order of channels."""
        return self._in_module_order(self._encode(params, x, live))

    def logits(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The head on top of the features."""
        x = self._encode(params, x, live).flatten(2)
        bias = params[self._bias].unsqueeze(1)
        return torch.baddbmm(bias, x, params[self._weight].transpose(1, 2))

    def gradients(
        self, params: Tensors, batch: StepBatch, fuse: Fuse
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """Forward through the layers and back."""
        saved, x, live = [], batch.x, batch.weight > 0
        for layer in self.layers:
            x, kept = layer.forward(params, x, fuse, live)
            saved.append(kept)
        features, x = x, x.flatten(2)
        weight, bias = params[self._weight], params[self._bias]
        z = torch.bmm(x, weight.transpose(1, 2))
        loss, dz, db = fuse(formulas.cross_entropy)(
            z, bias, batch.targets, batch.weight, *batch.calibration
        )
        added: Tensor | None = None
        if batch.term is not None:
            own, logits = self._in_module_order(features), z + bias.unsqueeze(1)
            added, d_logits = batch.term.gradients(own, logits, batch.targets, batch.weight)
            dz, db = dz + d_logits, db + d_logits.sum(dim=1)
        gradients: dict[str, Gradient] = {
            self._weight: product(dz.transpose(1, 2), x),
            self._bias: db,
        }
        d_features = torch.bmm(dz, weight)
        if added is not None:
            d_features += self._in_packed_order(added, features.shape)
        dx: Tensor | None = d_features
        for index in reversed(range(len(self.layers))):
            assert dx is not None  # noqa: S101 - only the first layer gives no gradient
            dx, found = self.layers[index].backward(
                params, saved[index], dx, fuse, first=index == 0
            )
            gradients |= found
        return loss, gradients

    def numbers(self, batch: int) -> int:
        """The sum over the layers: nothing is freed before the backward pass ends."""
        return sum(layer.numbers(batch) for layer in self.layers)

    def _encode(self, params: Tensors, x: Tensor, live: Tensor | None) -> Tensor:
        live = x.new_ones(x.shape[:2], dtype=torch.bool) if live is None else live
        for layer in self.layers:
            x = layer.evaluate(params, x, live)
        return x

    def _in_module_order(self, x: Tensor) -> Tensor:
        return (x if self.head.image is None else x.movedim(-1, 2)).flatten(2)

    def _in_packed_order(self, flat: Tensor, shape: torch.Size) -> Tensor:
        if self.head.image is None:
            return flat
        channels_first = (*shape[:2], shape[-1], *shape[2:-1])
        return flat.reshape(channels_first).movedim(2, -1).flatten(2)


@dataclass(frozen=True)
class StackedForm:
    """A workload's model and data in stacked form.

    Attributes:
        inputs: All samples, in the network's layout.
        targets: All labels.
        fuse: Compiles the parts between the products, or leaves them as they are.
    """

    workload: Workload
    network: Network
    inputs: Tensor
    targets: Tensor
    fuse: Fuse


def layer_network(
    model: nn.Module, input_shape: tuple[int, ...], *, kernels: bool = False
) -> LayerNetwork | None:
    """The stacked form of a model that describes its layers; None for any other.

    `kernels` asks for kernels wherever shapes suit them.
    """
    layers = layers_of(model, input_shape)
    if layers is None:
        return None
    *encoder, last = layers
    assert isinstance(last, DenseLayer)  # noqa: S101 - logits come from a dense layer
    stacked: list[Dense | Conv] = []
    for layer in encoder:
        if isinstance(layer, DenseLayer):
            suits = kernels and launching.dense_suits(layer)
            stacked.append(Dense(**vars(layer), kernels=suits))
        else:
            suits = kernels and launching.conv_suits(layer, first=not stacked)
            kind = Conv if layer.norm is None else NormedConv
            stacked.append(kind(**vars(layer), kernels=suits))
    return LayerNetwork(stacked, Dense(**vars(last)), one_kernel=kernels)


class RowLayout:
    """Where each of a model's tensors lies in its row, so that a stack is one matrix ``[J, P]``.

    Operations that treat all weights alike (loading, optimizers, the proximal term) are then one,
    however many tensors a model has. Small tensors lie together in front: their gradients are
    gathered and applied at once.

    Attributes:
        starts: Where each tensor begins in a row.
        small: Names of the tensors in front, in their order, without gaps.
    """

    def __init__(self, example: Tensors) -> None:
        self._shapes = {name: tuple(tensor.shape) for name, tensor in example.items()}
        self.small = [name for name, tensor in example.items() if tensor.numel() <= 4096]
        self.starts: dict[str, int] = {}
        self.size = 0
        for name in self.small:
            self.starts[name] = self.size
            self.size += math.prod(self._shapes[name])
        self.small_size = self.size
        # Large tensors and rows begin at aligned addresses, as fast matrix kernels require.
        self.size = _aligned(self.size)
        for name in example:
            if name not in self.starts:
                self.starts[name] = self.size
                self.size = _aligned(self.size + math.prod(self._shapes[name]))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors ``[J, …]`` inside of rows ``[J, P]``, by name."""
        return {
            name: flat[:, start : start + math.prod(self._shapes[name])].view(
                len(flat), *self._shapes[name]
            )
            for name, start in self.starts.items()
        }

    def gather_small(self, tensors: Tensors) -> Tensor:
        """The small tensors ``[J, …]`` side by side, as they lie in front of the rows."""
        return torch.cat([tensors[name].flatten(1) for name in self.small], dim=1)


def _aligned(size: int) -> int:
    return -(-size // 32) * 32


def stack_params(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several models' tensors along a new leading dimension, by name."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
