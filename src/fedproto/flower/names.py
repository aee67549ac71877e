"""The names under which clients' nodes are registered; nothing here needs ``flwr``."""

from __future__ import annotations

_PREFIX = "client-"


def node_name(client: int) -> str:
    """The name of a client's node."""
    return f"{_PREFIX}{client}"


def is_node_name(name: str) -> bool:
    """Whether a name is one of ours, and so binds a key to a client."""
    return name.startswith(_PREFIX)
