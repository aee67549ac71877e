"""Networks over stacked weights: one forward and backward pass for many models at once.

Shapes: J jobs, B samples of a batch, D feature channels, C classes, P numbers in a model's row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedproto.data.samples import resident
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.base import Workload
from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.formulas import Compiled, Fuse, unfused
from fedproto.engines.stacking.launching import MlpStep
from fedproto.engines.stacking.layers import (
    Conv,
    Dense,
    Gradient,
    Layer,
    Norm,
    Pass,
    Stacked,
    product,
    stacked_step,
)
from fedproto.engines.tracing import trace
from fedproto.errors import reason_of
from fedproto.models.base import declares_features, features_of
from fedproto.strategies.values import Outputs
from fedproto.types import ServerState, Tensors

TermGradients: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gradients of a strategy's batch term in features ``[J, B, D]`` and logits ``[J, B, C]``, of
features, logits, targets and weights."""


@dataclass(frozen=True)
class StepBatch:
    """The batches of a step of all jobs, and the local objective.

    Attributes:
        x: Inputs ``[J, B, …]``.
        targets: ``[J, B]``.
        weight: The samples' weights, ``[J, B]``; 0 for those that only fill up a batch.
        calibration: Factors and offsets of the logits in the loss, ``[J, C]`` each; or none.
        term: Of the strategy's batch term; None without one.
        masks: The jobs' seeds for dropout, ``[J]``, and the number of the step.
        frozen: Whether batch-norm statistics are neither changed nor those of the batch.
    """

    x: Tensor
    targets: Tensor
    weight: Tensor
    calibration: tuple[Tensor, ...]
    term: TermGradients | None
    masks: tuple[Tensor, Tensor]
    frozen: bool


