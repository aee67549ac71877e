"""The captured engine: the reference engine's steps, each a replay of one CUDA graph.

A large model's step is hundreds of small kernels, which wait for the host to launch them. A step of
a given batch size is captured once and then replayed, for one job after another: weights are loaded
in place, the optimizer's state is set to zero where a fresh one is due, and the rate lies on the
device, as do the order of a job's samples and the place in it, so that a replay waits for nothing.

Steps with a linear term or calibrated logits, and the first step of a batch size, are made as in
the reference engine; jobs that need more than the engine's capabilities are handed to it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedproto.data.samples import TensorSamples, upload
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.base import ENGINES, EVERYTHING, Capability, LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.training import TrainOptions
from fedproto.errors import reason_of
from fedproto.rng import Indices
from fedproto.strategies.values import Local, Objective

WARM_UP = 2
"""Steps before a capture: kernels are chosen and work space is taken by the first ones."""

Shape: TypeAlias = tuple[int, ...]


@ENGINES.register("captured")
class CapturedEngine(ReferenceEngine):
    """Trains one job after another on CUDA, each step a replay of one graph."""

    # Optimizers take a rate that lies on the device as float32: too coarse for float64.
    capabilities = EVERYTHING - {
        Capability.CPU,
        Capability.FLOAT64,
        Capability.GENERATOR,
        Capability.BATCH_TERM,
        Capability.TRAINABLE,
    }

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._kinds: dict[tuple[TrainOptions, float, AugmentOptions | None], _Kind] = {}
        self._pool = None if self._device.type != "cuda" else torch.cuda.graph_pool_handle()
        self._order = _Order(self._samples, self._device)

    def close(self) -> None:
        """Frees the graphs with their memory."""
        super().close()
        self._kinds.clear()

    def _forget_graphs(self) -> None:
        """Graphs hold addresses of buffers; without graphs their memory pool is gone, too."""
        for kind in self._kinds.values():
            kind.graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _fit(
        self, job: LocalJob, indices: Indices, local: Local, objective: Objective
    ) -> tuple[Tensor, int]:
        # A personal model may train some of its parameters only.
        more = objective.calibrated or "trainable" in job.method.needs.hooks
        if self._pool is None or more or objective.linear is not None:
            return super()._fit(job, indices, local, objective)
        key = job.train.kind, objective.proximal, job.augment
        if key not in self._kinds:
            self._kinds[key] = _Kind(self, job, objective)
        kind = self._kinds[key].begin(job)
        if self._order.begin(job, indices):
            self._forget_graphs()
        loss, seen = kind.loss, 0
        for epoch, batches in enumerate(job.batches):
            loss.zero_()
            sizes = [len(batch) for batch in batches]
            if self._order.on_device:
                for size in sizes:
                    kind.step((size,))
            else:
                for inputs, targets in self._batches(job, indices, epoch, batches):
                    kind.step(self._order.put(inputs, targets))
            seen = sum(sizes)
        return loss.clone(), seen


class _Order:
    """The batches of a job: gathered on the device by its order, or put there one by one."""

    def __init__(self, samples: object, device: torch.device) -> None:
        self._samples = samples if isinstance(samples, TensorSamples) else None
        self.on_device = self._samples is not None
        self._table = torch.zeros(0, dtype=torch.int64, device=device)
        self._plan: Tensor | None = None
        self._place = torch.zeros((), dtype=torch.int64, device=device)
        self._windows: dict[Shape, tuple[Tensor, Tensor]] = {}

    def begin(self, job: LocalJob, indices: Indices) -> bool:
        """Loads the order of a job's samples; returns whether tensors lie elsewhere now."""
        if self._samples is None:
            return False
        epochs = [np.concatenate(list(batches)) for batches in job.batches]
        table = torch.from_numpy(indices[np.concatenate([np.zeros(0, np.int64), *epochs])])
        moved = len(table) > len(self._table)
        if moved:
            self._table, self._plan = self._table.new_zeros(2 * len(table)), None
        device, inputs = self._table.device, self._samples.inputs
        self._table[: len(table)].copy_(upload(table, device), non_blocking=True)
        if job.augment is not None:
            draws = [
                job.augment.draws(job.batches, epoch)[order] for epoch, order in enumerate(epochs)
            ]
            plan = job.augment.plan(np.concatenate(draws), tuple(inputs.shape[-2:]))
            plan = upload(plan.to(inputs.dtype) if plan.is_floating_point() else plan, device)
            if self._plan is None or self._plan.shape[1:] != plan.shape[1:]:
                self._plan, moved = plan.new_zeros((len(self._table), *plan.shape[1:])), True
            self._plan[: len(table)].copy_(plan, non_blocking=True)
        self._place.zero_()
        return moved

    def put(self, inputs: Tensor, targets: Tensor) -> Shape:
        """Takes a batch, whose key it returns."""
        key = (*inputs.shape, *targets.shape)
        if key not in self._windows:
            self._windows[key] = inputs.clone(), targets.clone()
        window = self._windows[key]
        window[0].copy_(inputs)
        window[1].copy_(targets)
        return key

    def next(self, key: Shape, augment: AugmentOptions | None) -> tuple[Tensor, Tensor]:
        """The next batch; a part of a captured step."""
        if self._samples is None:
            return self._windows[key]
        (size,) = key
        places = self._place + torch.arange(size, device=self._place.device)
        where = self._table[places]
        inputs, targets = self._samples.inputs[where], self._samples.targets[where]
        if augment is not None and self._plan is not None:
            inputs, targets = augment.vary(inputs, targets, self._plan[places])
        self._place += size
        return inputs, targets


