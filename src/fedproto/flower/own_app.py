"""A fedproto method with its sections in a ServerApp and a ClientApp of one's own.

The server starts `FedProtoStrategy`, a Flower strategy; the client wraps its training function with
`train_locally`. A round ends in the same `fedproto.rounds.aggregate_round` as everywhere.
Checkpoints, resumption, stable client ids and cohorts that equal a simulation's are left to
`fedproto flower`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn
from torch.nn import functional

from fedproto.config.options import defended_method
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import TensorSamples
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.setting import fitted, load_state, read_state, setting_for, setting_of
from fedproto.engines.training import BatchTerm, TrainOptions, outputs_of
from fedproto.errors import ConfigError, TrainingError
from fedproto.flower.wire import (
    MOST_EXAMPLES,
    UnreadableError,
    like,
    read_tensors,
    write_tensors,
)
from fedproto.models.adapter import adapted
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds.aggregate import aggregate_round, sent_back
from fedproto.rounds.claims import TESTED, believed_sizes
from fedproto.strategies.base import Strategy
from fedproto.strategies.fedproto import FedProto
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Declarations, Local, Objective, initial_tensors
from fedproto.types import ClientUpdate, ServerState, Tensors

MOST_STEPS = 10_000_000
"""Largest plausible number of local steps."""

MEMORY = "fedproto-memory-"

LOG = getLogger("flwr")

T = TypeVar("T")
Batches = Iterable[tuple[Tensor, Tensor]]


class Key:
    """Names in messages; the first three are Flower's own."""

    ARRAYS, METRICS, NUM_EXAMPLES = "arrays", "metrics", "num-examples"
    PAYLOAD, BROADCAST, WORK, CONFIG = "payload", "broadcast", "work", "config"
    ROUND, LAST_ROUND, NUM_CLIENTS = "server-round", "last-round", "clients"


