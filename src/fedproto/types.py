"""The values that travel between schedule, engine, strategy and store.

Shapes: C classes, D feature channels, K clients of the cohort.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self, TypeAlias, TypeVar

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
"""Named tensors: a model's parameters or buffers."""

Named = TypeVar("Named")

POOLED = -1
"""The client id that stands for the pooled data of all clients (centralised training)."""


VOID = 255
"""The label of pixels that belong to no class and are ignored."""


@dataclass(frozen=True, repr=False)
class Prototypes:
    """Mean features per class, kept as sums and counts so that merging is exact.

    Leading dimensions are allowed in front, for instance one per client.
    """

    sum: Tensor
    count: Tensor

    def __repr__(self) -> str:
        return f"Prototypes(shape {tuple(self.sum.shape)}, {int(self.seen.sum())} classes seen)"

    @property
    def mean(self) -> Tensor:
        """The prototypes ``[..., C, D]``; the zero vector for a class without features."""
        return self.sum / self.count.clamp(min=1).to(self.sum.dtype).unsqueeze(-1)

    @property
    def seen(self) -> Tensor:
        """Which classes have at least one feature, ``[..., C]``, boolean."""
        return self.count > 0

    def __iter__(self) -> Iterator[Tensor]:
        return (getattr(self, one.name) for one in fields(self))

    def __add__(self, other: Self) -> Self:
        return type(self)(*(one + another for one, another in zip(self, other, strict=True)))

    @staticmethod
    def stack(parts: Sequence[Prototypes]) -> Prototypes:
        """Several clients' prototypes along a new leading dimension, ``[K, C, D]``."""
        return Prototypes(
            torch.stack([part.sum for part in parts]), torch.stack([part.count for part in parts])
        )

    def merged(self) -> Prototypes:
        """Stacked clients' prototypes as those of their pooled data, ``[..., K, C, D]`` to
        ``[..., C, D]``.
        """  # noqa: D205 - the shapes belong in the first sentence
        return Prototypes(self.sum.sum(dim=-3), self.count.sum(dim=-2))


@dataclass(frozen=True, repr=False)
class ServerState:
    """All that a server needs to continue, and all that a checkpoint contains.

    Attributes:
        round: The round that comes next.
        params: Parameters that training continues from.
        buffers: The model's other tensors, likewise.
        memory: Tensors that strategy and sections keep from round to round, as they declared them.
        served_model: The model that is tested, where it differs from the trained one.
        also: Models that are tested besides, by their options as text (``serve.also``).
    """

    round: int
    params: Tensors
    buffers: Tensors
    memory: Tensors = field(default_factory=dict)
    served_model: ServerState | None = None
    also: Mapping[str, ServerState] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"ServerState(round {self.round}, {_size(self.params, self.buffers, self.memory)})"

    @property
    def served(self) -> ServerState:
        """The model that is tested, exported and given away."""
        return self if self.served_model is None else self.served_model

    @property
    def model(self) -> ServerState:
        """The trained model alone, which is what clients receive."""
        return ServerState(self.round, self.params, self.buffers)

    @cached_property
    def largest(self) -> Tensors:
        """The largest absolute value of each floating parameter, left on its device; or NaN."""
        named = ((name, one.detach()) for name, one in self.params.items())
        known = {name: one for name, one in named if one.is_floating_point() and one.numel()}
        values = list(known.values())
        if values and values[0].is_cuda:  # one operation for all, so that a GPU does not wait
            return dict(zip(known, torch._foreach_norm(values, math.inf), strict=True))
        # The norm is slow on a CPU.
        return {name: torch.stack(one.aminmax()).abs().amax() for name, one in known.items()}

    def to(self, device: torch.device) -> ServerState:
        """The same state on a device."""

        def moved(tensors: Tensors) -> Tensors:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        served = None if self.served_model is None else self.served_model.to(device)
        also = {name: one.to(device) for name, one in self.also.items()}
        return ServerState(
            self.round, moved(self.params), moved(self.buffers), moved(self.memory), served, also
        )


