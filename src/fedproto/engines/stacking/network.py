"""Networks over stacked weights: one forward and backward pass for many models at once.

`BlockNetwork` has its own backward pass, for models that describe their layers.
`fedproto.engines.stacking.functional` does the same for a user's module, through `torch.func`.

Shapes: J jobs, B samples of a batch, D feature channels, C classes.
"""

# Long: the way forward and the way back of one network belong together.
from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.blocks import Block, Conv, Dense
from fedproto.engines.stacking.fusing import Fuse, unfused
from fedproto.engines.stacking.gradients import Gradient, Product
from fedproto.engines.stacking.kernel_blocks import KernelConv, KernelDense
from fedproto.engines.stacking.norms import Normed
from fedproto.engines.stacking.whole import MlpStep
from fedproto.models.layers import DenseLayer, Layer, layers_of
from fedproto.types import Tensors


@dataclass(frozen=True)
class Calibration:
    """Changes of the logits before the loss: factors and offsets, each ``[J, C]``."""

    scale: Tensor
    offset: Tensor

    def leading(self, jobs: int) -> Calibration:
        """That of the first jobs."""
        return Calibration(self.scale[:jobs], self.offset[:jobs])


class Term(Protocol):
    """A strategy's batch term for all jobs of a stack.

    Attributes:
        one: One job's term of features, logits, targets, weights, and its part of `inputs`.
        inputs: Whatever else the term sees, stacked over jobs.
    """

    one: Callable[..., Tensor]
    inputs: tuple[Any, ...]

    def gradients(
        self, features: Tensor, logits: Tensor, targets: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the term in the features ``[J, B, D]`` and in the logits ``[J, B, C]``."""
        ...


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

    def draw_by(self, seed: Tensor, step: Tensor) -> None:
        """What the next gradients draw by: the jobs' seeds ``[J]`` and the number of the step."""
        del seed, step

    def portable(self) -> Network | None:
        """The same without kernels of its own; None where there are none."""
        return None

    def whole_step(self, batch: int) -> MlpStep | None:
        """Plain gradient descent in one kernel, where there is one for such models."""
        del batch
        return None

    def frozen(self) -> Network:
        """The same with statistics that training neither follows nor changes."""
        return self

    def measured(self, params: Tensors, x: Tensor, live: Tensor, share: float) -> Tensors:
        """The statistics after inputs ``[J, B, …]`` that count so much; nothing is changed."""
        del params, x, live, share
        return {}

    @abc.abstractmethod
    def lay_out(self, inputs: Tensor) -> Tensor:
        """The samples' inputs ``[N, …]`` as the network wants them."""

    @abc.abstractmethod
    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """The module's stacked tensors ``[J, …]`` in the network's own layout."""

    @abc.abstractmethod
    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """The opposite of `pack`; fresh tensors."""

    @abc.abstractmethod
    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Features ``[J, B, D]`` of inputs ``[J, B, …]``, of which only the live ones count."""

    @abc.abstractmethod
    def scores(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Scores ``[J, B, C]`` of inputs ``[J, B, …]``, of which only the live ones count."""

    @abc.abstractmethod
    def gradients(
        self,
        params: Tensors,
        x: Tensor,
        targets: Tensor,
        weight: Tensor,
        fuse: Fuse,
        calibration: Calibration | None = None,
        term: Term | None = None,
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """Gradients of the weighted sum of the samples' cross-entropies.

        Args:
            params: Packed, ``[J, …]``.
            x: Inputs ``[J, B, …]``.
            targets: ``[J, B]``.
            weight: What each sample counts, ``[J, B]``.
            fuse: Makes the parts between the matrix products faster.
            calibration: Changes of the logits before the loss; None for none.
            term: The strategy's batch term; None for none.

        Returns:
            The loss per sample, ``[J, B]``, and the gradients by name.
        """

    @abc.abstractmethod
    def numbers(self, batch: int) -> int:
        """How many numbers a step keeps at once per job, besides weights and gradients."""


class BlockNetwork(Network):
    """Blocks one after another, then a dense layer that gives the scores.

    The last block gives the features, the head the scores; nothing follows it.
    """

    def __init__(self, blocks: Sequence[Block], head: Dense, *, kernels: bool = False) -> None:
        self.blocks = tuple(blocks)
        self.head = head
        self.kernels = kernels
        self._weight, self._bias = f"{head.name}.weight", f"{head.name}.bias"
        norms = [block for block in self.blocks if isinstance(block, Normed)]
        self.statistics = {
            name: (norm.conv.channels[1],) for norm in norms for name in norm.statistics
        }
        self.by_batch = not all(norm.keeps for norm in norms)

    def portable(self) -> BlockNetwork | None:
        """The same with batched products alone."""
        blocks = [_portable(block) for block in self.blocks]
        changed = any(new is not old for new, old in zip(blocks, self.blocks, strict=True))
        return BlockNetwork(blocks, self.head) if changed or self.kernels else None

    def whole_step(self, batch: int) -> MlpStep | None:
        """For two dense layers and a head that are not part of an image's network."""
        layers = (*self.blocks, self.head)
        dense = [block for block in layers if type(block) is Dense]
        if not self.kernels or len(layers) != 3 or len(dense) != 3:
            return None
        first, second, head = dense
        step = MlpStep(
            batch,
            (first.inputs, first.units, second.units, head.units),
            (first.name, second.name, head.name),
        )
        return step if step.usable else None

    def frozen(self) -> BlockNetwork:
        """The same with statistics that training neither follows nor changes."""
        return BlockNetwork([_changed(block, frozen=True) for block in self.blocks], self.head)

    def measured(self, params: Tensors, x: Tensor, live: Tensor, share: float) -> Tensors:
        """Those that training would have found."""
        own = {**params, **{name: params[name].clone() for name in self.statistics}}
        for block in self.blocks:
            x, _ = _changed(block, momentum=share).forward(own, x, unfused, live)
        return {name: own[name] for name in self.statistics}

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Channels last for images, flat for anything else."""
        if isinstance(self.blocks[0], Conv | Normed):
            return inputs.movedim(1, -1).contiguous()
        return inputs.flatten(1).contiguous()

    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """Weights block by block; biases as they are."""
        packed = dict(params)
        for block in (*self.blocks, self.head):
            name = f"{block.name}.weight"
            packed[name] = block.pack(params[name]).contiguous()
        return packed

    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """The opposite of `pack`."""
        own = dict(params)
        for block in (*self.blocks, self.head):
            name = f"{block.name}.weight"
            own[name] = block.unpack(params[name])
        return {
            name: tensor.clone() if tensor.data_ptr() == params[name].data_ptr() else tensor
            for name, tensor in own.items()
        }

    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """What the last block puts out, in the module's order of channels."""
        return self._in_module_order(self._encode(params, x, live))

    def _in_module_order(self, x: Tensor) -> Tensor:
        return (x if self.head.image is None else x.movedim(-1, 2)).flatten(2)

    def _in_packed_order(self, flat: Tensor, shape: torch.Size) -> Tensor:
        if self.head.image is None:
            return flat
        channels_first = (*shape[:2], shape[-1], *shape[2:-1])
        return flat.reshape(channels_first).movedim(2, -1).flatten(2)

    def scores(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The head on top of the last block."""
        x = self._encode(params, x, live).flatten(2)
        bias = params[self._bias].unsqueeze(1)
        return torch.baddbmm(bias, x, params[self._weight].transpose(1, 2))

    def gradients(
        self,
        params: Tensors,
        x: Tensor,
        targets: Tensor,
        weight: Tensor,
        fuse: Fuse,
        calibration: Calibration | None = None,
        term: Term | None = None,
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """Forward through the blocks and back."""
        saved, live = [], weight > 0
        for block in self.blocks:
            x, kept = block.forward(params, x, fuse, live)
            saved.append(kept)
        changes = () if calibration is None else (calibration.scale, calibration.offset)
        features, x = x, x.flatten(2)
        z = torch.bmm(x, params[self._weight].transpose(1, 2))
        loss, dz, db = fuse(formulas.cross_entropy)(
            z, params[self._bias], targets, weight, *changes
        )
        added: Tensor | None = None
        if term is not None:
            own = self._in_module_order(features)
            logits = z + params[self._bias].unsqueeze(1)
            added, d_logits = term.gradients(own, logits, targets, weight)
            dz, db = dz + d_logits, db + d_logits.sum(dim=1)
        gradients: dict[str, Gradient] = {
            self._weight: Product(dz.transpose(1, 2), x),
            self._bias: db,
        }
        d_features = torch.bmm(dz, params[self._weight])
        if added is not None:
            d_features += self._in_packed_order(added, features.shape)
        dx: Tensor | None = d_features
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            assert dx is not None  # noqa: S101 - only the first block gives no gradient
            dx, found = block.backward(params, saved[index], dx, fuse, first=index == 0)
            gradients |= found
        return loss, gradients

    def numbers(self, batch: int) -> int:
        """The sum over the blocks: nothing is freed before the backward pass ends."""
        return sum(block.numbers(batch) for block in self.blocks)

    def _encode(self, params: Tensors, x: Tensor, live: Tensor | None) -> Tensor:
        for block in self.blocks:
            x = block.encode(params, x, live)
        return x


def _portable(block: Block) -> Block:
    if isinstance(block, KernelConv | KernelDense):
        return block.portable
    if isinstance(block, Normed) and isinstance(block.conv, KernelConv):
        return replace(block, conv=block.conv.portable)
    return block


def _changed(block: Block, **options: Any) -> Block:
    return replace(block, **options) if isinstance(block, Normed) else block


def block_network(
    model: nn.Module, input_shape: tuple[int, ...], *, kernels: bool = False
) -> BlockNetwork | None:
    """The stacked form of a model that describes its layers; None for any other."""
    layers = layers_of(model, input_shape)
    if layers is None:
        return None
    *encoder, last = layers
    assert isinstance(last, DenseLayer)  # noqa: S101 - scores come from a dense layer
    blocks = [_block(layer, kernels=kernels) for layer in encoder]
    whole = kernels and all(isinstance(layer, DenseLayer) for layer in layers)
    return BlockNetwork(blocks, Dense(**vars(last)), kernels=whole)


def _block(layer: Layer, *, kernels: bool) -> Block:
    if isinstance(layer, DenseLayer):
        dense = KernelDense(**vars(layer))
        # Layers that no image goes into are small: batched products are as fast.
        usable = kernels and layer.image is not None and dense.kernels.usable
        return dense if usable else dense.portable
    norm = layer.norm
    by_kernels = KernelConv(**{**vars(layer), "norm": None})
    # The kernels that pool leave an odd last row or column out; those for norms do not pool.
    usable = kernels and by_kernels.kernels.usable and (norm is not None or not layer.same)
    conv = by_kernels if usable else by_kernels.portable
    return conv if norm is None else Normed(conv, norm.name, norm.eps, norm.momentum)


def stack_params(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Several models' tensors along a new leading dimension, by name."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