class FedProtoStrategy(FedAvg):
    """A fedproto strategy for Flower's ServerApp; FedProto unless another is given.

    Nodes are sampled as Flower's ``FedAvg`` does, and with its options.

    Args:
        model: The model of the ServerApp; parameters, buffers, features and head are read off it.
        example: A batch of one input, such as ``torch.zeros(1, 3, 32, 32)``.
        num_classes: Classes C.
        method: A strategy with its options, such as ``Scaffold()``, or a `Method` with sections.
        defence: How hostile clients are bounded, one of `fedproto.config.options.DEFENCES`, unless
            the method has ``aggregate`` options of its own.
        sampling: Options of ``FedAvg``: ``fraction_train``, ``min_available_nodes`` and so on. With
            fewer usable updates than ``min_train_nodes`` the model stays as it is.

    Attributes:
        attention: Weight per node, by round.
        failures: Why a node's update was not used, by round.

    Raises:
        TrainingError: If the method has no meaning for the model.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Tensor,
        num_classes: int,
        method: Strategy | Method | None = None,
        *,
        defence: str = "clip",
        **sampling: Any,
    ) -> None:
        super().__init__(**sampling)
        self.method = defended_method(method or FedProto(), defence)
        self.attention: dict[int, dict[int, float]] = {}
        self.failures: dict[int, dict[int, str]] = {}
        task = task_named("classification", tuple(map(str, range(num_classes))))
        self._setting = setting_for(adapted(model.eval(), example), example, task, num_classes, 0)
        self.method.check(self._setting)
        self._last_round: dict[int, int] = {}
        self._state: ServerState | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends the model to a cohort of the connected nodes."""
        if server_round == 1:  # of a new start(), from other arrays
            self._state, self._last_round, self.attention, self.failures = None, {}, {}, {}
        if self._state is not None and self._state.served_model is not None:
            arrays = write_tensors({**self._state.params, **self._state.buffers})
        messages = list(super().configure_train(server_round, arrays, config, grid))
        if self._state is None:
            self._setting = replace(self._setting, num_clients=len(list(grid.get_node_ids())))
            self._state = replace(
                self._state_of(arrays),
                memory=initial_tensors(self.method.server_memory(self._setting)),
            )
        sent = self.method.broadcast(self._state, self._setting)
        parts = {Key.BROADCAST: write_tensors(sent)} if sent else {}
        for message in messages:
            last_round = self._last_round.get(message.metadata.dst_node_id, 0)
            own = {Key.LAST_ROUND: last_round, Key.NUM_CLIENTS: self._setting.num_clients}
            about = ConfigRecord({**config, **own})
            message.content = RecordDict({Key.ARRAYS: arrays, Key.CONFIG: about, **parts})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Checks the replies, weighs and combines the usable ones."""
        assert self._state is not None  # noqa: S101 - set by `configure_train`
        # Rounds are counted from 0 within, as in a simulation.
        state = replace(self._state, round=server_round - 1)
        results: dict[int, tuple[LocalJob, ClientUpdate]] = {}
        failures: dict[int, str] = {}
        for reply in sorted(replies, key=_node):
            try:
                results[_node(reply)] = self._read(reply, state)
            except UnreadableError as error:
                failures[_node(reply)] = str(error)
        outcome = aggregate_round(self.method, state, [*results.values()], self._setting)
        self.failures[server_round] = failures | outcome.failures
        for node, reason in self.failures[server_round].items():
            LOG.warning("round %d, node %d: %s", server_round, node, reason)
        number = len(outcome.updates)
        if outcome.note is not None or number < self.min_train_nodes:
            LOG.warning("round %d skipped: %d usable updates", server_round, number)
            return None, None
        self._state = outcome.state
        self._last_round |= dict.fromkeys(outcome.attention, server_round)
        self.attention[server_round] = outcome.attention
        metrics = {"clients": float(number)}
        known = [one for one in outcome.updates if one.train_loss is not None]
        if known:
            sizes = [one.num_examples for one in known]
            metrics["train_loss"] = float(np.average([one.train_loss for one in known], 0, sizes))
        served = outcome.state.served
        return write_tensors({**served.params, **served.buffers}), MetricRecord(dict(metrics))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Averages the nodes' usable scores by their numbers of samples, as far as believed."""
        read: list[dict[str, float]] = []
        for reply in sorted(replies, key=_node):
            try:
                read.append(_scores(reply))
            except UnreadableError as error:
                LOG.warning("round %d, node %d: %s", server_round, _node(reply), error)
        if not read:
            return None
        # The average of a score that some nodes do not send would count it as zero there.
        ((names, number),) = Counter(map(frozenset, read)).most_common(1)
        if number < len(read):
            LOG.warning("round %d: %d nodes sent other metrics", server_round, len(read) - number)
        usable = [scores for scores in read if scores.keys() == names]
        claims = np.array([int(scores[Key.NUM_EXAMPLES]) for scores in usable])
        believed = believed_sizes(claims, self.method.aggregate.max_claim, TESTED).tolist()
        records = [
            RecordDict({Key.METRICS: MetricRecord({**scores, Key.NUM_EXAMPLES: number})})
            for scores, number in zip(usable, believed, strict=True)
        ]
        return self.evaluate_metrics_aggr_fn(records, Key.NUM_EXAMPLES)

    def _read(self, reply: Message, state: ServerState) -> tuple[LocalJob, ClientUpdate]:
        """A node's update, checked as far as its own claims about itself go."""
        scores, content = _scores(reply), reply.content
        work = content.get(Key.WORK)
        found = work if isinstance(work, MetricRecord) else {}
        steps, lr = found.get("steps", 1), found.get("lr", 1.0)
        if not (isinstance(steps, int) and 0 <= steps <= MOST_STEPS):
            raise UnreadableError("it claims an implausible number of steps")
        if not (isinstance(lr, float) and 1e-12 < lr < 1e12):
            raise UnreadableError("it claims an implausible learning rate")
        number = int(scores[Key.NUM_EXAMPLES])
        job = _job(self.method, state, _node(reply), number, steps, lr)
        params, buffers = _read_model(content, sent_back(job, self._setting), state.buffers)
        declared = self.method.payload(self._setting, number)
        update = ClientUpdate(
            client=job.client,
            num_examples=number,
            params=params,
            buffers=buffers,
            train_loss=scores.get("train_loss"),
            epochs_done=0,
            steps=steps,
            lr=lr,
            payload=read_tensors(content, Key.PAYLOAD, like(declared)),
        )
        return job, update

    def _state_of(self, arrays: ArrayRecord) -> ServerState:
        """The ServerApp's initial arrays as parameters and buffers of the model."""
        content = RecordDict({Key.ARRAYS: arrays})
        try:
            model = _read_model(content, self._setting.params, self._setting.buffers)
        except UnreadableError as error:
            raise ConfigError(f"the initial arrays do not fit the model: {error}") from None
        return ServerState(0, *model)