@dataclass(frozen=True, repr=False)
class ClientUpdate:
    """The result of a job.

    Attributes:
        num_examples: Number of training samples of the client.
        train_loss: Mean loss over the last local epoch; None when no step was made.
        epochs_done: Local epochs finished.
        steps: Local steps made; known from the job.
        lr: Learning rate of these steps, likewise.
        payload: Tensors that the strategy declares for updates.
        memory: Tensors that the client keeps for its next round; never sent.
        seconds: Time that the job took; 0 where the engine trains several jobs at once.
    """

    client: int
    num_examples: int
    params: Tensors
    buffers: Tensors
    train_loss: float | None
    epochs_done: int
    steps: int
    lr: float
    payload: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    def __repr__(self) -> str:
        return (
            f"ClientUpdate(client {self.client}, {self.num_examples} samples, {self.steps} steps,"
            f" {_size(self.params, self.buffers, self.payload)})"
        )


Updates: TypeAlias = Sequence[ClientUpdate]
"""A cohort's, in ascending order of clients."""


@dataclass(frozen=True)
class ClientFailure:
    """A job that gave no usable update."""

    client: int
    reason: str


@dataclass(frozen=True)
class ClientWeights:
    """The weight of each client's update.

    Attributes:
        client: One weight per client, ``[K]``, summing to one.
        tensor: Where a strategy weighs tensor by tensor: such a vector per parameter name, or one
            such column per row of the tensor, ``[K, R]``; a row whose column is 0 stays as it was.
        scale: Factor on each client's update before it is weighted, ``[K]``, or one number for all.
    """

    client: Tensor
    tensor: Mapping[str, Tensor] | None = None
    scale: Tensor | float = 1.0


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round: a line of ``rounds.jsonl``.

    Attributes:
        round: Number of the round, from 0.
        cohort: The clients asked, in ascending order.
        stragglers: Those that finish only part of their epochs.
        dropped: Those left out because partial work is not tolerated.
        epochs: Local epochs done, per client that took part.
        attention: Weight in the average, per client that took part.
        metrics: Scores of the aggregate model and means over the updates.
        bytes_down: Bytes sent to clients.
        bytes_up: Bytes received from clients.
        seconds: Wall-clock time, of runs that train together by the time their jobs took, or in
            equal parts where jobs are not timed; the one field that is not a function of
            configuration and seed.
        failures: Why a client's update was not used, per client.
        note: Unusual events, such as the reason for a skipped update.
        tables: Numbers of the aggregate model per client or class, where a measure gave them.
        also: Scores of the models of ``serve.also``, by their options as text; tables of them
            are among `tables`, as ``options/table``.
    """

    round: int
    cohort: list[int]
    stragglers: list[int]
    dropped: list[int]
    epochs: dict[int, int]
    attention: dict[int, float]
    metrics: dict[str, float]
    bytes_down: int
    bytes_up: int
    seconds: float
    failures: dict[int, str] = field(default_factory=dict)
    note: str | None = None
    tables: dict[str, dict[str, float]] = field(default_factory=dict)
    also: dict[str, dict[str, float]] = field(default_factory=dict)

    def of_model(self, name: str) -> RoundRecord:
        """The record without `also`, as if its model of this name had been the served one.

        An unknown name stands for the served model itself. Bytes remain those of all that clients
        sent, personal scores those of the served model.
        """
        tables = part(name, self.tables)
        if name not in self.also:
            others = {f"{one}/{table}" for one in self.also for table in part(one, self.tables)}
            tables = {one: table for one, table in self.tables.items() if one not in others}
        metrics = {**self.metrics, **self.also.get(name, {})}
        return replace(self, metrics=metrics, tables=tables, also={})


def under(group: str, named: Mapping[str, Named]) -> dict[str, Named]:
    """Named values as part of a larger map: ``weight`` becomes ``group/weight``."""
    return {f"{group}/{name}": one for name, one in named.items()}


def part(group: str, named: Mapping[str, Named]) -> dict[str, Named]:
    """The opposite of `under`: what a map holds of a group; nothing of the others."""
    start = f"{group}/"
    return {name.removeprefix(start): one for name, one in named.items() if name.startswith(start)}


def num_bytes(*groups: Tensors | None) -> int:
    """Size of named tensors on the wire."""
    return sum(
        tensor.numel() * tensor.element_size()
        for group in groups
        if group
        for tensor in group.values()
    )


def _size(*groups: Tensors) -> str:
    return f"{sum(map(len, groups))} tensors of {num_bytes(*groups) / 1e6:.3g} MB"
