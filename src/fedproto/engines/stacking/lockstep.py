"""The lock-step loop: a stack of jobs, all making their n-th step together.

Jobs are sorted by their number of steps, so those still at work are always the leading part of the
stack, and the part shrinks as jobs finish. On CUDA, several steps of a part of a given size are
captured in one graph; the step's number is counted on the device, so a replay needs nothing from
the host. Sizes are rounded up to a few, and the finished jobs among them move at rate 0.

Shapes: J jobs, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedproto.engines.stacking.blocks import Fuse
from fedproto.engines.stacking.gradients import Gradient, as_tensor
from fedproto.engines.stacking.network import Network
from fedproto.engines.stacking.orders import StackOrders
from fedproto.engines.stacking.updates import per_job, rule_for
from fedproto.strategies.base import Strategy
from fedproto.training import TrainOptions
from fedproto.types import Tensors

STEPS_PER_GRAPH = 8
"""Long enough to hide the launch of a graph, short enough that little is done past a job's end."""


@dataclass(frozen=True)
class StackKind:
    """What the jobs of a stack have in common.

    Attributes:
        train: Batch size and update rule; rates and epochs are each job's own.
        proximal: Whether any of them is drawn to the received weights.
        penalized_by: The strategy, where it has a penalty of its own making.
    """

    train: TrainOptions
    proximal: bool
    penalized_by: Strategy | None


class Lockstep:
    """Trains stacks of jobs of one kind; its buffers serve one stack after another.

    Args:
        network: The models.
        inputs: All samples' inputs on the device, as the network wants them.
        targets: All samples' labels.
        kind: What the jobs have in common.
        capacity: Jobs in a stack at most.
        example: One model's packed tensors, for names and shapes.
        fuse: Makes element-wise parts faster.
        graphs: Whether to capture CUDA graphs.
    """

    def __init__(
        self,
        network: Network,
        inputs: Tensor,
        targets: Tensor,
        kind: StackKind,
        capacity: int,
        example: Tensors,
        *,
        fuse: Fuse,
        graphs: bool,
    ) -> None:
        # One alone would be compiled as a special case.
        self.capacity = max(capacity, 2) if graphs else capacity
        self._network, self._inputs, self._targets = network, inputs, targets
        self._kind, self._fuse = kind, fuse
        self._rule = rule_for(kind.train)
        self._device = inputs.device

        def numbers(kind: torch.dtype) -> Tensor:
            return torch.zeros(self.capacity, dtype=kind, device=self._device)

        def stack() -> dict[str, Tensor]:
            return {
                name: tensor.new_zeros((self.capacity, *tensor.shape))
                for name, tensor in example.items()
            }

        dtype = next(iter(example.values())).dtype
        self.params = stack()
        self._received = stack() if kind.proximal or kind.penalized_by else {}
        self._slots = [stack() for _ in range(self._rule.slots)]
        self._rate, self._proximal, self.loss = numbers(dtype), numbers(dtype), numbers(dtype)
        self._start, self._steps = numbers(torch.int64), numbers(torch.int64)
        self._last_epoch = numbers(torch.int64)
        self._count = torch.zeros((), dtype=torch.int64, device=self._device)
        self._samples = torch.zeros(0, dtype=torch.int64, device=self._device)
        self._sizes = _sizes(self.capacity)
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def train(self, packed: Tensors, orders: StackOrders, rate: Tensor, proximal: Tensor) -> Tensor:
        """Trains a stack; the trained weights are the leading part of `params`.

        Args:
            packed: The received weights per job, ``[J, …]``, jobs with more steps first.
            orders: The jobs' samples.
            rate: Learning rate per job, ``[J]``.
            proximal: Strength of the pull to the received weights per job, ``[J]``.

        Returns:
            The summed loss over each job's last epoch, ``[J]``.
        """
        jobs = len(orders.steps)
        self._load(packed, orders, rate, proximal, jobs)
        longest = int(orders.steps[0])
        waiting = -orders.steps
        done = 0
        while done < longest:
            active = int(np.searchsorted(waiting, -done, side="left"))
            if self._graphs is None:
                self._step(active)
                done += 1
            else:
                done += self._replay(active, self._graphs)
        return self.loss[:jobs].clone()

    def _load(
        self, packed: Tensors, orders: StackOrders, rate: Tensor, proximal: Tensor, jobs: int
    ) -> None:
        for name, tensor in packed.items():
            self.params[name][:jobs].copy_(tensor)
            if self._received:
                self._received[name][:jobs].copy_(tensor)
        for slot in self._slots:
            for tensor in slot.values():
                tensor.zero_()
        for target, values in (
            (self._rate, rate),
            (self._proximal, proximal),
            (self._start, torch.from_numpy(orders.start)),
            (self._steps, torch.from_numpy(orders.steps)),
            (self._last_epoch, torch.from_numpy(orders.last_epoch)),
        ):
            target.zero_()
            target[:jobs].copy_(values)
        self.loss.zero_()
        self._count.zero_()
        if len(orders.samples) > len(self._samples):
            # Graphs hold the old table's address.
            if self._graphs:
                self._graphs.clear()
            room = len(orders.samples) * 3 // 2
            self._samples = torch.zeros(room, dtype=torch.int64, device=self._device)
        self._samples[: len(orders.samples)].copy_(torch.from_numpy(orders.samples))

    def _replay(self, active: int, graphs: dict[int, torch.cuda.CUDAGraph]) -> int:
        """Makes one or several steps; returns how many."""
        size = next(size for size in self._sizes if size >= active)
        if size in graphs:
            graphs[size].replay()
            return STEPS_PER_GRAPH
        # The first step of a size runs by itself: it compiles and fills caches, which cannot be
        # done while capturing.
        self._step(size)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for _ in range(STEPS_PER_GRAPH):
                self._step(size)
        graphs[size] = graph
        return 1

    def _step(self, size: int) -> None:
        """One step of the leading jobs."""
        params = {name: tensor[:size] for name, tensor in self.params.items()}
        batch_size = self._kind.train.batch_size
        index, live = self._fuse(_select)(
            self._samples, self._start[:size], self._steps[:size], self._count, batch_size
        )
        x, targets = self._inputs[index], self._targets[index]
        weight, rate = self._fuse(_weigh)(
            live, self._rate[:size], self._steps[:size], self._count, scaled=self._rule.scaled
        )
        loss, gradients = self._network.gradients(params, x, targets, weight, self._fuse)
        gradients = self._with_penalties(params, gradients, rate, size)
        slots = [{name: kept[name][:size] for name in params} for kept in self._slots]
        self._rule.apply(params, gradients, slots, rate, self._count, self._fuse)
        self._fuse(_add_loss)(self.loss[:size], loss, live, self._last_epoch[:size], self._count)
        self._count.add_(1)

    def _with_penalties(
        self, params: Tensors, gradients: Mapping[str, Gradient], rate: Tensor, size: int
    ) -> dict[str, Gradient]:
        """Adds the gradients of the strategies' penalties."""
        gradients = dict(gradients)
        if not self._received:
            return gradients
        received = {name: tensor[:size] for name, tensor in self._received.items()}
        strategy = self._kind.penalized_by
        if strategy is not None:
            extra = self._network.pack(
                vmap(grad(strategy.penalty))(
                    self._network.unpack(params), self._network.unpack(received)
                )
            )
            for name, gradient in extra.items():
                scale = per_job(rate, gradient) if self._rule.scaled else 1
                gradients[name] = as_tensor(gradients[name]) + gradient * scale
            return gradients
        strength = self._proximal[:size]
        for name, weight in params.items():
            pull = per_job(strength * rate if self._rule.scaled else strength, weight)
            if self._rule.scaled:
                weight.lerp_(received[name], pull)
            else:
                gradients[name] = as_tensor(gradients[name]) + pull * (weight - received[name])
        return gradients


