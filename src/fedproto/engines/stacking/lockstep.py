"""The lock-step loop: a stack of jobs, all making their n-th step together.

Jobs are sorted by their number of steps, so those still at work are always the leading part of the
stack, and the part shrinks as jobs finish. On CUDA, several steps of a part of a given size are
captured in one graph; the step's number is counted on the device, so a replay needs nothing from
the host. Sizes are rounded up to a few, and the finished jobs among them move at rate 0.

Shapes: J jobs, B samples of a batch.
"""

# Long: one class, all of whose steps share its buffers.
from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedproto.engines.base import products
from fedproto.engines.stacking.flat import FlatLayout
from fedproto.engines.stacking.fusing import Fuse, unfused
from fedproto.engines.stacking.gradients import Gradient, as_tensor, subtract
from fedproto.engines.stacking.network import Network
from fedproto.engines.stacking.objectives import StackKind, StackObjectives
from fedproto.engines.stacking.optimizers import clip, optimizer_for, perturbed
from fedproto.engines.stacking.orders import StackOrders, end_step, next_batch
from fedproto.engines.stacking.terms import StackTerm
from fedproto.engines.stacking.whole import MlpStep, StepState
from fedproto.engines.training import centralize
from fedproto.rng import Indices
from fedproto.strategies.base import Local, Objective
from fedproto.types import ServerState, Tensors

STEPS_PER_GRAPH = 8
"""Long enough to hide the launch of a graph, short enough that little is done past a job's end."""

FIRST_STEPS = 32
"""Steps whose samples are drawn before the first step is made."""

TABLE_ROOM = 2**20
"""Entries of the table of samples to begin with: 8 MB."""


