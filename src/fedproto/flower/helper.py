"""For Flower apps: wraps a training function with the client's part of a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from fedproto.config.options import defended_method
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import TensorSamples
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.setting import fitted, load_state, read_state, setting_of
from fedproto.engines.training import BatchTerm, TrainOptions, outputs_of
from fedproto.errors import TrainingError
from fedproto.flower.wire import like, read_tensors, write_tensors
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder
from fedproto.strategies.base import Strategy
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Declarations, Local, Objective, initial_tensors
from fedproto.types import ServerState, Tensors

MEMORY = "fedproto-memory-"


class Part:
    """Names in messages; the first three are Flower's own."""

    ARRAYS, METRICS, NUM_EXAMPLES = "arrays", "metrics", "num-examples"
    PAYLOAD, BROADCAST, WORK, CONFIG = "payload", "broadcast", "work", "config"
    ROUND, LAST_ROUND, NUM_CLIENTS = "server-round", "last-round", "clients"


T = TypeVar("T")
Batches = Iterable[tuple[Tensor, Tensor]]


class LocalLoss:
    """The local loss of a strategy, for a training loop of one's own.

    Attributes:
        objective: The terms in closed form.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        local: Local,
        state: ServerState,
        objective: Objective,
    ) -> None:
        self.objective = objective
        self._strategy, self._model, self._local, self._state = strategy, model, local, state
        self._term: BatchTerm | None = None
        if "batch_term" in strategy.needs.hooks:
            self._term = BatchTerm(model)
            self._term.begin_job(strategy, local, state)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a batch: cross-entropy and every term that the method adds."""
        outputs = None if self._term is None else outputs_of(self._model, inputs)
        logits = self._model(inputs) if outputs is None else outputs.logits
        loss = functional.cross_entropy(self.objective.calibrate(logits), targets)
        params, received = dict(self._model.named_parameters()), self._state.params
        terms = [
            self.objective.closed_form(params, received),
            None if self._term is None or outputs is None else self._term(inputs, outputs, targets),
        ]
        return sum((term for term in terms if term is not None), loss)

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Lets those parameters train that the method trains in this epoch."""
        names = self._strategy.trainable(self._local, epoch, epochs)
        for name, one in self._model.named_parameters():
            one.requires_grad_(names is None or name in names)


class OwnTraining(ReferenceEngine, Generic[T]):
    """The engine of one client whose model, batches and training function are its own.

    Attributes:
        results: What the function returned: for the shared model, then for a personal one.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        num_classes: int,
        num_clients: int,
        train: Callable[[LocalLoss], T],
    ) -> None:
        first = next(iter(batches), None)
        if first is None:
            raise TrainingError("there is no data to train on")
        nothing = np.empty(0, dtype=np.int64)
        everything = np.arange(sum(len(labels) for _, labels in batches))
        # Of the samples it needs one, to find its way through the model.
        federation = Federation(
            name="own data",
            samples=TensorSamples(first[0][:1], first[1][:1]),
            clients=[Client(everything, nothing), *[Client(nothing, nothing)] * (num_clients - 1)],
            num_classes=num_classes,
            input_shape=tuple(first[0].shape[1:]),
        )
        weight, task = next(model.parameters()), task_named("classification")
        double = weight.dtype == torch.float64
        options = EngineOptions(device=str(weight.device), dtype="float64" if double else "float32")
        model = fitted(model, federation, task)
        super().__init__(Workload(federation, model, task, options))
        self._model = model  # in place of a copy: the function trains this one
        self.results: list[T] = []
        self._own_batches, self._own_train = batches, train

    def _eval_batches(self, indices: Indices) -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, labels in self._own_batches:
            yield inputs.to(self._device), labels.to(self._device)

    def _fit(
        self, job: LocalJob, indices: Indices, local: Local, objective: Objective
    ) -> tuple[Tensor, int]:
        model = self._model.train()
        self.results.append(
            self._own_train(LocalLoss(job.strategy, model, local, job.state, objective))
        )
        model.requires_grad_(True)
        return torch.zeros(()), 0


def train_locally(
    message: Message,
    context: Context,
    method: Strategy | Method,
    model: nn.Module,
    batches: Batches,
    num_classes: int,
    train: Callable[[LocalLoss], T],
    *,
    steps: int = 1,
    lr: float = 1.0,
) -> tuple[T, dict[str, ArrayRecord | MetricRecord]]:
    """Calls a training function and adds the client's part of a method.

    Args:
        message: The server's message.
        context: Of this client; keeps the client's memory between its rounds.
        method: The same as the server's.
        model: The model that `train` changes, with the received weights.
        batches: The client's training data, such as a `DataLoader`.
        num_classes: Classes C.
        train: Trains the model in place, with the loss that it is given: ``loss(inputs, targets)``.
            It may compute a loss of its own for methods that add no terms.
        steps: Local steps that `train` makes, for methods that count them.
        lr: Its learning rate, for methods that need it.

    Returns:
        The result of `train`, and the records of the reply: weights, payload and work.

    Raises:
        TrainingError: If there is no data, the model gives no features where they are needed, or
            the server runs another strategy.
    """
    method = defended_method(method)
    about = message.content[Part.CONFIG]
    assert isinstance(about, ConfigRecord)  # noqa: S101 - the strategy sends one
    round_, last_round, num_clients = (
        int(str(about[name])) for name in (Part.ROUND, Part.LAST_ROUND, Part.NUM_CLIENTS)
    )
    engine = OwnTraining(model, batches, num_classes, num_clients, train)
    received = ServerState(round_, *read_state(model))
    setting = setting_of(engine.workload, received.params)
    samples = len(engine.workload.federation.train_indices(0))
    update = engine.train_client(
        LocalJob(
            client=0,
            state=received,
            method=method,
            batches=BatchOrder(0, round_, 0, samples, 1, epochs=steps, max_steps=steps),
            train=TrainOptions(),
            lr=lr,
            seed=int(torch.randint(2**31, ())),
            broadcast=_broadcast(message.content, method.sent_memory(setting)),
            memory=_recalled(context, last_round, method.client_memory(setting)),
        )
    )
    if method.needs.personal_model:  # the shared one is left in place
        load_state(model, ServerState(round_, update.params, update.buffers))
    model.train()
    if update.memory:
        context.state[f"{MEMORY}{round_}"] = write_tensors(update.memory)
    return engine.results[0], {
        Part.ARRAYS: write_tensors({**update.params, **update.buffers}),
        Part.PAYLOAD: write_tensors(update.payload),
        Part.WORK: MetricRecord({"steps": steps, "lr": lr}),
    }


def _broadcast(content: RecordDict, sent: Declarations) -> Tensors:
    if Part.BROADCAST in content:
        return read_tensors(content, Part.BROADCAST, like(sent))
    if any(one.initial is not None for one in sent.values()):
        raise TrainingError("the server sends no 'broadcast'; does it run another strategy?")
    return {}


def _recalled(context: Context, last_round: int, declared: Declarations) -> Tensors:
    """This client's memory of its last accepted round; other rounds are deleted."""
    valid = f"{MEMORY}{last_round}"
    for name in [name for name in context.state if name.startswith(MEMORY) and name != valid]:
        del context.state[name]
    if valid in context.state:
        return read_tensors(context.state, valid, like(declared))
    return initial_tensors(declared)
