"""Our strategies for an existing Flower app: one in the place of Flower's FedAvg.

For people who have a ServerApp and a ClientApp of their own. The client wraps its training
function with `fedproto.flower.helper`; the server starts this strategy. Checkpoints, resumption,
stable client ids and cohorts that equal a simulation's are left to `fedproto flower`.
"""

# Long: one class with the hooks that Flower calls, and what they share.
from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING, getLogger

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedproto import strategies
from fedproto.flower.arrays import UnreadableError, read_tensors, write_tensors
from fedproto.flower.helper import (
    ARRAYS,
    BROADCAST,
    CONFIG,
    LAST_ROUND,
    METRICS,
    NUM_CLIENTS,
    NUM_EXAMPLES,
    PAYLOAD,
    ROUND,
    WORK,
)
from fedproto.flower.parts import expect_arrays, expect_declared
from fedproto.rng import Purpose, stream
from fedproto.rounds.guard import Expected, reason_to_refuse
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.contract import FeatureShape, Setting, initial_tensors
from fedproto.strategies.server import ServerOptions
from fedproto.types import ClientUpdate, ServerState, Tensors

MOST_STEPS = 10_000_000
"""More local steps than this no client is believed to make."""

LOG = getLogger("flwr")


class FedProtoStrategy(Strategy):
    """A strategy of ours in Flower's clothes; FedProto unless another is given.

    Args:
        num_classes: Classes C.
        channels: Channels D of the features.
        options: The strategy with its options, such as ``Scaffold()``.
        aggregate: How updates become one: their mean, or a rule that bears outliers.
        server: What the server does with that: nothing, or a step of an optimizer.
        head: Names of the parameters with a row per class that give the scores, for strategies that
            average them class by class.
        cohort: Clients per round; None for all.
        min_clients: Fewer than these make no round.
        wait: Seconds to wait for that many.
        deadline: Seconds a client has to answer.
        max_examples: More samples than this no client is believed to have.
        seed: For the choice of the cohort among the connected nodes.

    Attributes:
        attention: Weight per node, by round.
        failures: Why a node's update was not used, by round.
    """

    def __init__(
        self,
        num_classes: int,
        channels: int,
        options: strategies.Strategy | None = None,
        *,
        aggregate: AggregateOptions | None = None,
        server: ServerOptions | None = None,
        head: Sequence[str] = (),
        cohort: int | None = None,
        min_clients: int = 2,
        wait: float = 120.0,
        deadline: float = 600.0,
        max_examples: int = 10_000_000,
        seed: int = 0,
    ) -> None:
        self.options = options or strategies.FedProto()
        self.attention: dict[int, dict[int, float]] = {}
        self.failures: dict[int, dict[int, str]] = {}
        self.aggregate = aggregate or AggregateOptions()
        self.server = server or ServerOptions()
        self._num_classes = num_classes
        self._features = FeatureShape(channels, per_sample=1)
        self._head = tuple(head)
        self._last_round: dict[int, int] = {}
        self._cohort = cohort
        self._min_clients = min_clients
        self._wait = wait
        self._deadline = deadline
        self._max_examples = max_examples
        self._seed = seed
        self._state: ServerState | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends the model to a cohort of the connected nodes."""
        nodes = self._connected(grid)
        if self._state is None:
            state = _state_of(arrays)
            self._setting = Setting(
                state.params,
                self._num_classes,
                len(nodes),
                self._features,
                self._head,
                buffers=state.buffers,
            )
            kept = {
                **self.options.server_memory(self._setting),
                **self.server.memory(self._setting),
            }
            self._state = replace(state, memory=initial_tensors(kept))
        if self._cohort is not None and len(nodes) > self._cohort:
            order = stream(self._seed, Purpose.COHORT, server_round).permutation(len(nodes))
            nodes = sorted(nodes[index] for index in order[: self._cohort])
        sent = {
            name: self._state.memory[name]
            for name, one in self.options.server_memory(self._setting).items()
            if one.broadcast and name in self._state.memory
        }
        parts = {BROADCAST: write_tensors(sent)} if sent else {}
        going_on = self.options.sent(self._state)
        if going_on is not self._state:
            arrays = write_tensors({**going_on.params, **going_on.buffers})
        return self._messages("train", server_round, arrays, config, nodes, parts)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Checks the replies, weighs and averages those that can be used."""
        assert self._state is not None  # noqa: S101 - set by `configure_train`
        state = self.options.sent(replace(self._state, round=server_round))
        failures: dict[int, str] = {}
        updates: dict[int, ClientUpdate] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                found = self._read(reply, state)
            except UnreadableError as error:
                failures[node] = str(error)
                continue
            if node in updates:
                failures[node] = "it sent a duplicate of its update"
            else:
                updates[node] = found
        self.failures[server_round] = failures
        for node, reason in failures.items():
            LOG.log(WARNING, "round %d, node %d: %s", server_round, node, reason)
        if len(updates) < self._min_clients:
            LOG.log(WARNING, "round %d skipped: %d usable updates", server_round, len(updates))
            return None, None
        # Sums of floating numbers depend on their order.
        nodes = sorted(updates)
        usable = [updates[node] for node in nodes]
        weights = self.options.weigh(state, usable)
        combined, counted = self.options.aggregate(
            state, usable, weights, self._setting, self.aggregate
        )
        following = self.server.step(state, combined)
        self._state = self.options.served(following, state, self._setting)
        self._last_round |= dict.fromkeys(nodes, server_round)
        self.attention[server_round] = dict(zip(nodes, counted.tolist(), strict=True))
        metrics: dict[str, float] = {"clients": float(len(nodes))}
        losses = [
            (one.num_examples, one.train_loss) for one in usable if one.train_loss is not None
        ]
        if losses:
            total = sum(number for number, _ in losses)
            metrics["train_loss"] = sum(number * loss for number, loss in losses) / total
        arrays = write_tensors({**self._state.params, **self._state.buffers})
        return arrays, MetricRecord(dict(metrics))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends the model to all connected nodes."""
        return self._messages("evaluate", server_round, arrays, config, self._connected(grid))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Averages the nodes' scores by their numbers of samples."""
        totals: dict[str, float] = {}
        samples = 0.0
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            scores = None if reply.has_error() else self._scores(reply.content)
            if scores is None:
                node = reply.metadata.src_node_id
                LOG.log(WARNING, "round %d, node %d: no usable scores", server_round, node)
                continue
            number = scores.pop(NUM_EXAMPLES)
            samples += number
            for name, value in scores.items():
                totals[name] = totals.get(name, 0.0) + number * value
        if not samples:
            return None
        return MetricRecord({name: total / samples for name, total in totals.items()})

    def summary(self) -> None:
        """Writes the options to the log."""
        LOG.log(INFO, "\t└──> %s, %s", self.options, self._features)

    def _connected(self, grid: Grid) -> list[int]:
        ends = time.monotonic() + self._wait
        while len(nodes := sorted(grid.get_node_ids())) < self._min_clients:
            if time.monotonic() >= ends:
                return []
            time.sleep(1.0)
        return nodes

    def _messages(
        self,
        kind: str,
        round_: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        nodes: Iterable[int],
        parts: Mapping[str, ArrayRecord] | None = None,
    ) -> list[Message]:
        def message(node: int) -> Message:
            about = ConfigRecord(
                {
                    **config,
                    ROUND: round_,
                    LAST_ROUND: self._last_round.get(node, 0),
                    NUM_CLIENTS: self._setting.num_clients,
                }
            )
            content = RecordDict({ARRAYS: arrays, CONFIG: about, **(parts or {})})
            return Message(content, node, kind, ttl=self._deadline, group_id=str(round_))

        return [message(node) for node in nodes]

    def _read(self, reply: Message, state: ServerState) -> ClientUpdate:
        if reply.has_error():
            raise UnreadableError(f"error {reply.error.code}: {reply.error.reason or ''}")
        scores = self._scores(reply.content)
        if scores is None:
            raise UnreadableError("it sends no usable metrics with num-examples")
        node, number = reply.metadata.src_node_id, int(scores[NUM_EXAMPLES])
        # What the client was asked is known only as far as its own claims go.
        payload = self.options.payload(self._setting, number)
        expected = Expected(node, number, 1, state, payload)
        update = _read_update(reply.content, scores, expected)
        reason = reason_to_refuse(update, expected)
        if reason is not None:
            raise UnreadableError(reason)
        return update

    def _scores(self, content: RecordDict) -> dict[str, float] | None:
        record = content.get(METRICS)
        if not isinstance(record, MetricRecord):
            return None
        scores = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        number = scores.get(NUM_EXAMPLES)
        usable = isinstance(number, int) and 0 < number <= self._max_examples
        if not usable or not all(math.isfinite(value) for value in scores.values()):
            return None
        return dict(scores)


