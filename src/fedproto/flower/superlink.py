"""Flower's SuperLink with two addresses, one of them for nodes: ``… --public HOST:PORT``.

Flower serves three interfaces on one port and authenticates nodes alone: whoever reaches the port
registers nodes, and submits apps that then run on the server and on every node. Here the port that
nodes reach passes nothing but the calls of a registered node. All of Flower's interfaces are on a
second, private port, ``--host`` and ``--port`` of Flower's own command, on loopback and for
processes of the server's own user.

The other arguments are those of ``flower-superlink``. With a Flower that serves in another way the
public port stays closed.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Address = tuple[str, int]

NODE_CALLS = frozenset(
    f"/v1/fleet/{call}"
    for call in (
        *("activate-node", "deactivate-node", "send-node-heartbeat"),
        *("get-run", "get-fab", "pull-messages", "push-messages"),
        *("pull-object", "push-object", "confirm-message-received"),
    )
)
"""Flower checks each of them against the keys that the owner registered."""

CONNECTIONS = Path("/proc/net/tcp")
ESTABLISHED = "01"


class Gateway:
    """Flower's app, all of it for the owner and the calls of nodes for everyone else."""

    def __init__(self, app: App, private: Address) -> None:
        self._app = app
        self._private = private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers that there is nothing of that name."""
        if scope["type"] == "lifespan" or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close"})

    def _admits(self, scope: Scope) -> bool:
        if tuple(scope.get("server") or ()) == self._private:
            return is_owner(scope.get("client"), self._private)
        return scope["type"] == "http" and scope["path"] in NODE_CALLS


def is_owner(client: Address | None, server: Address) -> bool:
    """Whether the process behind a connection over loopback belongs to this process's user.

    Linux says whose it is; elsewhere everyone on this machine passes.
    """
    if not CONNECTIONS.exists():
        return True
    ends = [_as_in_table(*end) for end in (client, server) if end is not None]
    for line in CONNECTIONS.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        # A connection that its process has closed is listed as root's.
        if fields[1:3] == ends and fields[3] == ESTABLISHED:
            return int(fields[7]) in (0, os.getuid())
    return False


def _as_in_table(host: str, port: int) -> str:
    number = int.from_bytes(socket.inet_aton(host), sys.byteorder)
    return f"{number:08X}:{port:04X}"


def main() -> None:
    """Runs Flower's own command, and serves its app on both addresses."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--public", required=True, metavar="HOST:PORT")
    own, flowers = parser.parse_known_args()
    host, _, port = own.public.rpartition(":")
    public = (host.strip("[]"), int(port))

    def serve_both(app: App, **settings: Any) -> None:
        private = (str(settings["host"]), int(settings["port"]))
        try:
            sockets = [_listen(public), _listen(private)]
        except OSError as error:
            sys.exit(f"cannot listen on {own.public} and {private[0]}:{private[1]}: {error}")
        uvicorn.Server(uvicorn.Config(Gateway(app, private), **settings)).run(sockets)

    from flwr.superlink.cli.flower_superlink import flower_superlink

    uvicorn.run = serve_both  # type: ignore[assignment]
    sys.argv = ["flower-superlink", *flowers]
    flower_superlink()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family)


if __name__ == "__main__":
    main()
