"""A user's module over stacked weights, through `torch.func`.

Right for any module whose layers treat the samples of a batch one by one. Two kinds of layers that
do not are supported: batch norm, which leaves out the samples that only fill up a batch, and
dropout.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - the name everyone uses
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from fedproto.data.samples import held
from fedproto.engines.base import Workload
from fedproto.engines.layers import Masks, freeze, goes_by_batch, layer_that_draws, statistics_names
from fedproto.engines.setting import read_state
from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.formulas import Compiled, Fuse, unfused
from fedproto.engines.stacking.layers import Gradient
from fedproto.engines.stacking.network import (
    LayerNetwork,
    Network,
    StackedForm,
    StepBatch,
    Term,
    layer_network,
)
from fedproto.models.base import declares_features, features_of, head_of
from fedproto.types import Tensors


def stacked_form(workload: Workload) -> StackedForm | str:
    """The stacked form of a workload, or why there is none."""
    model, options = workload.model, workload.options
    device, dtype = options.torch_device(), options.torch_dtype()
    samples = held(workload.federation.samples, device, dtype)
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
    network: Network | None = layer_network(exact, few, kernels=kernels)
    if network is None or reason_not_to_stack(exact, few, network.portable() or network):
        reason = reason_not_to_stack(exact, few, FunctionalNetwork(exact))
        if reason is not None:
            return f"{type(model).__name__}: {reason}"
        network = FunctionalNetwork(copy.deepcopy(model).to(device, dtype))
    inputs = network.lay_out(samples.inputs)
    if options.amp and kernels and isinstance(network, LayerNetwork) and network.convolves:
        inputs = inputs.bfloat16()
    return StackedForm(
        workload, network, inputs, samples.targets, Compiled() if compiles else unfused
    )


class _Part(nn.Module):
    """A module that calls a part of another, since `functional_call` calls modules alone."""

    def __init__(self, model: nn.Module, part: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.part = model, part

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(self.model)(x)
        return found


class _Norms:
    """The batch-norm layers of a module, during a pass.

    Attributes:
        live: Which samples exist, ``[B]``.
        moved: The statistics after the pass, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        """Replaces the `forward` of the module's batch-norm layers."""
        self.live = torch.zeros(0)
        self.moved: dict[str, Tensor] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm):
                layer.forward = functools.partial(self._normed, name, layer)  # type: ignore[method-assign]

    def _normed(self, name: str, layer: _BatchNorm, x: Tensor) -> Tensor:
        """Normalises by the statistics of the batch, and updates the running ones.

        A single value has no variance, and is normalised by the running statistics.
        """
        kept = [
            (one, self.moved.get(one, tensor)[None])
            for one, tensor in layer.named_buffers(name, recurse=False)
        ]
        if kept and not layer.training:
            mean, variance = kept[0][1], kept[1][1]
        else:
            values = x.movedim(1, -1).reshape(1, len(x), -1, x.shape[1])
            found = formulas.moments(values, self.live[None], groups=0)
            mean, variance, count = (one.flatten(1) for one in found)
        if kept and layer.training:
            (_, old_mean), (_, old_variance), (_, tracked) = kept
            counts = self.live & (count > 1)
            tracked = tracked + counts.any()
            share = 1 / tracked.clamp(min=1) if layer.momentum is None else layer.momentum
            new = formulas.moved_statistics(old_mean, old_variance, found, counts, share)
            for (one, _), tensor in zip(kept, (*new, tracked), strict=True):
                self.moved[one] = tensor[0]
            mean = torch.where(count > 1, mean, old_mean)
            variance = torch.where(count > 1, variance, old_variance)
        sides = (-1, *[1] * (x.dim() - 2))
        y = (x - mean.view(sides)) * torch.rsqrt(variance + layer.eps).view(sides)
        return y * layer.weight.view(sides) + layer.bias.view(sides) if layer.affine else y


