"""How much the clients' gradients disagree.

The dissimilarity is ``1/|K| Σ_k ‖∇L_k(W) − ∇L(W)‖²``, where ``L_k`` is the mean loss over client
k's training samples and ``L = Σ_k n_k/n L_k`` that over the pooled ones. Gradients are those of the
model as it is tested: batch norm by the state's statistics, no dropout. They are compared client by
client and never all held at once.

Shapes: K clients, N samples, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import ConfigError
from fedproto.types import Tensors

Gradients = Mapping[str, Tensor]


@dataclass(frozen=True)
class Dissimilarity:
    """The mean of ‖∇L_k − ∇L‖² over clients.

    Attributes:
        error: Standard error of the mean as an estimate for all clients; 0 when all were.
    """

    mean: float
    error: float


def gradient_dissimilarity(
    model: nn.Module,
    clients: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Dissimilarity:
    """The dissimilarity of clients whose data is given as tensors."""
    total = sum(len(targets) for _, targets in clients)
    pooled: dict[str, Tensor] = {}
    for inputs, targets in clients:
        own = mean_gradient(model, loss, _samples, iter([(inputs, targets)]))
        for name, part in own.items():
            share = part * (len(targets) / total)
            pooled[name] = pooled[name] + share if name in pooled else share
    distances = [
        squared_distance(mean_gradient(model, loss, _samples, iter([client])), pooled)
        for client in clients
    ]
    found = torch.stack(distances) if distances else torch.empty(0)
    return summarize_distances(found, len(clients))


def summarize_distances(distance_k: Tensor, num_clients: int) -> Dissimilarity:
    """Mean and standard error of squared distances of some clients, drawn without replacement."""
    number = len(distance_k)
    if number == 0:
        raise ConfigError("the dissimilarity of no clients is not defined")
    distance_k = distance_k.double()
    if number >= num_clients:
        return Dissimilarity(float(distance_k.mean()), 0.0)
    spread = float(distance_k.std()) if number > 1 else math.inf
    left_out = 1 - number / num_clients
    return Dissimilarity(float(distance_k.mean()), spread * math.sqrt(left_out / number))


def squared_distance(one: Gradients, other: Gradients) -> Tensor:
    """``‖one − other‖²``, a number in float64; leading dimensions of `one` are kept."""
    total: Tensor | None = None
    for name, reference in other.items():
        leading = one[name].shape[: one[name].ndim - reference.ndim]
        difference = (one[name] - reference).reshape(*leading, -1)
        part = difference.square().sum(dim=-1).double()
        total = part if total is None else total + part
    if total is None:
        raise ConfigError("a model without parameters has no gradients")
    return total


def mean_gradient(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    loss_terms: Callable[[Tensor], Tensor],
    batches: Iterator[tuple[Tensor, Tensor]],
) -> dict[str, Tensor]:
    """The gradient of the mean loss over all batches, as a plain sum batch by batch."""
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


def distances_together(
    model: nn.Module, inputs: Tensor, targets: Tensor, weight: Tensor, reference: Gradients
) -> Tensor:
    """``‖∇L_k − ∇L‖²`` of several clients with the cross-entropy as loss, in one pass.

    The weights are the same for all, so layers see the samples of all clients as one batch; only
    the gradients of the weights are kept apart.

    Args:
        model: With its weights, in evaluation mode.
        inputs: The clients' samples, filled up to as many for each, ``[K, N, ...]``.
        targets: Their labels ``[K, N]``.
        weight: ``1 / n_k`` for a client's own samples and 0 for what only fills up, ``[K, N]``.
        reference: ``∇L`` by parameter name.

    Returns:
        Squared distances ``[K]``, in float64.
    """
    params = {name: tensor.detach() for name, tensor in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(own: Tensors, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        scores = functional_call(model, {**own, **buffers}, (x,))
        return (F.cross_entropy(scores, y, reduction="none") * w).sum()

    found = vmap(grad(loss), in_dims=(None, 0, 0, 0))(params, inputs, targets, weight)
    return squared_distance(found, reference)


def similar_sizes(
    sizes: Sequence[int], max_samples: int, max_clients: int
) -> Iterator[tuple[list[int], bool]]:
    """Parts of clients of about the same size, largest first, and whether they go together.

    Yields:
        Places of clients; large clients come alone, to be gone through batch by batch.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    start = 0
    while start < len(order):
        largest = max(1, sizes[order[start]])
        number = min(max_clients, max_samples // largest)
        if number < 4:
            yield [order[start]], False
            start += 1
        else:
            yield order[start : start + number], True
            start += number


def _samples(targets: Tensor) -> Tensor:
    return torch.tensor(len(targets), device=targets.device)
