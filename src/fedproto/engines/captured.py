"""The captured engine: the reference engine's steps, each a replay of one CUDA graph.

A large model's step is hundreds of small kernels, which wait for the host to launch them. A step of
a given batch shape is captured once and then replayed, for one job after another: weights are
loaded in place, the optimizer's state is set to zero where a fresh one is due, and the rate lies on
the device. Meanwhile the host prepares the next batch.

Steps with a linear term or calibrated logits, and the first step of a batch shape, are made as in
the reference engine; jobs that need more than the engine's capabilities are handed to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedproto.engines.base import ENGINES, EVERYTHING, Capability, LocalJob, Workload
from fedproto.engines.layers import freeze, take_over
from fedproto.engines.reference import ReferenceEngine, Step
from fedproto.engines.training import TrainOptions
from fedproto.strategies.values import Local, Objective
from fedproto.types import ServerState

WARM_UP = 2
"""Steps before a capture: kernels are chosen and work space is taken by the first ones."""


@dataclass
class _Captured:
    """A step of one batch shape: its graph, the tensors it reads, and the loss it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    targets: Tensor
    loss: Tensor


@ENGINES.register("captured")
class CapturedEngine(ReferenceEngine):
    """Trains one job after another on CUDA, each step a replay of one graph."""

    # Optimizers take a rate that lies on the device as float32: too coarse for float64.
    capabilities = EVERYTHING - {
        Capability.CPU,
        Capability.FLOAT64,
        Capability.GENERATOR,
        Capability.PENALTY,
        Capability.BATCH_TERM,
        Capability.TRAINABLE,
        Capability.SAM,
        Capability.CLIPPING,
        Capability.CENTRALIZATION,
    }

    def __init__(self, workload: Workload, *, channels_last: bool = False) -> None:
        super().__init__(workload, channels_last=channels_last)
        take_over(self._model)
        self._kinds: dict[tuple[TrainOptions, float], _Kind] = {}
        self._pool = None if self._device.type != "cuda" else torch.cuda.graph_pool_handle()
        self._held = self._model.state_dict()

    def close(self) -> None:
        """Frees the graphs with their memory."""
        super().close()
        self._kinds.clear()

    def _load(self, state: ServerState) -> None:
        """Copies all tensors at once: hundreds of small copies would keep the host busy."""
        given = {**state.params, **state.buffers}
        fits = given.keys() == self._held.keys() and all(
            tensor.shape == self._held[name].shape for name, tensor in given.items()
        )
        if not fits:
            super()._load(state)
            return
        for floating in (True, False):  # tensors of one type are copied together
            names = [name for name, one in given.items() if one.is_floating_point() == floating]
            if names:
                torch._foreach_copy_(
                    [self._held[name] for name in names], [given[name] for name in names]
                )

    def _stepper(self, job: LocalJob, local: Local, objective: Objective) -> Step:
        # A personal model may train some of its parameters only.
        more = objective.calibrated or "trainable" in job.method.needs.hooks
        if self._pool is None or more or objective.linear is not None:
            return super()._stepper(job, local, objective)
        key = job.train.kind, objective.proximal
        if key not in self._kinds:
            self._kinds[key] = _Kind(self, job.train.kind, objective)
        return self._kinds[key].begin(job)


class _Kind:
    """The steps of jobs that differ in weights, data and rate alone."""

    def __init__(self, engine: CapturedEngine, train: TrainOptions, objective: Objective) -> None:
        self._engine, self._train, self._objective = engine, train, objective
        self._params = dict(engine._model.named_parameters())
        self._received = {
            name: tensor.detach().clone()
            for name, tensor in (self._params if objective.proximal else {}).items()
        }
        self._rate = torch.zeros((), device=engine._device)
        self._optimizer = _capturable(train, engine._model, self._rate)
        self._seen: set[tuple[torch.Size, torch.Size]] = set()
        self._captured: dict[tuple[torch.Size, torch.Size], _Captured] = {}
        self._refused = False

    def begin(self, job: LocalJob) -> Step:
        """Makes ready for a job, whose weights the model holds already."""
        model = self._engine._model.train()
        if job.train.batch_norm == "frozen":
            freeze(model)
        self._rate.fill_(job.lr)
        self._engine._masks.begin_job(job.seed)
        if remembered := _tensors(self._optimizer):
            torch._foreach_zero_(remembered)
        if self._received:
            torch._foreach_copy_(
                list(self._received.values()), [job.state.params[name] for name in self._received]
            )
        return self._step

    def _step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        shapes = inputs.shape, targets.shape
        if shapes not in self._seen or self._refused:
            self._seen.add(shapes)
            return self._eager(inputs, targets)
        if shapes not in self._captured:
            try:
                self._captured[shapes] = self._capture(inputs, targets)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                self._engine.workload.callback.on_notice(
                    f"steps are not captured in a CUDA graph: {reason}"
                )
                self._refused = True
                return self._eager(inputs, targets)
        captured = self._captured[shapes]
        captured.inputs.copy_(inputs)
        captured.targets.copy_(targets)
        captured.graph.replay()
        return captured.loss

    def _eager(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._engine._masks.begin_step()
        self._optimizer.zero_grad(set_to_none=True)
        term = self._objective.closed_form(self._params, self._received)
        added = [] if term is None else [term]
        parts = self._train.accumulate
        loss = self._engine._backward(inputs, targets, self._objective, added, parts)
        self._optimizer.step()
        return loss

    def _capture(self, inputs: Tensor, targets: Tensor) -> _Captured:
        """Captures a step; weights, statistics and optimizer are left as they were."""
        engine = self._engine
        kept = [
            *engine._model.state_dict().values(),
            *_tensors(self._optimizer),
            engine._masks.step,
        ]
        before = [tensor.clone() for tensor in kept]
        inputs, targets = inputs.clone(), targets.clone()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    self._eager(inputs, targets)
            torch.cuda.current_stream().wait_stream(aside)
            self._optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=engine._pool):
                loss = self._eager(inputs, targets)
        finally:
            with torch.no_grad():
                for tensor, value in zip(kept, before, strict=True):
                    tensor.copy_(value)
        return _Captured(graph, inputs, targets, loss)


def _capturable(train: TrainOptions, model: nn.Module, rate: Tensor) -> torch.optim.Optimizer:
    """The optimizer of `TrainOptions.optimizer_for`, with its state and rate on the device."""
    params = list(model.parameters())
    if train.optimizer == "adam":
        return torch.optim.Adam(
            params, lr=rate, weight_decay=train.weight_decay, fused=True, capturable=True
        )
    return torch.optim.SGD(
        params, lr=rate, momentum=train.momentum, weight_decay=train.weight_decay, fused=True
    )


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """An optimizer's state; every tensor of it is zero at first."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
