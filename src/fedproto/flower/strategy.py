"""Adapter: runs a fedproto strategy with its sections as a Flower strategy.

For a ServerApp and a ClientApp of one's own. The client wraps its training
function with `fedproto.flower.helper`; the server starts this strategy. A round ends in the same
`fedproto.rounds.aggregate_round` as everywhere. Checkpoints, resumption, stable client ids and
cohorts that equal a simulation's are left to `fedproto flower`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor, nn

from fedproto.config.options import defended_method
from fedproto.data.tasks import task_named
from fedproto.engines.setting import setting_for
from fedproto.errors import ConfigError
from fedproto.flower.helper import Part
from fedproto.flower.wire import (
    MOST_EXAMPLES,
    UnreadableError,
    like,
    read_tensors,
    write_tensors,
)
from fedproto.models.adapter import adapted
from fedproto.rounds.aggregate import Expected, aggregate_round
from fedproto.strategies import base
from fedproto.strategies.fedproto import FedProto
from fedproto.strategies.sections import Method
from fedproto.strategies.values import initial_tensors
from fedproto.types import ClientUpdate, ServerState

MOST_STEPS = 10_000_000
"""Largest plausible number of local steps."""

LOG = getLogger("flwr")


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
        method: base.Strategy | Method | None = None,
        *,
        defence: str = "clip",
        **sampling: Any,
    ) -> None:
        super().__init__(**sampling)
        self.method = defended_method(method or FedProto(), defence)
        if self.method.strategy.pooled:
            raise ConfigError("a strategy that pools the clients' data cannot run over Flower")
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
        parts = {Part.BROADCAST: write_tensors(sent)} if sent else {}
        for message in messages:
            last_round = self._last_round.get(message.metadata.dst_node_id, 0)
            own = {Part.LAST_ROUND: last_round, Part.NUM_CLIENTS: self._setting.num_clients}
            about = ConfigRecord({**config, **own})
            message.content = RecordDict({Part.ARRAYS: arrays, Part.CONFIG: about, **parts})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Checks the replies, weighs and combines the usable ones."""
        assert self._state is not None  # noqa: S101 - set by `configure_train`
        # Rounds are counted from 0 within, as in a simulation.
        state = replace(self._state, round=server_round - 1)
        results: list[tuple[Expected, ClientUpdate]] = []
        failures: dict[int, str] = {}
        for node, own in groupby(sorted(replies, key=_node), key=_node):
            try:
                results.append(self._read([*own], state))
            except UnreadableError as error:
                failures[node] = str(error)
        outcome = aggregate_round(self.method, state, results, self._setting)
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
        """Averages the nodes' usable scores by their numbers of samples."""
        usable: list[RecordDict] = []
        for reply in sorted(replies, key=_node):
            try:
                usable.append(RecordDict({Part.METRICS: MetricRecord(dict(_scores(reply)))}))
            except UnreadableError as error:
                LOG.warning("round %d, node %d: %s", server_round, _node(reply), error)
        return self.evaluate_metrics_aggr_fn(usable, Part.NUM_EXAMPLES) if usable else None

    def _read(
        self, replies: Sequence[Message], state: ServerState
    ) -> tuple[Expected, ClientUpdate]:
        """A node's update, checked as far as its own claims about itself go."""
        if len(replies) > 1:
            raise UnreadableError("it sent its update twice")
        (reply,) = replies
        scores, content = _scores(reply), reply.content
        work = content.get(Part.WORK)
        found = work if isinstance(work, MetricRecord) else {}
        steps, lr = found.get("steps", 1), found.get("lr", 1.0)
        if not (isinstance(steps, int) and 0 <= steps <= MOST_STEPS):
            raise UnreadableError("it claims an implausible number of steps")
        if not (isinstance(lr, float) and 0 < lr < math.inf):
            raise UnreadableError("it claims an implausible learning rate")
        number = int(scores[Part.NUM_EXAMPLES])
        expected = Expected(
            *(_node(reply), number, 1, state, self.method.payload(self._setting, number)),
            frozenset(self.method.strategy.personal(self._setting)),
        )
        tensors = read_tensors(content, Part.ARRAYS, {**expected.params, **state.buffers})
        update = ClientUpdate(
            client=expected.client,
            num_examples=number,
            params={name: tensors[name] for name in expected.params},
            buffers={name: tensors[name] for name in state.buffers},
            train_loss=scores.get("train_loss"),
            epochs_done=1,
            steps=steps,
            lr=lr,
            payload=read_tensors(content, Part.PAYLOAD, like(expected.payload)),
        )
        return expected, update

    def _state_of(self, arrays: ArrayRecord) -> ServerState:
        """The ServerApp's initial arrays as parameters and buffers of the model."""
        params, buffers = self._setting.params, self._setting.buffers
        content = RecordDict({Part.ARRAYS: arrays})
        try:
            tensors = read_tensors(content, Part.ARRAYS, {**params, **buffers})
        except UnreadableError as error:
            raise ConfigError(f"the initial arrays do not fit the model: {error}") from None
        return ServerState(
            0,
            {name: tensors[name] for name in params},
            {name: tensors[name] for name in buffers},
        )


def _node(reply: Message) -> int:
    return reply.metadata.src_node_id


def _scores(reply: Message) -> dict[str, float]:
    """A node's metrics with its number of samples."""
    if reply.has_error():
        raise UnreadableError(f"error {reply.error.code}: {reply.error.reason or ''}")
    record = reply.content.get(Part.METRICS)
    found = record.items() if isinstance(record, MetricRecord) else ()
    scores = {name: value for name, value in found if isinstance(value, (int, float))}
    number = scores.get(Part.NUM_EXAMPLES)
    usable = isinstance(number, int) and 0 < number <= MOST_EXAMPLES
    if not usable or not all(map(math.isfinite, scores.values())):
        raise UnreadableError("it sends no usable metrics with num-examples")
    return scores
