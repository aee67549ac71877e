"""Dissimilarity of the clients' gradients.

The dissimilarity is ``1/|K| Σ_k ‖∇L_k(W) − ∇L(W)‖²``, where ``L_k`` is the mean loss over client
k's training samples and ``L = Σ_k n_k/n L_k`` that over the pooled ones. Gradients are those of the
model as it is tested: batch norm by the state's statistics, no dropout. `Probe.gradient_distances`
compares them client by client and never holds all of them at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedproto.errors import ConfigError
from fedproto.types import Tensors


def mean_gradient(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    loss_terms: Callable[[Tensor], Tensor],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """The gradient of the mean loss over all batches, summed batch by batch."""
    params = dict(model.named_parameters())
    total = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    terms = 0.0
    for inputs, targets in batches:
        number = loss_terms(targets)
        with torch.enable_grad():
            value = loss(model(inputs), targets) * number
            found = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        for summed, part in zip(total.values(), found, strict=True):
            if part is not None:
                summed += part
        terms += float(number)
    return {name: summed / max(terms, 1.0) for name, summed in total.items()}


def squared_distance(one: Tensors, other: Tensors) -> Tensor:
    """``‖one − other‖²`` over all parameters, in float64."""
    if not other:
        raise ConfigError("a model without parameters has no gradients")
    parts = [(one[name] - tensor).square().sum().double() for name, tensor in other.items()]
    return torch.stack(parts).sum()


def mean_and_error(distance_k: Tensor, num_clients: int) -> tuple[float, float]:
    """Mean and standard error of the distances of some clients, drawn without replacement.

    The error is 0 if these are all clients.
    """
    number = len(distance_k)
    if number == 0:
        raise ConfigError("the dissimilarity needs at least one client")
    mean = float(distance_k.double().mean())
    if number >= num_clients:
        return mean, 0.0
    deviation = float(distance_k.double().std()) if number > 1 else math.inf
    return mean, deviation * math.sqrt((1 - number / num_clients) / number)