class _Kind:
    """The steps of jobs that differ in weights, data and rate alone.

    Attributes:
        loss: The sum of the losses of all samples since it was set to zero.
        graphs: A step of each size of a batch; None where it is not captured.
    """

    def __init__(self, engine: CapturedEngine, job: LocalJob, objective: Objective) -> None:
        self._engine, self._augment, train = engine, job.augment, job.train.kind
        pulled = engine._model.named_parameters() if objective.proximal else ()
        self._received = {name: one.detach().clone() for name, one in pulled}
        self._rate = torch.zeros((), device=engine._device)
        self.loss = torch.zeros((), device=engine._device)
        self._optimizer = train.optimizer_for(engine._model, self._rate)
        self._step = engine._step_by(train, self._optimizer, objective, self._received)
        self.graphs: dict[Shape, torch.cuda.CUDAGraph | None] = {}
        self._refused = False

    def begin(self, job: LocalJob) -> _Kind:
        """Makes ready for a job, whose weights the model holds already."""
        self._engine._begin(job)
        self._rate.fill_(job.lr)
        if remembered := _tensors(self._optimizer):
            torch._foreach_zero_(remembered)
        if self._received:
            torch._foreach_copy_(
                list(self._received.values()), [job.state.params[name] for name in self._received]
            )
        return self

    def step(self, key: Shape) -> None:
        """One step on the next batch: the first of its size as it is, the second captured."""
        seen, graph = key in self.graphs, self.graphs.setdefault(key, None)
        if seen and graph is None and not self._refused:
            try:
                graph = self.graphs[key] = self._capture(key)
            except RuntimeError as error:
                self._refused = True
                self._engine.workload.callback.on_notice(
                    f"steps are not captured in a CUDA graph: {reason_of(error)}"
                )
        if graph is None:
            self._eager(key)
        else:
            graph.replay()

    def _eager(self, key: Shape) -> None:
        inputs, targets = self._engine._order.next(key, self._augment)
        self.loss += self._step(inputs, targets) * len(inputs)

    def _capture(self, key: Shape) -> torch.cuda.CUDAGraph:
        """Captures a step; weights, statistics and optimizer are left as they were."""
        engine = self._engine
        kept = [
            *engine._model.state_dict().values(),
            *_tensors(self._optimizer),
            *(engine._masks.step, engine._order._place, self.loss),
        ]
        before = [tensor.clone() for tensor in kept]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    self._eager(key)
            torch.cuda.current_stream().wait_stream(aside)
            self._optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=engine._pool):
                self._eager(key)
        finally:
            with torch.no_grad():
                for tensor, value in zip(kept, before, strict=True):
                    tensor.copy_(value)
        return graph


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An optimizer's state; every tensor of it is zero at first."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
