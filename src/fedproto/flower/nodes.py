"""The connected clients as a federation: the server knows sizes and shapes only.

Flower's nodes have random numbers, our clients stable ids. Every node is asked once who it is. A
client keeps its node as long as that is connected; a second node that claims the same id is
rejected. Where the server's folder has the clients' public keys, as ``fedproto flower keys`` makes
it, a client is the node with its key and no other, whatever else was registered, also when a run
continues.

Cohorts are drawn by size, so all sizes are needed before the first round. They are kept in the run
directory; when a run continues, a client may be absent, but not come back with other numbers. Sizes
are claims. They decide how often a client is drawn, its weight, the counts that it may report and
its part in the test, so none is believed beyond a multiple of the federation's median: a client
that claims more is asked to train and to test on that many of its samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
import torch
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from fedproto.callback import Callback
from fedproto.config import RunConfig, digest_of
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import Samples
from fedproto.data.tasks import task_named
from fedproto.disk.files import explained, write_atomically
from fedproto.disk.integrity import read_sealed, sealed
from fedproto.errors import ConfigError, DataError, FedprotoError, StoreError
from fedproto.flower import wire
from fedproto.flower.keys import fingerprint, node_name
from fedproto.flower.wire import Hello, UnreadableError, one_line
from fedproto.options import options_to_dict, read_options
from fedproto.rng import Indices
from fedproto.rounds.claims import DRAWN, TESTED, believed_sizes

LOG = getLogger("flwr")

T = TypeVar("T")

NOT_ANSWERED = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
BUSY = (httpx.HTTPError, ConnectionError, TimeoutError)
"""Errors of requests to Flower's server when its database is locked or it is unreachable."""

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
PULL_EVERY = 0.5
LOOK_EVERY = 1.0
ASK_AGAIN_AFTER = 10.0
ASK_FOR = 120.0
"""Seconds a node has to identify itself, for which it only loads its data."""


class ServerGoneError(FedprotoError):
    """Flower's server does not answer."""


def exchange(
    grid: Grid,
    kind: str,
    questions: Mapping[int, tuple[int, RecordDict]],
    read: Callable[[int, RecordDict], T],
    *,
    round_: int,
    deadline: float,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[int, T | UnreadableError]:
    """Sends a question to each of some nodes and waits for all answers, or the deadline.

    A question is a node and a message, under a key of its own. Each answer is read on arrival;
    where there is no usable one, the reason is in its place.
    """
    ends = time.monotonic() + deadline
    waiting: dict[str, int] = {}
    answers: dict[int, T | UnreadableError] = {}

    for key, (node, content) in questions.items():
        try:
            push = partial(_push, grid, content, node, kind, round_, deadline)
            waiting[patiently(push)] = key
        except FedprotoError as error:
            answers[key] = UnreadableError(f"the message could not be sent: {error}")
    while waiting:
        over = time.monotonic() >= ends
        for message_id, key in list(waiting.items()):
            try:
                answer = _pull(grid, message_id, questions[key][0], patient=over)
                if answer is not None:
                    answers[key] = read(key, answer)
                elif over:
                    raise UnreadableError(f"no answer within {deadline:g} s")
                else:
                    continue
            except UnreadableError as error:
                answers[key] = error
            del waiting[message_id]
            on_answer()
        if waiting:
            time.sleep(PULL_EVERY)
    return answers


def _push(
    grid: Grid, content: RecordDict, node: int, kind: str, round_: int, deadline: float
) -> str:
    """Sends a message, built again for every attempt; returns its id."""
    for sent in grid.push_messages(
        [Message(content, node, kind, ttl=deadline, group_id=str(round_))]
    ):
        if sent:
            return sent
    raise UnreadableError("the server did not accept it")


def patiently(call: Callable[[], T]) -> T:
    """Asks Flower's server again when it is too busy to answer."""
    for pause in PAUSES:
        try:
            return call()
        except BUSY as error:
            last = error
            time.sleep(pause)
    raise ServerGoneError(
        f"Flower's server does not answer ({one_line(str(last))}); see its log, and continue the"
        " run when it is back"
    )


def _pull(grid: Grid, message_id: str, node: int, *, patient: bool) -> RecordDict | None:
    """The answer to one message, if it is there.

    Pulled alone, so that a broken one affects no other.
    """
    replies = partial(grid.pull_messages, [message_id])
    try:
        found = list(patiently(replies) if patient else replies())
        return _content(found, node) if found else None
    except BUSY:
        return None  # asked again at the next look
    except FedprotoError as error:
        raise UnreadableError(str(error)) from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"its answer cannot be read: {error}") from None