class FunctionalNetwork(Network):
    """Stacked copies of one module."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model = copy.deepcopy(model)
        self._features, self._head = _Part(model, features_of), _Part(model, head_of)
        self._norms = _Norms(model)
        self._masks = Masks(model, next(model.parameters()).device)
        self._frozen = False
        self.statistics = {name: tuple(one.shape) for name, one in read_state(model)[1].items()}
        self.by_batch, self.draws = goes_by_batch(model), self._masks.drawn

    def frozen(self) -> FunctionalNetwork:
        """The same network with statistics that training neither uses nor changes."""
        same = copy.copy(self)
        same._frozen = True
        return same

    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Flattened features."""
        return self._evaluate(self._features, _inside_part(params), x, live).flatten(2)

    def logits(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """The module's output."""
        return self._evaluate(self._model, params, x, live)

    def _evaluate(
        self, module: nn.Module, params: Tensors, x: Tensor, live: Tensor | None
    ) -> Tensor:
        """The outputs of all jobs."""
        self._model.eval()

        def one(own: Tensors, x: Tensor, live: Tensor) -> Tensor:
            self._norms.live, self._norms.moved = live, {}
            found: Tensor = functional_call(module, dict(own), (x,))
            return found

        if live is None:
            live = x.new_ones(x.shape[:2], dtype=torch.bool)
        outputs: Tensor = vmap(one)(dict(params), x, live)
        return outputs

    def gradients(
        self, params: Tensors, batch: StepBatch, fuse: Fuse
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """Per-job gradients by `vmap` over `grad`."""
        self._model.train()
        if self._frozen:
            freeze(self._model)
        self._masks.step, term = batch.step, batch.term
        kept = {name: params[name] for name in self.statistics}
        own = {name: tensor for name, tensor in params.items() if name not in kept}
        loss = functools.partial(self._loss, term)
        gradients, (losses, moved) = vmap(grad(loss, has_aux=True))(
            own,
            kept,
            batch.seed,
            (batch.x, batch.targets, batch.weight),
            batch.calibration,
            () if term is None else term.inputs,
        )
        for name, tensor in moved.items():
            kept[name].copy_(tensor)
        return losses, gradients

    def _loss(
        self,
        term: Term | None,
        own: Tensors,
        kept: Tensors,
        seed: Tensor,
        batch: tuple[Tensor, Tensor, Tensor],
        calibration: tuple[Tensor, ...],
        inputs: tuple[Any, ...],
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        """One job's loss, that of each of its samples, and the statistics afterwards."""
        x, targets, weight = batch
        params = {**own, **kept}
        self._masks.seed = seed
        self._masks.begin_pass()
        self._norms.live, self._norms.moved = weight > 0, {}
        added: Tensor | float = 0.0
        if term is None:
            logits = functional_call(self._model, params, (x,))
        else:
            named = _inside_part(params)
            features = functional_call(self._features, named, (x,))
            logits = functional_call(self._head, named, (features,))
            added = term.one(features.flatten(1), logits, targets, weight, *inputs)
        if calibration:
            logits = logits * calibration[0] + calibration[1]
        each = F.cross_entropy(logits, targets, reduction="none")
        return (each * weight).sum() + added, (each.detach(), self._norms.moved)

    def numbers(self, batch: int) -> int:
        """A guess, since a module's activations are unknown; a stack that is too large is split."""
        return batch * 4 * sum(parameter.numel() for parameter in self._model.parameters()) // 10


def _inside_part(params: Tensors) -> dict[str, Tensor]:
    """A module's tensors by their names inside of a `_Part`."""
    return {f"model.{name}": tensor for name, tensor in params.items()}


def reason_not_to_stack(model: nn.Module, inputs: Tensor, network: Network) -> str | None:
    """Why a module cannot be trained as such a network; None when it can."""
    known = statistics_names(model)
    others = {name: one for name, one in model.named_buffers() if name not in known}
    reason = _unknown_layer(model, others)
    if reason is not None:
        return reason
    before = {name: tensor.clone() for name, tensor in others.items()}
    was_training = model.training
    try:
        reason = _difference(model, inputs, network)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"torch.func cannot run it ({str(error).splitlines()[0]})"
    finally:
        model.train(was_training)
    if any(not torch.equal(tensor, before[name]) for name, tensor in others.items()):
        return "it changes its buffers during training"
    return reason


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
    apart = [network.logits(params, batch, one[None])[0][one] for one in only]
    if not torch.equal(together, model(inputs)):
        return "its logits for the same inputs differ between calls"
    if not _close(torch.cat(apart), alone):
        return "the samples of a batch influence each other"
    if not _close(together, network.logits(params, batch)[0]):
        return "it behaves differently in training and in evaluation"
    if declares_features(model):
        features = features_of(model.eval())(inputs).flatten(1)
        if not _close(network.features(params, batch)[0], features):
            return "its features are not the input of its last layer"
    return None


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _unknown_layer(model: nn.Module, buffers: Tensors) -> str | None:
    drawing = layer_that_draws(model)
    if drawing is not None:
        return f"{drawing} draws random numbers"
    for name, tensor in buffers.items():
        if not tensor.is_floating_point():
            return f"its buffer '{name}' holds integers"
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    twice = [name for name in model.state_dict() if name not in named]
    return f"'{twice[0]}' is shared under another name" if twice else None