class Lockstep:
    """Trains stacks of jobs of one kind; its buffers serve one stack after another."""

    # Long: every buffer is made once, here.
    def __init__(
        self,
        network: Network,
        inputs: Tensor,
        targets: Tensor,
        kind: StackKind,
        capacity: int,
        example: Tensors,
        classes: int,
        *,
        fuse: Fuse,
        graphs: bool,
    ) -> None:
        # One alone would be compiled as a special case.
        self.capacity = max(capacity, 2) if graphs else capacity
        self._network, self._inputs, self._targets = network, inputs, targets
        self._kind, self._fuse = kind, fuse
        self._rule = optimizer_for(kind.train)
        self._device = inputs.device

        def numbers(kind: torch.dtype) -> Tensor:
            return torch.zeros(self.capacity, dtype=kind, device=self._device)

        dtype = next(iter(example.values())).dtype
        kept = network.statistics
        self.statistics = {
            name: torch.zeros((self.capacity, *example[name].shape), dtype=dtype).to(self._device)
            for name in kept
        }
        example = {name: tensor for name, tensor in example.items() if name not in kept}
        self._layout = FlatLayout(example)

        def rows() -> Tensor:
            return torch.zeros((self.capacity, self._layout.size), dtype=dtype, device=self._device)

        self._flat = rows()
        self.params = self._layout.views(self._flat)
        self._objectives = StackObjectives(kind, network, self._layout, self._flat, classes)
        self._in_place = kind.in_place
        self.term = None if kind.term_of is None else StackTerm(kind.term_of, network)
        self._gradient = None if self._in_place else rows()
        self._slots = [rows() for _ in range(self._rule.slots)]
        self._rate, self.loss = numbers(dtype), numbers(dtype)
        self._start, self._steps = numbers(torch.int64), numbers(torch.int64)
        self._seed = numbers(torch.int64)
        self._last_epoch = numbers(torch.int64)
        self._count = torch.zeros((), dtype=torch.int64, device=self._device)
        # Room for most rounds on a GPU, where a larger table means capturing all graphs again.
        room = TABLE_ROOM if graphs else 0
        self._samples = torch.zeros(room, dtype=torch.int64, device=self._device)
        self._whole = network.whole_step(kind.train.batch_size) if kind.whole else None
        self._sizes = _sizes(self.capacity)
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._checked: set[int] = set()

    def load_term(self, locals_: Sequence[Local], states: Sequence[ServerState]) -> None:
        """Takes the tensors that the batch term of a stack sees."""
        anew = self.term is not None and self.term.load(locals_, states, self.capacity)
        if anew and self._graphs:
            self._forget_graphs()

    def _forget_graphs(self) -> None:
        """Graphs hold addresses of buffers that are gone; with the last of them their pool is."""
        if self._graphs:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()

    def train(
        self,
        packed: Tensors,
        orders: StackOrders,
        rate: Tensor,
        objectives: Sequence[Objective],
        seed: Tensor,
    ) -> Tensor:
        """Trains a stack; what was trained is the leading part of `params` and `statistics`.

        Args:
            packed: The received weights per job, ``[J, …]``, jobs with more steps first.
            orders: The jobs' samples.
            rate: Learning rate per job, ``[J]``.
            objectives: What is added to the loss, per job.
            seed: What a job draws by where models draw, ``[J]``.

        Returns:
            The summed loss over each job's last epoch, ``[J]``.
        """
        jobs = len(orders.steps)
        self._load(packed, orders, rate, objectives, seed)
        longest = int(orders.steps[0])
        waiting = -orders.steps
        done = drawn = 0
        while done < longest:
            if done + STEPS_PER_GRAPH > drawn:
                # A little to begin with; then more and more, while the device is at work.
                drawn = max(2 * drawn, FIRST_STEPS)
                orders.draw(drawn)
                self._send(orders.samples)
            active = int(np.searchsorted(waiting, -done, side="left"))
            if self._graphs is None:
                self._step(active)
                done += 1
            else:
                done += self._replay(active, self._graphs)
        return self.loss[:jobs].clone()

    def _load(
        self,
        packed: Tensors,
        orders: StackOrders,
        rate: Tensor,
        objectives: Sequence[Objective],
        seed: Tensor,
    ) -> None:
        jobs = len(objectives)
        for name, tensor in packed.items():
            (self.params | self.statistics)[name][:jobs].copy_(tensor)
        self._objectives.load(self._flat, objectives)
        for slot in self._slots:
            slot.zero_()
        for target, values in (
            (self._rate, rate),
            (self._seed, seed),
            (self._start, torch.from_numpy(orders.start)),
            (self._steps, torch.from_numpy(orders.steps)),
            (self._last_epoch, torch.from_numpy(orders.last_epoch)),
        ):
            target.zero_()
            target[:jobs].copy_(values)
        self.loss.zero_()
        self._count.zero_()
        if len(orders.samples) > len(self._samples):
            self._forget_graphs()
            room = len(orders.samples) * 3 // 2
            self._samples = torch.zeros(room, dtype=torch.int64, device=self._device)

    def _send(self, samples: Indices) -> None:
        """Brings the table of samples onto the device, without waiting for the steps under way."""
        table = torch.from_numpy(samples)
        if self._device.type == "cuda":
            table = table.pin_memory()
        self._samples[: len(table)].copy_(table, non_blocking=True)

    def _replay(self, active: int, graphs: dict[int, torch.cuda.CUDAGraph]) -> int:
        """Makes one or several steps; returns how many."""
        size = next(size for size in self._sizes if size >= active)
        if size in graphs:
            graphs[size].replay()
            return STEPS_PER_GRAPH
        # The first step of a size runs by itself: it compiles and fills caches, which cannot be
        # done while capturing.
        self._first_step(size)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for _ in range(STEPS_PER_GRAPH):
                self._step(size)
        graphs[size] = graph
        return 1

    def _step(self, size: int) -> None:
        """One step of the leading jobs."""
        if self._whole is not None:
            self._whole(size, self._state(), self._layout.starts)
            self._count.add_(1)
            return
        x, targets, live, weight, rate = self._fuse(next_batch)(
            self._inputs,
            self._targets,
            self._samples,
            self._start[:size],
            self._steps[:size],
            self._rate[:size],
            self._count,
            self._kind.train.batch_size,
            scaled=self._in_place,
        )
        calibration = self._objectives.calibration(size)
        term = None if self.term is None else self.term.bound(x, live)
        self._network.draw_by(self._seed[:size], self._count)

        def compute_gradients(flat: Tensor, kept: Tensors) -> tuple[Tensor, dict[str, Gradient]]:
            """The loss per sample and its gradients at these weights; statistics are changed."""
            seen = {**self._layout.views(flat), **kept}
            return self._network.gradients(seen, x, targets, weight, self._fuse, calibration, term)

        flat = self._flat[:size]
        kept = {name: rows[:size] for name, rows in self.statistics.items()}
        loss, gradients = compute_gradients(flat, kept)
        if self._in_place:
            self._descend(flat, gradients, rate)
        else:
            gradient = self._carry_out(flat, gradients)
            if self._kind.train.optimizer == "sam":
                nearby = perturbed(flat, gradient, self._kind.train.rho)
                aside = {name: rows.clone() for name, rows in kept.items()}
                self._carry_out(nearby, compute_gradients(nearby, aside)[1])
            self._follow_rule(flat, gradient, rate)
        self._fuse(end_step)(self.loss[:size], loss, live, self._last_epoch[:size], self._count)

    def _first_step(self, size: int) -> None:
        """Makes a step; where kernels do it, also without them, and goes on so if they differ.

        They are chosen by size and compiled for whatever device is there: what one of them gets
        wrong would otherwise be found in no result. A size is checked once.
        """
        plain = None if size in self._checked else self._network.portable()
        self._checked.add(size)
        if plain is None:
            self._step(size)
            return
        touched = [self._flat, *self._slots, *self.statistics.values(), self.loss, self._count]
        before = [tensor.clone() for tensor in touched]

        def made(network: Network, whole: MlpStep | None, fuse: Fuse) -> Tensor:
            """What a step changes that is made in some way; it is made from the same beginning."""
            for tensor, value in zip(touched, before, strict=True):
                tensor.copy_(value)
            own = self._network, self._whole, self._fuse
            self._network, self._whole, self._fuse = network, whole, fuse
            try:
                self._step(size)
            finally:
                self._network, self._whole, self._fuse = own
            changed = before[0] - self._flat if self._gradient is None else self._gradient
            return changed[:size].clone()

        try:
            expected: Tensor | None = made(plain, None, unfused)
        except torch.cuda.OutOfMemoryError:
            expected = None  # the portable way needs more than the stack was planned for
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # a capture could not take what the portable way leaves behind
        found = made(self._network, self._whole, self._fuse)
        # With tf32 a cell's maximum may be another one, and its gradient go to another pixel.
        wrong = expected is not None and (found - expected).norm() > 0.1 * expected.norm()
        if expected is not None and wrong and torch.get_float32_matmul_precision() != "highest":
            # Rounding can be most of a small gradient: then kernels are wrong if they are further
            # off than the portable way is by rounding alone.
            with products(tf32=False, tune=torch.backends.cudnn.benchmark):
                exact = made(plain, None, unfused)
            wrong = (found - exact).norm() > 3 * (expected - exact).norm()
            made(self._network, self._whole, self._fuse)
        if bool(wrong):
            warnings.warn(
                "kernels disagree with the portable way on this device and are not used to train;"
                " set engine.compile = false",
                stacklevel=2,
            )
            self._network, self._whole = plain, None
            made(plain, None, self._fuse)

    def _state(self) -> StepState:
        return StepState(
            self._inputs,
            self._targets,
            self._samples,
            self._flat,
            self._flat if self._objectives.received is None else self._objectives.received,
            self._start,
            self._steps,
            self._last_epoch,
            self._rate,
            self._objectives.proximal,
            self._count,
            self.loss,
        )

    def _descend(self, flat: Tensor, gradients: Mapping[str, Gradient], rate: Tensor) -> None:
        """Plain gradient descent, inside the products that give the gradients.

        These carry the rate already: the samples' weights were multiplied by it.
        """
        layout, params = self._layout, self._layout.views(flat)
        self._objectives.descend(flat, rate)
        small = layout.gather_small({name: as_tensor(gradients[name]) for name in layout.small})
        flat[:, : layout.small_size].sub_(small)
        for name, gradient in gradients.items():
            if name not in layout.small:
                subtract(gradient, params[name])

    def _carry_out(self, flat: Tensor, gradients: Mapping[str, Gradient]) -> Tensor:
        """The gradient of the whole local objective at these weights, as rows."""
        assert self._gradient is not None  # noqa: S101 - there is one unless descent is in place
        gradient = self._gradient[: len(flat)]
        for name, view in self._layout.views(gradient).items():
            view.copy_(as_tensor(gradients[name]))
        self._objectives.add_gradient(gradient, flat, self._layout.views(flat))
        return gradient

    def _follow_rule(self, flat: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Updates the weights by any rule, as `fedproto.engines.training` does."""
        train, slots = self._kind.train, [slot[: len(flat)] for slot in self._slots]
        if train.centralize:
            views = self._layout.views(gradient)
            # A filter's numbers lie together in the module's own layout alone.
            own = self._network.unpack(views)
            for tensor in own.values():
                centralize(tensor, start=2)
            for name, tensor in self._network.pack(own).items():
                views[name].copy_(tensor)
        if train.clip_norm is not None:
            clip(gradient, train.clip_norm)
        self._fuse(self._rule.step)(flat, gradient, slots, rate.unsqueeze(1), self._count)


def _sizes(capacity: int) -> list[int]:
    """The sizes of the active part that graphs are captured for, about a quarter apart."""
    sizes, size = [], 2
    while size < capacity:
        sizes.append(size)
        size += max(1, 1 << max(size.bit_length() - 3, 0))
    return [*sizes, capacity]
