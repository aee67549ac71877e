"""A Flower grid in this process: messages go through Flower's own bytes to our ClientApp."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import ClassVar
from unittest import mock

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedproto.data.synthetic import Synthetic
from fedproto.flower.client_app import app

Tamper = Callable[[int, Message], Message | None]

GENERATED = cache(Synthetic.load)
"""A node loads its data for every message; here each is generated once."""


def through_the_wire(message: Message) -> Message:
    """A message as the other side reads it from bytes."""
    contents = {key: item.deflate() for key, item in get_all_nested_objects(message).items()}
    again = inflate_object_from_contents(message.object_id, contents)
    again.metadata.__dict__["_message_id"] = message.metadata.message_id
    return again


class LocalGrid(Grid):
    """Nodes 1000, 1001, … are clients 0, 1, …; `tamper` may change or swallow their replies."""

    node_config: ClassVar[dict] = {}

    def __init__(
        self, clients: Iterable[int], tamper: Tamper | None = None, client_app: ClientApp = app
    ) -> None:
        self._app = client_app
        self.clients = {1000 + client: client for client in clients}
        self.names: dict[int, str] = {}
        self.keys: dict[int, bytes] = {}
        self.tamper = tamper
        self.sent: list[Message] = []
        self._replies: dict[str, list[Message]] = {}
        self._states: dict[int, RecordDict] = {}
        # Flower sets these in the process of an app; messages cannot be made without.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def set_run(self, run) -> None: ...

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        raise NotImplementedError

    def get_node_ids(self):
        return list(self.clients)

    def get_nodes(self):
        return [
            NodeInfo(
                node_id=node,
                name=self.names.get(node, ""),
                public_key=self.keys.get(node, b""),
            )
            for node in self.clients
        ]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message_id = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.sent.append(message)
            ids.append(message_id)
            self._replies[message_id] = self._answer(through_the_wire(message))
        return ids

    def pull_messages(self, message_ids):
        return [reply for message_id in message_ids for reply in self._replies.pop(message_id, [])]

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> list[Message]:
        node = message.metadata.dst_node_id
        if node not in self.clients:
            return []
        config = {"partition-id": self.clients[node], **self.node_config}
        # As Flower does it: what an app leaves in its state is there at its next message.
        state = self._states.setdefault(node, RecordDict())
        context = Context(1, node, config, state, {})
        try:
            with mock.patch.object(Synthetic, "load", lambda *given: GENERATED(*given)):
                reply = self._app(message, context)
        except Exception as error:  # noqa: BLE001 - Flower answers with any error
            reply = Message(Error(2, str(error)), reply_to=message)
        if self.tamper is not None:
            changed = self.tamper(self.clients[node], reply)
            if changed is None:
                return []
            reply = changed
        return [through_the_wire(reply)]
