"""Flower's own programs, each with one change: ``python -m fedproto.flower.programs PROGRAM …``.

``superlink``  Serves nodes and the server's owner on two ports, see `Gateway`.
``supernode``  Waits while the server still lists an earlier process of the node.
``superexec``  Starts a ClientApp as a copy of a process that has imported everything.

The other arguments are those of Flower's commands.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from fedproto.errors import FedprotoError
from fedproto.options import load_plugins

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Address = tuple[str, int]
T = TypeVar("T")

WITH_OWNER = "FEDPROTO_WITH_OWNER"
"""Environment variable of a program that is to end when its standard input is closed."""

END_FOR = 10.0
"""Seconds a program has to end by itself."""

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

EXPIRED_WITHIN = 90.0
"""Seconds after which the server has noticed a lost node: more than two heartbeats."""

ACTIVATE_EVERY = 5.0
NOT_ACTIVATED = 412
"""HTTP status of Flower's answer to a node whose key is active already."""

SMALL = {"data": "synthetic", "model": "mlp", "strategy": "fedavg"}


def command_of(program: str, *arguments: str) -> list[str]:
    """The command that runs one of the programs."""
    return [sys.executable, "-P", "-m", "fedproto.flower.programs", program, *arguments]


def main() -> None:
    """Runs the program that the arguments name."""
    del sys.argv[0]
    if os.environ.pop(WITH_OWNER, None):
        _end_with_owner()
    {"superlink": superlink, "supernode": supernode, "superexec": superexec}[sys.argv[0]]()


def _end_with_owner() -> None:
    """Ends this process group when the other end of standard input is gone, even if killed."""
    owner = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def wait() -> None:
        while os.read(owner, 1024):
            pass
        os.killpg(0, signal.SIGTERM)
        time.sleep(END_FOR)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


class Gateway:
    """Flower's app behind two addresses: a private one for the owner, a public one for nodes.

    Flower serves three interfaces on one port and authenticates nodes alone: any client that
    reaches the port registers nodes, and submits apps that then run on the server and on every
    node. Here the public port passes nothing but the calls of a registered node. All of Flower's
    interfaces are on the private one, on loopback, for processes of the server's own user.
    """

    def __init__(self, app: App, private: Address) -> None:
        self._app = app
        self._private = private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request, or answers 404."""
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

    Linux lists whose it is; elsewhere every user of this machine passes.
    """
    if sys.platform != "linux":
        return True
    ends = [  # as the table has them
        f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
        for host, port in filter(None, (client, server))
    ]
    for line in CONNECTIONS.read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        # A connection that its process has closed is listed as root's.
        if fields[1:3] == ends and fields[3] == ESTABLISHED:
            return int(fields[7]) in (0, os.getuid())
    return False


def superlink() -> None:
    """Runs Flower's SuperLink on two addresses: its own, and the first argument for nodes.

    With a Flower that serves in another way the public port stays closed.
    """
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    public = sys.argv.pop(1)

    def serve_both(app: App, **settings: Any) -> None:
        host, _, port = public.rpartition(":")
        private = (str(settings["host"]), int(settings["port"]))
        try:
            sockets = [_listen((host.strip("[]"), int(port))), _listen(private)]
        except OSError as error:
            sys.exit(f"cannot listen on {public} and {private[0]}:{private[1]}: {error}")
        # A client on this host could name another's connection as its own in a proxy's header.
        settings["proxy_headers"] = False
        uvicorn.Server(uvicorn.Config(Gateway(app, private), **settings)).run(sockets)

    uvicorn.run = serve_both  # type: ignore[assignment]
    sys.argv[0] = "flower-superlink"
    flower_superlink()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    return socket.create_server(address, family=family)


def supernode() -> None:
    """Runs Flower's SuperNode, patient with the server and with our SuperExec."""
    from flwr.supernode import start_client_internal as internal
    from flwr.supernode.cli.flower_supernode import flower_supernode
    from flwr.supernode.fleet_http_client import FleetHttpClient

    def start_superexec(command: list[str]) -> subprocess.Popen[bytes]:
        ours = command_of("superexec", *command[1:])
        return subprocess.Popen(ours)  # noqa: S603 - Flower's own arguments

    # Of `subprocess` Flower's module uses nothing but this.
    setattr(internal, "subprocess", SimpleNamespace(Popen=start_superexec))  # noqa: B010
    setattr(FleetHttpClient, "ActivateNode", patient(FleetHttpClient.ActivateNode))  # noqa: B010
    sys.argv[0] = "flower-supernode"
    flower_supernode()


def patient(activate: Callable[..., T]) -> Callable[..., T]:
    """A node's first call, repeated while an earlier process of the node counts as connected.

    The server misses a node that was killed only when its heartbeats are overdue, and refuses a
    second one with the same key until then.
    """
    import httpx

    def activate_patiently(*arguments: Any) -> T:
        ends = time.monotonic() + EXPIRED_WITHIN
        while True:
            try:
                return activate(*arguments)
            except httpx.HTTPStatusError as error:
                left = ends - time.monotonic()
                if error.response.status_code != NOT_ACTIVATED or left < 0:
                    raise
            sys.stderr.write(
                "the server still lists an earlier process of this node; trying again every"
                f" {ACTIVATE_EVERY:g} s, for {left:.0f} s at most\n"
            )
            time.sleep(ACTIVATE_EVERY)

    return activate_patiently


def superexec() -> None:
    """Runs Flower's SuperExec, with another way to start a ClientApp.

    For every message Flower starts a process that imports PyTorch, seconds of work for a round that
    may train for less. Here that is done once, by the process that waits for messages; each message
    still gets a process of its own, as a copy of that one.
    """
    from flwr.supercore.cli.flower_superexec import flower_superexec

    try:
        start_by_fork()
    except (ImportError, AttributeError, FedprotoError) as error:
        # Another Flower, or a broken plugin: then every message the slow way.
        sys.stderr.write(f"ClientApps are started one by one: {error}\n")
    sys.argv[0] = "flower-superexec"
    flower_superexec()


def start_by_fork() -> None:
    """Imports all that ClientApps need, and has Flower start them as copies of this process."""
    import torch
    from flwr.supercore.superexec.executor import subprocess_executor
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp  # noqa: F401 - for the copies

    from fedproto.config import read_config
    from fedproto.flower import client_app  # noqa: F401

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads would not survive the copying
    load_plugins()
    # Reading a configuration imports all strategies, models and data sets; making an optimizer
    # imports PyTorch's compiler, a second and a half.
    read_config({name: {"name": one} for name, one in SMALL.items()})
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def start(command: list[str], **outputs: Any) -> None:
        if command[0] == "flwr-clientapp":
            copies = multiprocessing.get_context("fork")
            copies.Process(target=_answer, args=(command, threads), daemon=True).start()
        else:
            subprocess.Popen(command, **outputs)  # noqa: S603 - Flower's own command

    flowers = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    setattr(subprocess_executor, "subprocess", flowers)  # noqa: B010


def _answer(command: list[str], threads: int) -> None:
    """Answers one message, in a copy of the process that waits for messages."""
    import torch
    from flwr.supercore.exit.exit_handler import registered_exit_handlers
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    torch.set_num_threads(threads)
    registered_exit_handlers.clear()  # those of the waiting process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = command
    flwr_clientapp()


if __name__ == "__main__":
    main()