def _content(replies: Sequence[Message], node: int) -> RecordDict:
    """The content of the reply to a message; raises why it is not usable."""
    if len(replies) > 1:
        raise UnreadableError("it sent a duplicate of its answer")
    (reply,) = replies
    # Errors that the SuperLink makes by itself do not carry the node's number.
    if reply.has_error() and reply.error.code in NOT_ANSWERED:
        raise UnreadableError("no answer: the deadline has passed, or the node has disconnected")
    if reply.has_error():
        raise UnreadableError(f"error {reply.error.code}: {reply.error.reason or ''}")
    if reply.metadata.src_node_id != node:
        raise UnreadableError("another node answered in its place")
    refusal = wire.decode_refusal(reply.content)
    if refusal is not None:
        raise UnreadableError(f"it refused: {refusal}")
    return reply.content


class Nodes:
    """The connected clients.

    With `keys`, the fingerprints of the clients' public keys, a client is the node with its key.

    Attributes:
        notices: What is to be in the next record, such as rejected nodes.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        callback: Callback,
        keys: Mapping[int, str],
    ) -> None:
        self._grid = grid
        self._config = config
        self._callback = callback
        self._keys = keys
        self._known: dict[int, Hello] = {}
        self._online: dict[int, tuple[str, str | None]] = {}
        self._rejected: dict[int, str] = {}
        self.notices: list[str] = []

    def clients(self) -> dict[int, int]:
        """The node of every client that is connected."""
        return {self._known[node].client: node for node in self._known.keys() & self._online}

    def hellos(self) -> dict[int, Hello]:
        """The connected clients' descriptions of themselves."""
        return {client: self._known[node] for client, node in self.clients().items()}

    def note(self, text: str) -> None:
        """Shows a notice and keeps it for the record."""
        self.notices.append(text)
        self._callback.on_notice(text)

    def refresh(self, *, ask_again: bool = False) -> None:
        """Asks connected nodes that have not identified themselves yet."""
        self._online = {
            node.node_id: (node.name, fingerprint(node.public_key) if node.public_key else None)
            for node in patiently(self._grid.get_nodes)
        }
        new = self._online.keys() - self._known.keys()
        if not ask_again:
            new -= self._rejected.keys()
        question = wire.encode(wire.Question(wire.config_text(self._config)))
        questions = {node: (node, question) for node in sorted(new)}
        hellos = exchange(
            self._grid, "query.hello", questions, self._judge, round_=0, deadline=ASK_FOR
        )
        for node, hello in hellos.items():
            name, key = self._online[node]
            if isinstance(hello, UnreadableError):
                if self._rejected.get(node) != str(hello):
                    self.note(f"node {name or node} rejected: {hello}")
                self._rejected[node] = str(hello)
            else:
                self._rejected.pop(node, None)
                LOG.info("client %d is node %d (%s), key %s", hello.client, node, name, key)

    def wait_for(self, clients: Collection[int], seconds: float) -> None:
        """Waits until some clients are connected, at most this long."""
        ends = time.monotonic() + seconds
        self.refresh()
        asked = time.monotonic()
        while not set(clients) <= self.clients().keys() and time.monotonic() < ends:
            time.sleep(min(LOOK_EVERY, max(0.0, ends - time.monotonic())))
            again = time.monotonic() - asked > ASK_AGAIN_AFTER
            if again:
                asked = time.monotonic()
            self.refresh(ask_again=again)

    def _judge(self, node: int, answer: RecordDict) -> Hello:
        """Makes a node known, if it may take part as the client that it names."""
        hello = wire.decode_hello(answer)
        if self._keys and self._keys.get(hello.client) != self._online[node][1]:
            raise UnreadableError(
                f"its key is not that of client {hello.client}, {node_name(hello.client)}.pub in"
                " the server's folder"
            )
        if hello.client in self.clients():
            raise UnreadableError(f"client {hello.client} is connected already")
        self._known[node] = hello
        return hello


CLAIMS = {"num_train": "training", "num_test": "test", "num_validation": "validation"}
"""The sizes that a client reports, and their names in notices."""


