"""A user's module over stacked weights, through `torch.func`.

Right for any module whose layers treat the samples of a batch one by one. Two kinds of layers that
do not are known: batch norm, which leaves out the samples that only fill up a batch, and dropout.
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

from fedproto.engines.layers import (
    Masks,
    freeze,
    goes_by_batch,
    layer_that_draws,
    layers,
    statistics_names,
)
from fedproto.engines.setting import read_state
from fedproto.engines.stacking import formulas
from fedproto.engines.stacking.fusing import Fuse
from fedproto.engines.stacking.gradients import Gradient
from fedproto.engines.stacking.network import Calibration, Network, Term
from fedproto.models.base import declares_features, features_of, head_of
from fedproto.types import Tensors


class _Part(nn.Module):
    """A module whose call is that of a part, since `functional_call` calls nothing else."""

    def __init__(self, model: nn.Module, part: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.part = model, part

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(self.model)(x)
        return found


class _Norms:
    """The batch-norm layers of a module, in the middle of a pass.

    Attributes:
        live: Which samples count, ``[B]``.
        share: What a batch counts in the statistics, instead of what the layers say.
        moved: The statistics after the pass, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes over the module's batch-norm layers."""
        self.live = torch.zeros(0)
        self.share: float | None = None
        self.moved: dict[str, Tensor] = {}
        for name, layer in model.named_modules():
            if isinstance(layer, _BatchNorm):
                layer.forward = functools.partial(self._normed, name, layer)  # type: ignore[method-assign]

    def _normed(self, name: str, layer: _BatchNorm, x: Tensor) -> Tensor:
        """By the statistics of the batch, which those that the layer keeps follow.

        A single value has no variance, and is normalised by what was kept.
        """
        kept = [
            (one, self.moved.get(one, tensor)[None])
            for one, tensor in layer.named_buffers(name, recurse=False)
        ]
        if kept and not layer.training:
            mean, variance = kept[0][1], kept[1][1]
        else:
            values = x.movedim(1, -1).reshape(1, len(x), -1, 1, x.shape[1])
            mean, variance, count = found = formulas.moments(values, self.live[None])
        if kept and layer.training:
            (_, old_mean), (_, old_variance), (_, tracked) = kept
            counts = self.live & (count > 1)
            tracked = tracked + counts.any()
            given = layer.momentum if self.share is None else self.share
            share = 1 / tracked.clamp(min=1) if given is None else given
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
        self._frozen, self._drawn_by = False, (torch.zeros(0), torch.zeros(()))
        self.statistics = {name: tuple(one.shape) for name, one in read_state(model)[1].items()}
        self.by_batch, self.draws = goes_by_batch(model), self._masks.drawn

    def draw_by(self, seed: Tensor, step: Tensor) -> None:
        """For the masks of dropout."""
        self._drawn_by = seed, step

    def frozen(self) -> FunctionalNetwork:
        """The same with statistics that training neither follows nor changes."""
        same = copy.copy(self)
        same._frozen = True
        return same

    def measured(self, params: Tensors, x: Tensor, live: Tensor, share: float) -> Tensors:
        """Those that the layers find where nothing else is trained."""
        self._model.eval()
        for layer in layers(self._model).values():
            layer.train()
        self._norms.share = share
        try:
            return self._passed(self._model, params, x, live)[1]
        finally:
            self._norms.share = None

    def _passed(
        self, module: nn.Module, params: Tensors, x: Tensor, live: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """What calls give for all jobs, and the statistics that they leave."""

        def one(own: Tensors, x: Tensor, live: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            self._norms.live, self._norms.moved = live, {}
            return functional_call(module, dict(own), (x,)), self._norms.moved

        if live is None:
            live = x.new_ones(x.shape[:2], dtype=torch.bool)
        found: tuple[Tensor, dict[str, Tensor]] = vmap(one)(dict(params), x, live)
        return found

    def lay_out(self, inputs: Tensor) -> Tensor:
        """As the module wants them."""
        return inputs

    def pack(self, params: Tensors) -> dict[str, Tensor]:
        """As they are."""
        return dict(params)

    def unpack(self, params: Tensors) -> dict[str, Tensor]:
        """Copies."""
        return {name: tensor.clone() for name, tensor in params.items()}

    def features(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """Flattened features."""
        named = {f"model.{name}": tensor for name, tensor in params.items()}
        self._model.eval()
        return self._passed(self._features, named, x, live)[0].flatten(2)

    def scores(self, params: Tensors, x: Tensor, live: Tensor | None = None) -> Tensor:
        """What the module's call gives."""
        self._model.eval()
        return self._passed(self._model, params, x, live)[0]

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
        """Per-job gradients by `vmap` over `grad`."""
        del fuse
        self._model.train()
        if self._frozen:
            freeze(self._model)
        changes = () if calibration is None else (calibration.scale, calibration.offset)
        inputs = () if term is None else term.inputs
        loss = functools.partial(self._loss, None if term is None else term.one)
        kept = {name: params[name] for name in self.statistics}
        own = {name: tensor for name, tensor in params.items() if name not in kept}
        gradients, (losses, moved) = vmap(grad(loss, has_aux=True))(
            own, kept, self._drawn_by[0], x, targets, weight, changes, inputs
        )
        for name, tensor in moved.items():
            kept[name].copy_(tensor)
        return losses, gradients

    def _loss(
        self,
        term: Callable[..., Tensor] | None,
        own: Tensors,
        kept: Tensors,
        seed: Tensor,
        x: Tensor,
        targets: Tensor,
        weight: Tensor,
        changes: tuple[Tensor, ...],
        inputs: tuple[Any, ...],
    ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
        """One job's loss, that of each of its samples, and the statistics afterwards."""
        everything = {**own, **kept}
        self._masks.seed, self._masks.step = seed, self._drawn_by[1]
        self._norms.moved = {}
        self._masks.begin_pass()
        self._norms.live = weight > 0
        added: Tensor | float = 0.0
        if term is None:
            logits = functional_call(self._model, everything, (x,))
        else:
            named = {f"model.{name}": tensor for name, tensor in everything.items()}
            features = functional_call(self._features, named, (x,))
            logits = functional_call(self._head, named, (features,))
            added = term(features.flatten(1), logits, targets, weight, *inputs)
        if changes:
            logits = logits * changes[0] + changes[1]
        each = F.cross_entropy(logits, targets, reduction="none")
        return (each * weight).sum() + added, (each.detach(), self._norms.moved)

    def numbers(self, batch: int) -> int:
        """A guess: what a module keeps cannot be known; running out of memory halves the stack."""
        return batch * 4 * sum(parameter.numel() for parameter in self._model.parameters()) // 10


def reason_not_to_stack(model: nn.Module, inputs: Tensor) -> str | None:
    """Why a module cannot be trained in a stack; None when it can."""
    others = {
        name: tensor
        for name, tensor in model.named_buffers()
        if name not in statistics_names(model)
    }
    reason = _unknown_layer(model, others)
    if reason is not None:
        return reason
    before = {name: tensor.clone() for name, tensor in others.items()}
    was_training = model.training
    try:
        with torch.no_grad():
            model.train()
            for module in model.modules():
                if isinstance(module, _DropoutNd | _BatchNorm):
                    module.eval()  # what these do to a batch is known
            together = model(inputs)
            alone = torch.cat([model(one.unsqueeze(0)) for one in inputs])
            again = model(inputs)
            params = {
                name: tensor.unsqueeze(0)
                for name, tensor in (*model.named_parameters(), *model.named_buffers())
            }
            network = FunctionalNetwork(model)
            stacked = network.scores(params, inputs.unsqueeze(0))[0]
            only = torch.eye(len(inputs), dtype=torch.bool, device=inputs.device)
            apart = [network.scores(params, inputs.unsqueeze(0), one[None])[0][one] for one in only]
            if declares_features(model):
                network.features(params, inputs.unsqueeze(0))
    except (RuntimeError, ValueError, TypeError) as error:
        return f"torch.func cannot run it ({str(error).splitlines()[0]})"
    finally:
        model.train(was_training)
    if any(not torch.equal(tensor, before[name]) for name, tensor in others.items()):
        return "it changes its buffers while it is trained"
    if not torch.equal(together, again):
        return "it gives other scores for the same inputs when called twice"
    if not torch.allclose(torch.cat(apart), alone, rtol=1e-3, atol=1e-4):
        return "the samples of a batch influence each other"
    if not torch.allclose(together, stacked, rtol=1e-3, atol=1e-4):
        return "it behaves differently in training and in evaluation"
    return None


def _unknown_layer(model: nn.Module, buffers: Tensors) -> str | None:
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    if frozen:
        return f"'{frozen[0]}' is not trained, and a stack trains all"
    drawing = layer_that_draws(model)
    if drawing is not None:
        return f"{drawing} draws random numbers"
    for name, tensor in buffers.items():
        if not tensor.is_floating_point():
            return f"its buffer '{name}' holds whole numbers"
    named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    twice = [name for name in model.state_dict() if name not in named]
    return f"'{twice[0]}' has another name as well" if twice else None