def _job(
    method: Method, state: ServerState, client: int, samples: int, steps: int, lr: float
) -> LocalJob:
    """A client's part of a round, as far as both sides know it."""
    batches = BatchOrder(0, state.round, client, samples, 1, epochs=steps, max_steps=steps)
    return LocalJob(client, state, method, batches, TrainOptions(), lr, seed=0)


def _read_model(content: RecordDict, params: Tensors, buffers: Tensors) -> tuple[Tensors, Tensors]:
    """Parameters and buffers like others, which Flower sends as one record."""
    found = read_tensors(content, Key.ARRAYS, {**params, **buffers})
    return {name: found[name] for name in params}, {name: found[name] for name in buffers}


def _node(reply: Message) -> int:
    return reply.metadata.src_node_id


def _scores(reply: Message) -> dict[str, float]:
    """A node's metrics with its number of samples."""
    if reply.has_error():
        raise UnreadableError(f"error {reply.error.code}: {reply.error.reason or ''}")
    record = reply.content.get(Key.METRICS)
    found = record.items() if isinstance(record, MetricRecord) else ()
    scores = {name: value for name, value in found if isinstance(value, (int, float))}
    number = scores.get(Key.NUM_EXAMPLES)
    usable = isinstance(number, int) and 0 < number <= MOST_EXAMPLES
    if not usable or not all(map(math.isfinite, scores.values())):
        raise UnreadableError("it sends no usable metrics with num-examples")
    return scores


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
        train_only: Callable[[Collection[str] | None], None],
    ) -> None:
        self.objective, self._train_only = objective, train_only
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
        self._train_only(self._strategy.trainable(self._local, epoch, epochs))


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
        pair = isinstance(first, tuple | list) and [isinstance(one, Tensor) for one in first]
        if pair != [True, True] or iter(batches) is batches:
            raise TrainingError(
                "batches must be a list or a DataLoader of pairs (inputs, labels) of tensors; of"
                " others make a list: [(batch['img'], batch['label']) for batch in loader]"
            )
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
        required = {name: one.requires_grad for name, one in self._model.named_parameters()}
        train_only = partial(self._set_trainable, required=required)
        model = self._model.train()
        loss = LocalLoss(job.strategy, model, local, job.state, objective, train_only)
        self.results.append(self._own_train(loss))
        train_only(None)
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
    about, names = message.content.get(Key.CONFIG), (Key.ROUND, Key.LAST_ROUND, Key.NUM_CLIENTS)
    if not isinstance(about, ConfigRecord) or not about.keys() >= {*names}:
        raise TrainingError("the server's message lacks its facts; does it run FedProtoStrategy?")
    round_, last_round, num_clients = (int(str(about[name])) for name in names)
    engine = OwnTraining(model, batches, num_classes, num_clients, train)
    received = ServerState(round_, *read_state(model))
    setting = setting_of(engine.workload, received.params)
    samples = len(engine.workload.federation.train_indices(0))
    job = replace(
        _job(method, received, 0, samples, steps, lr),
        seed=int(torch.randint(2**31, ())),
        broadcast=_broadcast(message.content, method.sent_memory(setting)),
        memory=_recalled(context, last_round, method.client_memory(setting)),
    )
    update = engine.train_client(job)
    if method.needs.personal_model:  # the shared one is left in place
        load_state(model, ServerState(round_, update.params, update.buffers))
    model.train()
    if update.memory:
        context.state[f"{MEMORY}{round_}"] = write_tensors(update.memory)
    return engine.results[0], {
        Key.ARRAYS: write_tensors({**update.params, **update.buffers}),
        Key.PAYLOAD: write_tensors(update.payload),
        Key.WORK: MetricRecord({"steps": steps, "lr": lr}),
    }


def _broadcast(content: RecordDict, sent: Declarations) -> Tensors:
    if Key.BROADCAST in content:
        return read_tensors(content, Key.BROADCAST, like(sent))
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