def _select(
    samples: Tensor, start: Tensor, steps: Tensor, count: Tensor, batch_size: int
) -> tuple[Tensor, Tensor]:
    """The samples of a step, ``[J, B]``, and which of them count."""
    offset = count * batch_size + torch.arange(batch_size, device=start.device)
    index = samples[(start.unsqueeze(1) + offset).clamp(max=len(samples) - 1)]
    live = (index >= 0) & (count < steps).unsqueeze(1)
    return index.clamp(min=0), live


def _weigh(
    live: Tensor, rate: Tensor, steps: Tensor, count: Tensor, *, scaled: bool
) -> tuple[Tensor, Tensor]:
    """What each sample counts, so that the loss is a mean over the true batch; and the rates."""
    weight = live.to(rate.dtype) / live.sum(dim=1, keepdim=True).clamp(min=1)
    rate = torch.where(count < steps, rate, 0)
    return weight * rate.unsqueeze(1) if scaled else weight, rate


def _add_loss(total: Tensor, loss: Tensor, live: Tensor, last_epoch: Tensor, count: Tensor) -> None:
    counts = live & (count >= last_epoch).unsqueeze(1)
    total.add_(torch.where(counts, loss, 0).sum(dim=1))


def _sizes(capacity: int) -> list[int]:
    """The sizes of the active part that graphs are captured for, about a quarter apart."""
    sizes, size = [], 2
    while size < capacity:
        sizes.append(size)
        size += max(1, 1 << max(size.bit_length() - 3, 0))
    return [*sizes, capacity]
