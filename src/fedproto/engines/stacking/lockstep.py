"""The lock-step loop: a stack of jobs, all making their n-th step together.

Jobs are sorted by their number of steps, so the unfinished ones are always the leading part of the
stack, and the part shrinks as jobs finish. On CUDA, several steps of a part of a given size are
captured in one graph; the step's number is counted on the device, so a replay needs nothing from
the host. Sizes are rounded up to a few, and finished jobs among them have a learning rate of 0.
The batch orders of all jobs lie flat in one table, so that a step finds its samples by counting.

Shapes: J jobs, B samples of a batch, P numbers in a model's row.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedproto.data.federation import Federation
from fedproto.engines.augment import gather_moved
from fedproto.engines.base import LocalJob, products
from fedproto.engines.stacking.formulas import unfused
from fedproto.engines.stacking.launching import MlpStep
from fedproto.engines.stacking.layers import Gradient, Pending, computed
from fedproto.engines.stacking.members import Member, StackKind, StackObjectives, StackTerm
from fedproto.engines.stacking.network import RowLayout, StackedForm, StepBatch
from fedproto.engines.training import TINY, TrainOptions, centralize
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder
from fedproto.types import Tensors

STEPS_PER_GRAPH = 8
"""Long enough to hide the launch of a graph, short enough that little is done past a job's end."""

CHECKED = 8
"""Jobs on which kernels are compared with PyTorch's products."""

TABLE_SIZE = 2**20
"""Initial entries of the table of samples on a GPU: 8 MB, enough for most rounds."""


NONE = -1
"""Fills up the last batch of an epoch."""


@dataclass(frozen=True)
class StackOrders:
    """Which samples each job sees at each step.

    Attributes:
        samples: Indices of samples; a job's batches lie one after another, all of full length.
        start: Where each job's batches begin.
        steps: The jobs' numbers of steps.
        last_epoch: The step at which each job's last epoch begins.
        last_samples: The number of samples of each job's last epoch.
        moves: How each image is moved and mirrored, where images are varied: ``[…, 3]``.
    """

    samples: Indices
    start: Indices
    steps: Indices
    last_epoch: Indices
    last_samples: Indices
    moves: Indices | None = None


def stack_orders(jobs: Sequence[LocalJob], federation: Federation) -> StackOrders:
    """Draws the jobs' batch orders.

    Runs of a sweep share their orders, and a straggler's is the beginning of the full one, so each
    is drawn once, however many jobs use it.
    """
    epochs: dict[BatchOrder, int] = {}
    for job in jobs:
        shared = _shared(job.batches)
        epochs[shared] = max(epochs.get(shared, 0), _epochs_begun(job.batches))
    starts: dict[BatchOrder, int] = {}
    parts: list[Indices] = []
    moves: list[Indices] = []
    augment, total = jobs[0].augment, 0
    for order, number in epochs.items():
        starts[order] = total
        own = federation.train_indices(order.client)
        length = order.steps_per_epoch * order.batch_size
        samples = np.full((number, length), NONE, dtype=np.int64)
        for epoch in range(number):
            samples[epoch, : order.num_examples] = own[order.epoch(epoch)]
            if augment is not None:
                found = augment.moves(augment.draws(order, epoch)[order.epoch(epoch)])
                moves.append(np.pad(found, ((0, length - len(found)), (0, 0))))
        parts.append(samples.reshape(-1))
        total += number * length
    # A finished job continues to read until the others are done: there is always a last entry.
    parts.append(np.full(1, NONE, dtype=np.int64))
    last = [_last_epoch(job.batches) for job in jobs]
    return StackOrders(
        samples=np.concatenate(parts),
        start=np.array([starts[_shared(job.batches)] for job in jobs], dtype=np.int64),
        steps=np.array([job.batches.steps for job in jobs], dtype=np.int64),
        last_epoch=np.array([first for first, _ in last], dtype=np.int64),
        last_samples=np.array([samples for _, samples in last], dtype=np.int64),
        moves=np.concatenate([*moves, np.zeros((1, 3), dtype=np.int64)]) if moves else None,
    )