def _state_of(arrays: ArrayRecord) -> ServerState:
    tensors = {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}
    return ServerState(0, *_parted(tensors))


def _parted(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """What is averaged and what is counted; a state of Flower's does not say more."""
    return (
        {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()},
        {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()},
    )


def _read_update(
    content: RecordDict, scores: Mapping[str, float], expected: Expected
) -> ClientUpdate:
    like = {**expected.sent.params, **expected.sent.buffers}
    params, buffers = _parted(read_tensors(expect_arrays(content, ARRAYS), like, ARRAYS))
    payload = expect_declared(content, PAYLOAD, expected.payload) if expected.payload else {}
    work = content.get(WORK)
    steps, lr = (work.get("steps"), work.get("lr")) if isinstance(work, MetricRecord) else (1, 1.0)
    if not (isinstance(steps, int) and 0 <= steps <= MOST_STEPS):
        raise UnreadableError("it claims an impossible number of steps")
    if not (isinstance(lr, float) and 0 < lr < math.inf):
        raise UnreadableError("it claims an impossible learning rate")
    return ClientUpdate(
        client=expected.client,
        num_examples=expected.num_examples,
        params=params,
        buffers=buffers,
        train_loss=scores.get("train_loss"),
        epochs_done=1,
        steps=steps,
        lr=lr,
        payload=payload,
    )
