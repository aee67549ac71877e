"""A strategy's batch term for all jobs of a stack at once, through `torch.func`.

The tensors that the term sees (class counts, memory, broadcast, frozen models) lie stacked in
buffers whose places never change, so that a captured graph finds them.

Shapes: J jobs, B samples of a batch, C classes, D feature channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.engines.stacking.network import Network, Term
from fedproto.engines.training import frozen_weights
from fedproto.strategies.base import Batch, Local, Outputs, Strategy
from fedproto.types import ServerState, Tensors, part, under

NUMBERS, CLASSES, PARAMS = "numbers", "classes", "params"
BROADCAST, MEMORY = "broadcast", "memory"
"""Groups of the stacked tensors."""


class StackTerm:
    """The batch term of a stack's jobs, which all have the same strategy."""

    def __init__(self, strategy: Strategy, network: Network) -> None:
        self._strategy, self._network = strategy, network
        self._head: tuple[str, ...] = ()
        self._tensors: dict[str, Tensor] = {}
        self._frozen: dict[str, dict[str, Tensor]] = {}

    def load(self, locals_: Sequence[Local], states: Sequence[ServerState], capacity: int) -> bool:
        """Takes the tensors of the leading jobs; returns whether buffers had to be made anew."""
        self._head = locals_[0].head
        each = [self._seen_by(local) for local in locals_]
        # Memory that some clients have and others do not have yet is left out for all.
        names = [name for name in each[0] if all(name in one for one in each)]
        tensors = {name: torch.stack([one[name] for one in each]) for name in names}
        frozen = {
            name: self._packed(
                [
                    frozen_weights(name, one, state)
                    for one, state in zip(locals_, states, strict=True)
                ]
            )
            for name in self._strategy.needs.frozen
        }
        groups = [(self._tensors, tensors)]
        groups += [(self._frozen.setdefault(name, {}), frozen[name]) for name in frozen]
        changed = [_load(room, given, capacity) for room, given in groups]
        return any(changed)

    def bound(self, x: Tensor, live: Tensor) -> Term:
        """The term of the leading jobs for a batch ``[J, B, …]``."""
        size = len(x)
        seen: dict[str, Any] = {name: one[:size] for name, one in self._tensors.items()}
        outputs = {}
        for name, params in self._frozen.items():
            own = {key: one[:size] for key, one in params.items()}
            outputs[name] = (
                self._network.features(own, x, live).detach(),
                self._network.scores(own, x, live).detach(),
            )
        return _Bound(self, seen, outputs)

    def one(
        self,
        features: Tensor,
        logits: Tensor,
        targets: Tensor,
        weight: Tensor,
        seen: Tensors,
        outputs: dict[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """One job's term."""
        number, steps, lr = seen[NUMBERS].unbind()
        local = Local(
            num_examples=number,
            steps=steps,
            lr=lr,
            classes=seen[CLASSES],
            params=part(PARAMS, seen),
            broadcast=part(BROADCAST, seen),
            memory=part(MEMORY, seen),
            head=self._head,
        )
        frozen = {name: Outputs(*found) for name, found in outputs.items()}
        batch = Batch(features, logits, targets, weight, frozen)
        found = self._strategy.batch_term(local, batch)
        return logits.sum() * 0 if found is None else found

    def _seen_by(self, local: Local) -> dict[str, Tensor]:
        """A client's tensors, without the models that are there as frozen ones."""

        def without_models(tensors: Tensors) -> Tensors:
            starts = tuple(f"{name}/" for name in self._strategy.needs.frozen)
            return {name: one for name, one in tensors.items() if not name.startswith(starts)}

        like = next(iter(local.params.values()))
        numbers = [float(local.num_examples), float(local.steps), float(local.lr)]
        return {
            NUMBERS: torch.tensor(numbers, dtype=like.dtype, device=like.device),
            CLASSES: local.classes,
            **under(PARAMS, local.params),
            **under(BROADCAST, without_models(local.broadcast)),
            **under(MEMORY, without_models(local.memory)),
        }

    def _packed(self, models: Sequence[Tensors]) -> dict[str, Tensor]:
        stacked = {name: torch.stack([one[name] for one in models]) for name in models[0]}
        kept = {name: stacked.pop(name) for name in self._network.statistics if name in stacked}
        return {**self._network.pack(stacked), **kept}


class _Bound:
    """A term with its batch's frozen outputs."""

    def __init__(
        self, term: StackTerm, seen: Tensors, outputs: dict[str, tuple[Tensor, Tensor]]
    ) -> None:
        self.one, self.inputs = term.one, (seen, outputs)

    def gradients(
        self, features: Tensor, logits: Tensor, targets: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients in the features ``[J, B, D]`` and in the logits ``[J, B, C]``."""
        found: tuple[Tensor, Tensor] = vmap(grad(self.one, argnums=(0, 1)))(
            features, logits, targets, weight, *self.inputs
        )
        return found


def _load(room: dict[str, Tensor], given: Tensors, capacity: int) -> bool:
    """Copies rows into buffers; makes them where names or shapes are others than before."""
    fits = room.keys() == given.keys() and all(
        room[name].shape[1:] == one.shape[1:] for name, one in given.items()
    )
    if not fits:
        room.clear()
        room |= {
            name: torch.zeros((capacity, *one.shape[1:]), dtype=one.dtype, device=one.device)
            for name, one in given.items()
        }
    for name, one in given.items():
        room[name][: len(one)].copy_(one)
    return not fits