def _shared(order: BatchOrder) -> BatchOrder:
    """The common order of jobs with the same samples and different numbers of steps."""
    return replace(order, epochs=0, max_steps=0)


def _epochs_begun(order: BatchOrder) -> int:
    return -(-order.steps // order.steps_per_epoch)


def _last_epoch(order: BatchOrder) -> tuple[int, int]:
    """The first step of the last epoch, and its number of samples."""
    first = max(_epochs_begun(order) - 1, 0) * order.steps_per_epoch
    return first, min((order.steps - first) * order.batch_size, order.num_examples)


class Lockstep:
    """Trains stacks of jobs of one kind; its buffers serve one stack after another.

    Attributes:
        capacity: The largest number of jobs.
        params: The jobs' weights ``[J, …]`` by name, packed; views of one matrix ``[J, P]``.
        statistics: The jobs' batch-norm statistics ``[J, …]`` by name.
    """

    def __init__(self, form: StackedForm, kind: StackKind, capacity: int, example: Tensors) -> None:
        """Makes all buffers.

        Args:
            form: The model and the samples.
            kind: The jobs' common properties.
            capacity: The largest number of jobs.
            example: One model's packed weights and statistics.
        """
        self._form, self._kind, self._fuse = form, kind, form.fuse
        self._device = form.inputs.device
        graphs = self._device.type == "cuda"
        self._network = network = form.network
        classes = form.workload.federation.num_classes
        # A compiler treats a dimension of 1 as a special case and would compile everything again.
        self.capacity = max(capacity, 2) if graphs else capacity
        dtype = next(iter(example.values())).dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros((self.capacity, *shape), dtype=dtype, device=self._device)

        self.statistics = {name: zeros(*shape) for name, shape in network.statistics.items()}
        weights = {name: one for name, one in example.items() if name not in self.statistics}
        self._layout = RowLayout(weights)
        self._flat = zeros(self._layout.size)
        self.params = self._layout.views(self._flat)
        self._objectives = StackObjectives(kind, network, self._layout, self._flat, classes)
        self._term = None if kind.term_of is None else StackTerm(kind.term_of, network)
        self._gradient = None if kind.in_place else zeros(self._layout.size)
        self._slots = [zeros(self._layout.size) for _ in range(optimizer_slots(kind.train))]
        self._rate, self._loss = zeros(), zeros()
        self._integers = torch.zeros((4, self.capacity), dtype=torch.int64, device=self._device)
        self._start, self._steps, self._last_epoch, self._seed = self._integers
        self._count = self._integers.new_zeros(())
        self._samples = self._integers.new_zeros(TABLE_SIZE if graphs else 0)
        self._moves = (
            None if kind.augment is None else self._samples.new_zeros(len(self._samples), 3)
        )
        self._whole = network.whole_step(kind.train.batch_size) if kind.whole else None
        self._sizes = _sizes(self.capacity)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._checked = False

    def train(self, packed: Tensors, members: Sequence[Member]) -> tuple[Tensor, Indices]:
        """Trains a stack; the results are the leading part of `params` and `statistics`.

        Args:
            packed: The received weights per job, ``[J, …]``, jobs with more steps first.
            members: The jobs.

        Returns:
            The summed loss over each job's last epoch, ``[J]``, and its number of samples.
        """
        jobs = [member.job for member in members]
        orders = stack_orders(jobs, self._form.workload.federation)
        self._load(packed, orders, members)
        longest, waiting, done = int(orders.steps[0]), -orders.steps, 0
        while done < longest:
            active = int(np.searchsorted(waiting, -done, side="left"))
            if self._graphs is None:
                self._step(active)
                done += 1
            else:
                done += self._replay(active, longest - done, self._graphs)
        return self._loss[: len(members)].clone(), orders.last_samples

    def _load(self, packed: Tensors, orders: StackOrders, members: Sequence[Member]) -> None:
        for name, tensor in packed.items():
            (self.params | self.statistics)[name][: len(members)].copy_(tensor)
        self._objectives.load(self._flat, [member.objective for member in members])
        for tensor in (*self._slots, self._rate, self._integers, self._loss, self._count):
            tensor.zero_()
        rate = torch.tensor([member.job.lr for member in members], dtype=self._rate.dtype)
        self._rate[: len(members)].copy_(rate)
        seeds = [member.job.seed for member in members]
        integers = np.stack((orders.start, orders.steps, orders.last_epoch, seeds))
        self._integers[:, : len(members)].copy_(torch.from_numpy(integers))
        if self._term is not None:
            locals_ = [member.local for member in members]
            states = [member.job.state for member in members]
            if self._term.load(locals_, states, self.capacity):
                self._forget_graphs()
        table = torch.from_numpy(orders.samples)
        if len(table) > len(self._samples):
            self._forget_graphs()
            self._samples = self._samples.new_zeros(len(table) * 3 // 2)
            if self._moves is not None:
                self._moves = self._moves.new_zeros(len(self._samples), 3)
        self._samples[: len(table)].copy_(table)
        if self._moves is not None and orders.moves is not None:
            self._moves[: len(table)].copy_(torch.from_numpy(orders.moves))

    def _forget_graphs(self) -> None:
        """Graphs hold addresses of buffers; without graphs their memory pool is gone, too."""
        if self._graphs:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()

    def _replay(
        self, active: int, left: int, graphs: dict[tuple[int, int], torch.cuda.CUDAGraph]
    ) -> int:
        """Makes one or several of the steps that are left; returns how many."""
        size = next(size for size in self._sizes if size >= active)
        steps = STEPS_PER_GRAPH if left >= STEPS_PER_GRAPH else 1
        if (size, steps) in graphs:
            graphs[size, steps].replay()
            return steps
        self._check_kernels(size)
        # The first step of a size compiles and fills caches, which a capture cannot do.
        self._step(size)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            for _ in range(steps):
                self._step(size)
        graphs[size, steps] = graph
        return 1

    def _check_kernels(self, size: int) -> None:
        """Compares a step by kernels with one by PyTorch's products; drops kernels that differ.

        Kernels are compiled for the device at hand, and errors of the compiler would go unnoticed.
        """
        plain = self._network.portable()
        if plain is None or self._checked:
            return
        self._checked, size = True, min(size, CHECKED)
        touched = [self._flat, *self._slots, *self.statistics.values(), self._loss, self._count]
        before = [tensor.clone() for tensor in touched]
        own = self._network, self._whole, self._fuse
        changes = []
        # In full precision, since with tf32 rounding can be most of a small gradient.
        with products(tf32=False, tune=torch.backends.cudnn.benchmark):
            for network, whole in ((plain, None), own[:2]):
                self._network, self._whole, self._fuse = network, whole, unfused
                self._step(size)
                changed = before[0] - self._flat if self._gradient is None else self._gradient
                changes.append(changed[:size].clone())
                for tensor, value in zip(touched, before, strict=True):
                    tensor.copy_(value)
        self._network, self._whole, self._fuse = own
        # In bfloat16 a maximum may be another pixel.
        most = 0.01 if self._form.inputs.dtype != torch.bfloat16 else 0.2
        if (changes[1] - changes[0]).norm() > most * changes[0].norm():
            warnings.warn(
                "the stacked engine's kernels give wrong gradients on this device and are not used;"
                " set engine.compile = false",
                stacklevel=2,
            )
            self._network, self._whole = plain, None

    def _step(self, size: int) -> None:
        """One step of the leading jobs."""
        if self._whole is not None:
            self._step_in_one_kernel(self._whole, size)
            return
        x, targets, live, weight, rate = self._fuse(next_batch)(
            self._form.inputs,
            self._form.targets,
            self._samples,
            self._start[:size],
            self._steps[:size],
            self._rate[:size],
            self._count,
            self._kind.train.batch_size,
            self._moves,
            scaled=self._kind.in_place,
        )
        calibration = self._objectives.calibration(size)
        term = None if self._term is None else self._term.bound(x, live)
        masks, frozen = (self._seed[:size], self._count), self._kind.train.batch_norm == "frozen"
        batch = StepBatch(x, targets, weight, calibration, term, masks, frozen)
        flat = self._flat[:size]
        statistics = {name: rows[:size] for name, rows in self.statistics.items()}
        loss, gradients = self._gradients(flat, statistics, batch)
        if self._kind.in_place:
            self._descend(flat, gradients, rate)
        else:
            gradient = self._whole_gradient(flat, gradients)
            if self._kind.train.optimizer == "sam":
                nearby = perturbed(flat, gradient, self._kind.train.rho)
                aside = {name: rows.clone() for name, rows in statistics.items()}
                self._whole_gradient(nearby, self._gradients(nearby, aside, batch)[1])
            self._update(flat, gradient, rate)
        self._fuse(end_step)(self._loss[:size], loss, live, self._last_epoch[:size], self._count)

    def _gradients(
        self, flat: Tensor, statistics: Tensors, batch: StepBatch
    ) -> tuple[Tensor, dict[str, Gradient]]:
        """The loss per sample and its gradients at these weights; statistics are changed."""
        params = {**self._layout.views(flat), **statistics}
        return self._network.gradients(params, batch, self._fuse)

    def _step_in_one_kernel(self, step: MlpStep, size: int) -> None:
        received, proximal = self._objectives.received, self._objectives.proximal
        tensors = [
            *(self._form.inputs, self._form.targets, self._samples, self._flat),
            self._flat if received is None else received,
            *(self._start, self._steps, self._last_epoch, self._rate, proximal),
            *(self._count, self._loss),
        ]
        step(size, tensors, self._layout.starts, proximal=received is not None)
        self._count.add_(1)

    def _descend(self, flat: Tensor, gradients: Mapping[str, Gradient], rate: Tensor) -> None:
        """Gradient descent without momentum, inside the products that give the gradients.

        The samples' weights were multiplied by the learning rate.
        """
        layout, params = self._layout, self._layout.views(flat)
        self._objectives.descend(flat, rate, self._kind.train.weight_decay, self._fuse)
        small = layout.gather_small({name: computed(gradients[name]) for name in layout.small})
        flat[:, : layout.small_size].sub_(small)
        for name in (name for name in layout.starts if name not in layout.small):
            gradient = gradients[name]
            if isinstance(gradient, Pending):
                gradient.subtract_from(params[name])
            else:
                params[name].sub_(gradient)

    def _whole_gradient(self, flat: Tensor, gradients: Mapping[str, Gradient]) -> Tensor:
        """The gradient of the local objective at these weights, as rows."""
        assert self._gradient is not None  # noqa: S101 - there is one unless descent is in place
        gradient = self._gradient[: len(flat)]
        for name, view in self._layout.views(gradient).items():
            view.copy_(computed(gradients[name]))
        self._objectives.add_gradient(gradient, flat)
        return gradient

    def _update(self, flat: Tensor, gradient: Tensor, rate: Tensor) -> None:
        """Updates the weights by any optimizer, as `fedproto.engines.training.step` does."""
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
        rate, decay = rate.unsqueeze(1), train.weight_decay
        if train.optimizer == "adam":
            self._fuse(adam_step)(flat, gradient, slots, rate, self._count, decay)
        else:
            self._fuse(sgd_step)(flat, gradient, slots, rate, train.momentum, decay)


def _sizes(capacity: int) -> list[int]:
    """The sizes of the leading part that graphs are captured for, about a quarter apart."""
    sizes, size = [], 2
    while size < capacity:
        sizes.append(size)
        size += max(1, 1 << max(size.bit_length() - 3, 0))
    return [*sizes, capacity]


def optimizer_slots(train: TrainOptions) -> int:
    """Rows of the weights' size that an optimizer keeps; zero before the first step."""
    return 2 if train.optimizer == "adam" else int(train.momentum > 0)


def next_batch(
    inputs: Tensor,
    targets: Tensor,
    samples: Tensor,
    start: Tensor,
    steps: Tensor,
    rate: Tensor,
    count: Tensor,
    batch_size: int,
    moves: Tensor | None = None,
    *,
    scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The batches of a step.

    Returns:
        Inputs and targets ``[J, B, …]``; which samples exist; their weights, by which the loss is
        a mean over the true batch (times the rate if `scaled`); and the jobs' rates, 0 for finished
        ones.
    """
    offset = count * batch_size + torch.arange(batch_size, device=start.device)
    places = (start.unsqueeze(1) + offset).clamp(max=len(samples) - 1)
    index = samples[places]
    busy = count < steps
    live = (index >= 0) & busy.unsqueeze(1)
    index = index.clamp(min=0)
    rate = torch.where(busy, rate, 0)
    weight = live.to(rate.dtype) / live.sum(dim=1, keepdim=True).clamp(min=1)
    weight = weight * rate.unsqueeze(1) if scaled else weight
    x = inputs[index] if moves is None else gather_moved(inputs, index, moves[places], 0)
    return x, targets[index], live, weight, rate


def end_step(total: Tensor, loss: Tensor, live: Tensor, last_epoch: Tensor, count: Tensor) -> None:
    """Adds the losses that belong to a last epoch, and counts the step."""
    counts = live & (count >= last_epoch).unsqueeze(1)
    total.add_(torch.where(counts, loss, 0).sum(dim=1))
    count.add_(1)


def sgd_step(
    weight: Tensor,
    gradient: Tensor,
    slots: Sequence[Tensor],
    rate: Tensor,
    momentum: float,
    weight_decay: float,
) -> None:
    """`torch.optim.SGD`: ``v = m·v + g``, ``w −= rate · v``; the rate of a finished job is 0."""
    gradient = gradient + weight_decay * weight
    if slots:
        gradient = slots[0].mul_(momentum).add_(gradient)
    weight.sub_(rate * gradient)


def adam_step(
    weight: Tensor,
    gradient: Tensor,
    slots: Sequence[Tensor],
    rate: Tensor,
    count: Tensor,
    weight_decay: float,
) -> None:
    """`torch.optim.Adam`; all jobs of a stack are at the same step."""
    mean, square = slots
    beta1, beta2, epsilon = 0.9, 0.999, 1e-8
    steps = (count + 1).double()
    start1 = (1 - torch.pow(beta1, steps)).to(weight.dtype)
    start2 = (1 - torch.pow(beta2, steps)).sqrt().to(weight.dtype)
    gradient = gradient + weight_decay * weight
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    weight.sub_(rate / start1 * mean / (square.sqrt() / start2 + epsilon))


def perturbed(weight: Tensor, gradient: Tensor, rho: float) -> Tensor:
    """SAM's weights ``w + ρ g / ‖g‖`` of every job; those of a job without a gradient are w."""
    return weight + gradient * (rho / (_norm(gradient) + TINY))


def clip(gradient: Tensor, most: float) -> None:
    """`torch.nn.utils.clip_grad_norm_` of every job's row."""
    gradient.mul_((most / (_norm(gradient) + 1e-6)).clamp(max=1))


def _norm(gradient: Tensor) -> Tensor:
    """L2 norms of rows ``[J, P]``; gaps between a row's tensors are zero."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    return norm