class Network:
    """Stacked models of one architecture: traced steps, the last of which gives the logits.

    Attributes:
        statistics: The running means and variances that models keep beside their weights, by name,
            with their shapes. They lie among the tensors that a network is given; training changes
            them there.
        by_batch: Whether a sample's features depend on which others it is tested with.
    """

    def __init__(
        self,
        steps: Sequence[Stacked],
        shapes: Mapping[int, tuple[int, ...]],
        *,
        one_kernel: bool = False,
    ) -> None:
        """Takes the steps.

        Args:
            steps: In order; each takes what earlier ones gave.
            shapes: Of each value, for one sample.
            one_kernel: Whether to make steps in one kernel where models have one.
        """
        head = steps[-1]
        assert isinstance(head, Dense)  # noqa: S101 - as every traced network ends
        self.steps, self.head, self._shapes, self._one_kernel = steps, head, shapes, one_kernel
        self.layers = [step for step in steps if isinstance(step, Layer)]
        norms = [step for step in steps if isinstance(step, Norm)]
        self.statistics = {name: (norm.channels,) for norm in norms for name in norm.statistics}
        self.by_batch = any(not norm.groups and not norm.statistics for norm in norms)
        # A value is freed after the last step that takes it; nothing before the first layer with
        # parameters has a gradient.
        last = {value: index for index, step in enumerate(steps) for value in step.inputs}
        self._done = [[one for one in last if last[one] == index] for index in range(len(steps))]
        self._moving: set[int] = set()
        for step in steps:
            if isinstance(step, Layer) or self._moving & set(step.inputs):
                self._moving.add(step.output)

    @property
    def convolves(self) -> bool:
        """Whether any step is a convolution by kernels, which take half precision."""
        return any(isinstance(layer, Conv) and layer.kernels for layer in self.layers)

    def portable(self) -> Network | None:
        """The same network by PyTorch's own products; None if it uses no others."""
        if not any(layer.kernels for layer in self.layers) and self.whole_step(1) is None:
            return None
        plain = [
            replace(one, kernels=False) if isinstance(one, Layer) else one for one in self.steps
        ]
        return Network(plain, self._shapes)

    def whole_step(self, batch: int) -> MlpStep | None:
        """A whole step in one kernel, where that is possible."""
        return MlpStep.of(self.steps, batch) if self._one_kernel else None

    def can_move(self, augment: AugmentOptions) -> bool:
        """Moving and mirroring images, which lie channels last."""
        return len(self._shapes[0]) == 3 and augment.moves_only

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Channels last for images."""
        return inputs.movedim(1, -1).contiguous() if inputs.dim() == 4 else inputs.contiguous()

    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """Weights layer by layer; biases as they are."""
        packed = dict(params)
        for layer in self.layers:
            if layer.weight_name in params:
                packed[layer.weight_name] = layer.pack(params[layer.weight_name]).contiguous()
        return packed

    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """The opposite of `pack`."""
        own = dict(params)
        for layer in self.layers:
            if layer.weight_name in params:
                own[layer.weight_name] = layer.unpack(params[layer.weight_name])
        return {
            name: tensor.clone() if tensor.data_ptr() == params[name].data_ptr() else tensor
            for name, tensor in own.items()
        }

    def lacks_statistics(self, states: Sequence[ServerState]) -> bool:
        """Whether any state leaves batch-norm statistics to be estimated from the data at hand."""
        return any(name not in state.buffers for state in states for name in self.statistics)

    def stacked(
        self, states: Sequence[ServerState], device: torch.device, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Packed weights and batch-norm statistics of some states; initial ones where none are."""
        rows = stack_params([state.params for state in states])
        for name, shape in self.statistics.items():
            initial = torch.full(shape, float(name.endswith("running_var")))
            own = [state.buffers.get(name, initial) for state in states]
            rows[name] = torch.stack([one.to(device, dtype) for one in own])
        return self.pack({name: one.to(device, dtype) for name, one in rows.items()})

    def outputs(self, params: Tensors, x: Tensor, live: Tensor) -> Outputs:
        """Features ``[J, B, D]``, in the module's order of channels, and logits ``[J, B, C]``.

        Of the inputs ``[J, B, …]`` only the live ones exist.
        """
        on = Pass(params, live)
        found = self._features(on, x, None).to(params[self.head.weight_name].dtype)
        # Features are columns of the last layer's weight, and lie in their order.
        return Outputs(self.head.unpack(found.flatten(2)), self.head.forward(on, [found])[0])

    def _features(self, on: Pass, x: Tensor, saved: list[Any] | None) -> Tensor:
        """The input of the last layer; what the other steps need backward goes to a list."""
        values: dict[int, Any] = {0: x}
        for step, done in zip(self.steps[:-1], self._done[:-1], strict=True):
            xs = [values[one] for one in step.inputs]
            values[step.output], kept = step.forward(on, xs)
            if saved is not None:
                saved.append(kept)
            for one in done:
                del values[one]
        features: Tensor = values[self.head.inputs[0]]
        return features

    def gradients(
        self, params: Tensors, batch: StepBatch, fuse: Fuse
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """The cross-entropy per sample ``[J, B]``, and gradients of its weighted sum by name.

        The batch term is part of the gradients, not of the loss. `fuse` compiles the parts between
        the matrix products.
        """
        on = Pass(params, batch.weight > 0, fuse, batch.masks, batch.frozen)
        saved, head = list[Any](), self.head
        features = self._features(on, batch.x, saved)
        # The last layer is small, and its logits decide: in full precision.
        weight = params[head.weight_name]
        x = features.flatten(2).to(weight.dtype)
        bias = params[f"{head.name}.bias"] if head.bias else weight.new_zeros(weight.shape[:2])
        z = torch.bmm(x, weight.transpose(1, 2))
        loss, dz, db = fuse(formulas.cross_entropy)(
            z, bias, batch.targets, batch.weight, *batch.calibration
        )
        added: Tensor | None = None
        if batch.term is not None:
            own, logits = head.unpack(x), z + bias.unsqueeze(1)
            added, d_logits = batch.term(own, logits, batch.targets, batch.weight)
            dz, db = dz + d_logits, db + d_logits.sum(dim=1)
        gradients: dict[str, Gradient] = {head.weight_name: product(dz.transpose(1, 2), x, x.dtype)}
        if head.bias:
            gradients[f"{head.name}.bias"] = db
        d_features = torch.bmm(dz, weight)
        if added is not None:
            d_features = d_features + head.pack(added)
        slopes = {head.inputs[0]: d_features.to(features.dtype).view(features.shape)}
        for step in reversed(self.steps[:-1]):
            kept = saved.pop()
            if step.output not in slopes:
                continue
            first = not self._moving & set(step.inputs)
            dxs, found = step.backward(on, kept, slopes.pop(step.output), first=first)
            gradients |= found
            for one, dx in zip(step.inputs, dxs, strict=True):
                if dx is not None and one in self._moving:
                    slopes[one] = slopes[one] + dx if one in slopes else dx
        return loss, gradients

    def numbers(self, batch: int) -> int:
        """How many numbers a step keeps at once per job, besides weights and gradients.

        Every value with its gradient; without kernels also copies of them.
        """
        plain = not any(layer.kernels for layer in self.layers)
        return batch * sum(map(math.prod, self._shapes.values())) * (6 if plain else 3)


def stacked_network(model: nn.Module, inputs: Tensor, *, kernels: bool = False) -> Network | None:
    """The stacked form of a module whose steps are known; None for any other.

    `kernels` asks for kernels wherever shapes suit them.
    """
    found = trace(model, inputs)
    if found is None:
        return None
    steps = [stacked_step(step, kernels=kernels) for step in found.steps]
    return Network(steps, found.shapes, one_kernel=kernels)


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


def stacked_form(workload: Workload) -> StackedForm | str:
    """The stacked form of a workload, or why there is none."""
    model, options = workload.model, workload.options
    device, dtype = options.torch_device(), options.torch_dtype()
    samples = resident(workload.federation.samples, device, dtype)
    if samples is None:
        return "its samples are fetched batch by batch, not held on the device"
    fixed = [name for name, one in model.named_parameters() if not one.requires_grad]
    if fixed:
        return f"parameter '{fixed[0]}' is not trained"
    compiles = options.compile and device.type == "cuda"
    kernels = compiles and dtype == torch.float32
    # Compared where products are exact.
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    few = samples.inputs[:2].to("cpu", torch.float64)
    network = stacked_network(exact, few, kernels=kernels)
    if network is None:
        return f"{type(model).__name__}: not all of its layers can be stacked"
    try:
        difference = _difference(exact, few, network.portable() or network)
    except (RuntimeError, ValueError, TypeError) as error:
        difference = reason_of(error)
    if difference is not None:
        return f"{type(model).__name__}: {difference}"
    inputs = network.lay_out(samples.inputs)
    if options.amp and network.convolves:
        inputs = inputs.bfloat16()
    return StackedForm(
        workload, network, inputs, samples.targets, Compiled() if compiles else unfused
    )


@torch.no_grad()
def _difference(model: nn.Module, inputs: Tensor, network: Network) -> str | None:
    """How a network's logits and features differ from a module's."""
    model.train()
    for module in model.modules():
        if isinstance(module, _DropoutNd | _BatchNorm):
            module.eval()  # their effect on a batch is known
    together = model(inputs)
    alone = torch.cat([model(one.unsqueeze(0)) for one in inputs])
    tensors = (*model.named_parameters(), *model.named_buffers())
    params = network.pack({name: tensor.unsqueeze(0) for name, tensor in tensors})
    batch = network.lay_out(inputs).unsqueeze(0)
    only = torch.eye(len(inputs), dtype=torch.bool, device=inputs.device)
    apart = [network.outputs(params, batch, one[None]).logits[0][one] for one in only]
    if not torch.equal(together, model(inputs)):
        return "it gives other logits for the same inputs when called twice"
    if not _close(torch.cat(apart), alone):
        return "the samples of a batch influence each other"
    found = network.outputs(params, batch, torch.ones_like(only[:1]))
    if not _close(together, found.logits[0]):
        return "it behaves differently in training and in evaluation"
    if declares_features(model):
        features = features_of(model.eval())(inputs).flatten(1)
        if not _close(found.features[0], features):
            return "it has other features than the input of its last layer"
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)
