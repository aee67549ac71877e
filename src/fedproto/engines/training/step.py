"""A local step: the gradient it follows, what is done to that gradient, the optimizer's update.

With F the local objective (the batch's loss and every term that a strategy adds to it):

1. ``g = ∇F(w)``. With SAM (Foret et al. 2021) ``g = ∇F(w + ρ ∇F(w) / ‖∇F(w)‖)``: the gradient that
   is normalised is that of the whole objective, over all trainable parameters together, and the
   proximal, the linear and every other term are evaluated at the perturbed weights too. Both
   passes see the same batch and the same dropout masks; batch-norm statistics and other buffers
   follow the first pass only. The reported loss is that at w.
2. Centralisation (Yong et al. 2020): of every tensor with more than one dimension, the mean over
   each output (filter or row) is subtracted. The perturbation of SAM is not centralised.
3. Clipping: ``g ← g · min(1, c / ‖g‖)``, with the L2 norm over all trainable parameters.
4. The optimizer adds weight decay, at w, and momentum; so neither centralisation nor clipping sees
   them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedproto.engines.training.options import TrainOptions

TINY = 1e-12
"""Added to the norm that a perturbation is divided by: without a gradient there is none."""


def take_step(
    model: nn.Module,
    train: TrainOptions,
    optimizer: torch.optim.Optimizer,
    compute_gradient: Callable[[], Tensor],
) -> Tensor:
    """Makes one local step.

    Args:
        model: Whose weights are updated.
        train: What is done to the gradient.
        optimizer: Of the model's parameters.
        compute_gradient: Leaves the gradient of the local objective at the model's present weights
            in the parameters, in place of any before, and returns the loss.

    Returns:
        The loss before the step.
    """
    loss = compute_gradient()
    params = [one for one in model.parameters() if one.grad is not None]
    if train.optimizer == "sam":
        _compute_perturbed(model, params, train.rho, compute_gradient)
    if train.centralize:
        for one in params:
            assert one.grad is not None  # noqa: S101 - those without one are left out
            centralize(one.grad)
    if train.clip_norm is not None:
        nn.utils.clip_grad_norm_(params, train.clip_norm)
    optimizer.step()
    return loss


@torch.no_grad()
def centralize(gradient: Tensor, start: int = 1) -> None:
    """Subtracts the mean over the dimensions from `start` on; nothing where there are none."""
    if gradient.dim() > start:
        gradient.sub_(gradient.mean(dim=tuple(range(start, gradient.dim())), keepdim=True))


def _compute_perturbed(
    model: nn.Module, params: Sequence[Tensor], rho: float, compute_gradient: Callable[[], Tensor]
) -> None:
    """Replaces the gradient by that at ``w + ρ g / ‖g‖``; weights and buffers stay as they were."""
    changed = [*params, *model.buffers()]
    with torch.no_grad():
        before = [one.clone() for one in changed]
        gradients = [one.grad for one in params if one.grad is not None]
        norm = torch.stack([torch.linalg.vector_norm(one) for one in gradients]).norm()
        for one, gradient in zip(params, gradients, strict=True):
            one.add_(gradient * (rho / (norm + TINY)))
    compute_gradient()
    with torch.no_grad():
        for one, value in zip(changed, before, strict=True):
            one.copy_(value)
