"""A strategy's batch term: outputs of the model in training and of the frozen models it names.

Frozen models run in evaluation mode and without gradients. The model "received" is the one the job
started from; any other name is a group of the client's memory or of the broadcast that holds a
model. Tensors that the group lacks are those of the received model: all of them until there is such
a group, and the buffers where it holds parameters alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedproto.models.base import features_of, head_of
from fedproto.strategies.base import Batch, Local, Outputs, Strategy
from fedproto.types import ServerState, Tensors, part

RECEIVED = "received"


def outputs_of(model: nn.Module, x: Tensor) -> Outputs:
    """Features and logits of a batch in one pass."""
    features = features_of(model)(x)
    return Outputs(features.flatten(1), head_of(model)(features))


def frozen_weights(name: str, local: Local, received: ServerState) -> Tensors:
    """The tensors of a frozen model, by name."""
    kept = {} if name == RECEIVED else part(name, local.memory) or part(name, local.broadcast)
    return {**received.params, **received.buffers, **kept}


class BatchTerm:
    """The batch term of one job after another, with room for the frozen models."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, nn.Module] = {}
        self._frozen: Mapping[str, nn.Module] = {}

    def begin_job(self, strategy: Strategy, local: Local, received: ServerState) -> None:
        """Loads the frozen models of a job."""
        self._strategy, self._local = strategy, local
        for name in strategy.needs.frozen:
            if name not in self._copies:
                copied = copy.deepcopy(self._model)
                self._copies[name] = copied.requires_grad_(False).eval()
            tensors = frozen_weights(name, local, received)
            self._copies[name].load_state_dict(dict(tensors), strict=False)
        self._frozen = {name: self._copies[name] for name in strategy.needs.frozen}

    def __call__(self, x: Tensor, outputs: Outputs, targets: Tensor) -> Tensor | None:
        """The term of a batch, under the model in training."""
        with torch.no_grad():
            frozen = {name: outputs_of(model, x) for name, model in self._frozen.items()}
        weight = outputs.logits.new_full((len(x),), 1 / len(x))
        batch = Batch(outputs.features, outputs.logits, targets, weight, frozen)
        return self._strategy.batch_term(self._local, batch)