class RemoteSamples(Samples):
    """Samples that the server does not have."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """There are none on the server."""
        raise DataError("the samples are with the clients; the server has none of them")

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """No samples to move."""
        return self


def enrol(config: RunConfig, nodes: Nodes, folder: Path) -> Federation:
    """The federation of the clients that are connected, or of those enrolled before."""
    path = folder / "clients.json"
    data = digest_of({"data": config.to_dict()["data"]})
    enrolled = read_sealed(path, "restore it from a copy")
    if data in enrolled:
        try:
            hellos = [wire.plausible(read_options(Hello, one, "")) for one in enrolled[data]]
            if [hello.client for hello in hellos] != [*range(max(1, len(hellos)))]:
                raise UnreadableError("its clients are not counted from 0")
        except (TypeError, ConfigError, UnreadableError) as error:
            raise StoreError(f"{path} cannot be used: {error}; start a new run") from None
        return federation_of(config, _believed(hellos, config, nodes))
    number = config.flower.clients or getattr(config.data, "clients", None)
    if not isinstance(number, int):
        raise ConfigError(
            "flower.clients is missing: set it to the number of clients, or test on the server"
            " (flower.evaluate_on = 'server') where it has the data"
        )
    nodes.wait_for(range(number), config.flower.wait)
    ready = nodes.hellos()
    if missing := [client for client in range(number) if client not in ready]:
        raise DataError(
            f"clients {', '.join(map(str, missing))} did not connect within"
            f" {config.flower.wait:g} s; the first round needs the sizes of all {number}: start"
            " them, or wait longer (flower.wait)"
        )
    hellos = [ready[client] for client in range(number)]
    enrolled[data] = [options_to_dict(one) for one in hellos]
    federation = federation_of(config, _believed(hellos, config, nodes))
    with explained(path):
        write_atomically(path, sealed(enrolled))
    return federation


def _believed(hellos: list[Hello], config: RunConfig, nodes: Nodes) -> list[Hello]:
    """The claims, each as far as the others make it plausible."""
    bound, schedule = config.aggregate.max_claim, config.schedule
    if bound is not None and schedule.sampling == "size" and schedule.cohort < 5:
        nodes.note(
            f"cohorts of {schedule.cohort} drawn by size: a client that claims many samples is in"
            " nearly all; set schedule.sampling = 'uniform', or schedule.cohort = 5 or more"
        )
    for name, what in CLAIMS.items():
        claims = {hello.client: claim for hello in hellos if (claim := getattr(hello, name))}
        sizes = np.array(list(claims.values()), dtype=np.int64)
        if not claims:
            continue
        believed = believed_sizes(sizes, bound, DRAWN if name == "num_train" else TESTED)
        for client, size in zip(claims, believed.tolist(), strict=True):
            if size < claims[client]:
                hellos[client] = replace(hellos[client], **{name: size})
                nodes.note(
                    f"client {client} claims {claims[client]:,} {what} samples and uses {size:,}:"
                    f" aggregate.max_claim bounds them by the median"
                )
    return hellos


def federation_of(config: RunConfig, hellos: list[Hello]) -> Federation:
    """A federation known by its clients' descriptions of themselves, by client id."""
    first = hellos[0]
    for hello in hellos:
        same = (hello.num_classes, hello.input_shape, hello.task, hello.class_names)
        if same != (first.num_classes, first.input_shape, first.task, first.class_names):
            raise DataError(
                f"client {hello.client} has {hello.num_classes} classes of inputs"
                f" {hello.input_shape} ({hello.task}), client {first.client} has"
                f" {first.num_classes} of {first.input_shape} ({first.task}); all clients must"
                " agree"
            )
    task_named(first.task)
    sizes = np.array([[one.num_train, one.num_test, one.num_validation] for one in hellos])
    parts = np.split(np.arange(sizes.sum()), sizes.cumsum()[:-1])  # three of every client
    validation = parts[2::3]
    return Federation(
        name=str(getattr(config.data, "folder", "") or "data of the clients"),
        samples=RemoteSamples(int(sizes.sum())),
        clients=tuple(map(Client, parts[0::3], parts[1::3])),
        num_classes=first.num_classes,
        input_shape=first.input_shape,
        task=first.task,
        validation=np.concatenate(validation),
        validation_owner=np.repeat(np.arange(len(validation)), sizes[:, 2]),
        class_names=first.class_names,
    )
