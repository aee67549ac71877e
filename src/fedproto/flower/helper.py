"""For a ClientApp of one's own: a method's client part around one's own training function."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.nn import functional

from fedproto.config.options import defended_method
from fedproto.data.tasks import task_named
from fedproto.engines.base import laid_over
from fedproto.engines.setting import load_state, read_state, setting_for
from fedproto.engines.training import BatchTerm, outputs_of
from fedproto.equations import class_sums
from fedproto.errors import TrainingError
from fedproto.flower.wire import like, read_tensors, write_tensors
from fedproto.models.adapter import adapted
from fedproto.models.base import features_of
from fedproto.strategies.base import PERSONAL, PersonalModel, Strategy
from fedproto.strategies.sections import Method
from fedproto.strategies.values import (
    Declarations,
    Local,
    Observation,
    Setting,
    Statistic,
    initial_tensors,
)
from fedproto.types import ServerState, Tensors, part, under

MEMORY, SECRET = "fedproto-memory-", "fedproto-secret"


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
        self, strategy: Strategy, model: nn.Module, local: Local, state: ServerState
    ) -> None:
        self.objective = strategy.objective(local)
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
            self._strategy.penalty(params, received),
            None if self._term is None or outputs is None else self._term(inputs, outputs, targets),
        ]
        return sum((term for term in terms if term is not None), loss)

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Lets those parameters train that the method trains in this epoch."""
        names = self._strategy.trainable(self._local, epoch, epochs)
        for name, one in self._model.named_parameters():
            one.requires_grad_(names is None or name in names)


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
    """Calls a training function and does a method's client part around it.

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
        lr: Its learning rate, for methods that ask.

    Returns:
        The result of `train`, and the records of the reply: weights, payload and work.

    Raises:
        TrainingError: If there is no data, the model gives no features where they are needed, or
            the server is of another strategy.
    """
    method = defended_method(method if isinstance(method, Method) else Method(method))
    about = message.content[Part.CONFIG]
    assert isinstance(about, ConfigRecord)  # noqa: S101 - the strategy sends one
    device = next(model.parameters()).device
    model, setting = _described(model, batches, num_classes, int(str(about[Part.NUM_CLIENTS])))
    memory = _recalled(context, int(str(about[Part.LAST_ROUND])), method.client_memory(setting))
    broadcast = _broadcast(message.content, method.sent_memory(setting))
    received = ServerState(int(str(about[Part.ROUND])), *read_state(model))
    own = {} if method.needs.personal_model else part(PERSONAL, _on(memory, device))
    started = laid_over(received, own)
    load_state(model, started)
    labels = torch.cat([labels.flatten() for _, labels in batches]).to(device)
    local = Local(
        num_examples=len(labels),
        steps=steps,
        lr=lr,
        classes=class_sums(None, labels, num_classes)[1],
        params=started.params,
        broadcast=_on(broadcast, device),
        memory=_on(memory, device),
        head=setting.head,
        secret=_secret(context),
    )
    if method.serve.sends_average:
        load_state(model, method.serve.observed(started, local.broadcast))
    before = observe(model, batches, num_classes, method.needs.before)
    load_state(model, started)
    result = train(LocalLoss(method.strategy, model, local, started))
    model.requires_grad_(True)
    after = observe(model, batches, num_classes, method.needs.after)
    params, buffers = read_state(model)
    report = method.report(local, params, before, after)
    personal = method.strategy.personal(setting)
    kept = dict(report.memory)
    if method.needs.personal_model:
        trained = _train_personal_model(method.strategy, model, local, started, train)
        kept |= under(PERSONAL, trained)
    else:
        kept |= under(PERSONAL, {name: params[name] for name in personal})
    if kept:
        context.state[f"{MEMORY}{about[Part.ROUND]!s}"] = write_tensors(kept)
    sent = {name: one for name, one in params.items() if name not in personal}
    return result, {
        Part.ARRAYS: write_tensors({**sent, **buffers}),
        Part.PAYLOAD: write_tensors(report.payload),
        Part.WORK: MetricRecord({"steps": steps, "lr": lr}),
    }


def _train_personal_model(
    strategy: Strategy,
    model: nn.Module,
    local: Local,
    received: ServerState,
    train: Callable[[LocalLoss], T],
) -> Tensors:
    """The client's own model, trained by the same function; the shared one is left in place."""
    shared = ServerState(received.round, *read_state(model))
    before = {**received.params, **received.buffers}
    start = strategy.personal_start(local, before, {**shared.params, **shared.buffers})
    model.load_state_dict(dict(start), strict=False)
    train(LocalLoss(PersonalModel(strategy), model, local, received))
    model.requires_grad_(True)
    params, buffers = read_state(model)
    load_state(model, shared)
    return {**params, **buffers}


@torch.no_grad()
def observe(
    model: nn.Module,
    batches: Batches,
    num_classes: int,
    what: frozenset[Statistic],
) -> Observation | None:
    """Statistics of some data under a model, where any are needed."""
    if not what:
        return None
    training = model.training
    encode = features_of(model) if "features" in what else None
    model.eval()
    device = next(model.parameters()).device
    total: Observation | None = None
    number = 0
    for inputs, labels in batches:
        x, y = inputs.to(device), labels.to(device)
        encoded = None if encode is None else encode(x).flatten(1).float()
        loss = torch.zeros((), device=device)
        if "loss" in what:
            loss = functional.cross_entropy(model(x), y, reduction="sum")
        part = Observation.of(what, encoded, y, num_classes, loss)
        number += len(y)
        total = part if total is None else total + part
    model.train(training)
    if total is None:
        raise TrainingError("there is no data to train on")
    return replace(total, loss=total.loss / number)


def _on(tensors: Tensors, device: torch.device) -> Tensors:
    return {name: one.to(device) for name, one in tensors.items()}


def _described(
    model: nn.Module, batches: Batches, num_classes: int, num_clients: int
) -> tuple[nn.Module, Setting]:
    """The model with its features and head found, and the setting that declarations depend on."""
    found = next(iter(batches), None)
    if found is None:
        raise TrainingError("there is no data to train on")
    example = found[0][:1].to(next(model.parameters()).device)
    training = model.training
    fitted = adapted(model.eval(), example)
    setting = setting_for(fitted, example, task_named("classification"), num_classes, num_clients)
    return fitted.train(training), setting


def _secret(context: Context) -> int:
    """The seed of this client's own draws, which the server never knows; kept for all rounds."""
    record = context.state.get(SECRET)
    if isinstance(record, ConfigRecord) and isinstance(secret := record.get("seed"), int):
        return secret
    secret = secrets.randbits(62)
    context.state[SECRET] = ConfigRecord({"seed": secret})
    return secret


def _broadcast(content: RecordDict, sent: Declarations) -> Tensors:
    record = content.get(Part.BROADCAST)
    if isinstance(record, ArrayRecord):
        return read_tensors(record, like(sent), Part.BROADCAST)
    if any(one.initial is not None for one in sent.values()):
        raise TrainingError("the server sends no 'broadcast'; is it of another strategy?")
    return {}


def _recalled(context: Context, last_round: int, declared: Declarations) -> Tensors:
    """This client's memory of its last accepted round; all else is forgotten."""
    valid = f"{MEMORY}{last_round}"
    for name in [name for name in context.state if name.startswith(MEMORY) and name != valid]:
        del context.state[name]
    record = context.state.get(valid)
    if isinstance(record, ArrayRecord):
        return read_tensors(record, like(declared), "memory")
    return initial_tensors(declared)
