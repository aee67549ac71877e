"""Flower's processes: starting them, here or on several hosts, and submitting recipes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.proto.fab_pb2 import Fab
from flwr.supercore.control import ControlHttpClient

from fedproto.callback import Callback
from fedproto.data.base import data_root
from fedproto.disk.files import explained
from fedproto.errors import FedprotoError
from fedproto.flower.keys import (
    NODE_FILE,
    SERVER_FILE,
    Keys,
    as_pem,
    fingerprint,
    node_name,
    public_keys,
    read_addresses,
)
from fedproto.flower.nodes import patiently
from fedproto.flower.programs import END_FOR, WITH_OWNER, command_of
from fedproto.flower.wire import one_line
from fedproto.options import loaded_plugins
from fedproto.store import RunStore

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Otherwise every app resolves dependencies by itself; all hosts have them installed.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Seconds between two questions for work; a second by default, for each message of a round.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
}

APP = """\
[project]
name = "fedproto-run"
version = "1.0.0"
description = "A fedproto run"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedproto"

[tool.flwr.app.components]
serverapp = "fedproto.flower.server_app:app"
clientapp = "fedproto.flower.client_app:app"

[tool.flwr.app.config]
"""

ERROR_FILE = "flower-error.txt"
"""File of the run directory in which the server's app writes its error."""

NODE_PORT = 9094
"""Flower's port for a node; the client's number is added."""

START_FOR = 60.0
KILLED_WITHIN = 5.0
LOOK_EVERY = 1.0
SILENT_FOR = 120.0
"""Seconds without an answer after which a server is given up."""


class DeploymentError(FedprotoError):
    """A process of Flower's failed, or does not answer."""


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes, with a home of their own."""
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        **os.environ,
        **ENVIRONMENT,
        "FLWR_HOME": str(home),
        "FEDPROTO_DATA": str(data_root().resolve()),
        "FEDPROTO_PLUGINS": os.pathsep.join(loaded_plugins()),
        # Flower's programs start others of theirs by name alone.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        # They run in other directories than this one.
        "PYTHONPATH": os.pathsep.join(str(Path(part).resolve()) for part in inherited),
    }


def server_command(server: Path, public: str, control: str, database: Path) -> list[str]:
    """The server's command: an address for nodes, and one on loopback for its owner."""
    host, _, port = control.rpartition(":")
    return command_of(
        "superlink",
        *(public, "--enable-supernode-auth", "--database", str(database)),
        *("--host", host, "--port", port),
        *("--ssl-ca-certfile", str(server / "server.crt")),
        *("--ssl-certfile", str(server / "server.crt")),
        *("--ssl-keyfile", str(server / "server.key")),
    )


def node_command(node: Path, address: str, client: int, port: int, node_config: str) -> list[str]:
    """A node's command; the port is for its own processes, on loopback."""
    return command_of(
        "supernode",
        *("--root-certificates", str(node / "server.crt")),
        *("--auth-supernode-private-key", str(node / "node.key")),
        *("--superlink", address, "--port", str(port)),
        *("--node-config", f"partition-id={client} {node_config}".strip()),
    )


class Control:
    """The control interface of a server: its owner's commands."""

    def __init__(self, address: str, server: Path) -> None:
        """Takes the server's folder, with its certificate and the clients' keys."""
        self.address = address
        self._server = server

    def check(self) -> None:
        """Raises if no server answers."""
        if not answers(self.address):
            raise DeploymentError(f"no server answers at {self.address}; start it first")

    def register(self, public_key: Path, name: str) -> None:
        """Makes a node's key known to the server under a name, unless it is known."""
        key, nodes = as_pem(public_key), self.call("ListNodes", ListNodesRequest()).nodes_info
        if key not in {node.public_key for node in nodes}:
            self.call("RegisterNode", RegisterNodeRequest(public_key=key, name=name))

    def submit(self, out: Path) -> int:
        """Starts or continues the run of a directory; returns Flower's number of the run."""
        (out / ERROR_FILE).unlink(missing_ok=True)
        keys = {client: fingerprint(path) for client, path in public_keys(self._server).items()}
        settings = {"out": str(out.resolve()), "keys": json.dumps(keys)}
        about = APP + "".join(f"{name} = {json.dumps(one)}\n" for name, one in settings.items())
        app, _ = build_fab_from_files({"pyproject.toml": about.encode()})
        fab = Fab(hash_str=hashlib.sha256(app).hexdigest(), content=app)
        return int(self.call("StartRun", StartRunRequest(fab=fab)).run_id)

    def status(self, run: int) -> str:
        """Flower's status of a run, such as ``running`` or ``finished:completed``."""
        found = self.call("ListRuns", ListRunsRequest(run_id=run)).run_dict[run].status
        return f"{found.status}:{found.sub_status}".rstrip(":")

    def stop(self, run: int) -> None:
        """Stops a run; its finished rounds are safe in its directory."""
        with contextlib.suppress(FedprotoError):
            self.call("StopRun", StopRunRequest(run_id=run))

    def call(self, name: str, request: Any) -> Any:
        """The server's answer to a request; one that is busy is asked again.

        One that does not answer may have done what it was asked: that is left to its owner.
        """
        self.check()
        certificate = (self._server / "server.crt").read_bytes()

        def ask() -> Any:
            client = ControlHttpClient.from_server_address(self.address, False, certificate, ())
            with contextlib.closing(client):
                try:
                    return getattr(client, name)(request)
                except (httpx.HTTPStatusError, httpx.ReadTimeout, httpx.ReadError) as error:
                    reason = str(error)
                    if isinstance(error, httpx.HTTPStatusError):
                        if not error.response.is_client_error:
                            raise
                        told = error.response
                        reason = f"{told.status_code} {told.reason_phrase} {told.text}"
                    raise DeploymentError(f"{name} failed: {one_line(reason)}") from None

        return patiently(ask)

    def follow(
        self,
        run: int,
        out: Path,
        stores: Sequence[RunStore],
        callback: Callback,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Reports finished rounds to a callback, until all runs are over.

        `check` is called at intervals, and raises if waiting is useless.
        """
        seen = [len(store.records()) for store in stores]
        answered = time.monotonic()
        while True:
            status = "unknown"
            try:
                status, answered = self.status(run), time.monotonic()
            except FedprotoError:
                # A server under load fails now and then; the records show the progress.
                if time.monotonic() - answered > SILENT_FOR:
                    raise
            # Looked at after the server's answer: all that an ended run has done is there.
            for index, store in enumerate(stores):
                records = store.records()
                for record in records[seen[index] :]:
                    callback.on_round(store.config, record)
                seen[index] = max(seen[index], len(records))
            over, ended = all(store.finished for store in stores), status.startswith("finished")
            if (error := out / ERROR_FILE).exists():
                raise DeploymentError(error.read_text(encoding="utf-8").strip())
            if over and ended:
                return
            if ended:
                raise DeploymentError(
                    f"Flower ended the run ({status}) before it was done; see the log of the"
                    " SuperLink"
                )
            if not over:
                check()
            time.sleep(LOOK_EVERY)


def answers(address: str) -> bool:
    """Whether a process listens at a host and port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3):
            return True
    except (OSError, ValueError):
        return False


class Process:
    """A program of Flower with its child processes, in a session and process group of its own.

    It ends when this process is gone, even if that was killed.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, state: Path) -> None:
        """Starts it in a neutral directory, because Python code in the current one would be found.

        In `state` a node keeps its memory between rounds. Its files are for this user alone.
        """
        self.log = folder / f"{name}.log"
        home = folder / f"home-{name}"
        home.mkdir(parents=True, exist_ok=True)
        self.log.touch(mode=0o600)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own commands
                command,
                cwd=folder,
                env=environment(home) | {"FEDPROTO_STATE": str(state), WITH_OWNER: "yes"},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """Kills it and its child processes, as a power cut would."""
        ends = time.monotonic() + KILLED_WITHIN
        while self.signal(signal.SIGKILL) and time.monotonic() < ends:
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Terminates it, and kills it if it does not end."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_FOR)
        self.kill()

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal to the whole process group; False where no process is left in it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
            return True
        return False


class Deployment:
    """A server and nodes on this machine."""

    def __init__(self, folder: Path, keys: Keys, state: Path | None = None) -> None:
        """Keeps logs in a folder; nodes keep their memory in `state`."""
        self.folder = folder.resolve()
        self.keys = keys
        self.nodes: dict[int, Process] = {}
        self.link: Process | None = None
        self._state = (state or folder / "nodes").resolve()
        self.public = f"127.0.0.1:{free_port()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.control = Control(f"127.0.0.1:{free_port()}", keys.server)

    def start_link(self) -> None:
        """Starts the server, or starts it again on the same database."""
        server, database = self.keys.server.resolve(), self.folder / "state.db"
        command = server_command(server, self.public, self.control.address, database)
        self.link = Process("superlink", command, self.folder, self._state)
        ends = time.monotonic() + START_FOR
        while not answers(self.control.address):
            if self.link.exit_code is not None or time.monotonic() > ends:
                raise DeploymentError(f"the SuperLink did not start; see {self.link.log}")
            time.sleep(0.2)

    def check(self) -> None:
        """Raises if the server has ended."""
        if self.link is not None and self.link.exit_code is not None:
            raise DeploymentError(f"the SuperLink ended; see {self.link.log}")

    def register(self, client: int) -> None:
        """Makes a client's key known to the server."""
        self.control.register(self.keys.public_key(client), node_name(client))

    def start_node(self, client: int, keys: Keys | None = None) -> Process:
        """Starts a client's node, or starts it again under its old id."""
        folder = (keys or self.keys).node(client).resolve()
        command = node_command(folder, self.public, client, free_port(), "threads=1")
        if client in self.nodes:
            self.nodes[client].kill()  # lets go of what the one that ended still holds
        node = Process(node_name(client), command, self.folder, self._state)
        self.nodes[client] = node
        return node

    def end(self) -> None:
        """Ends all processes, the nodes first."""
        everything = [*self.nodes.values(), *([self.link] if self.link else [])]
        for process in everything:
            process.signal(signal.SIGTERM)
        for process in everything:
            process.end()


@contextlib.contextmanager
def deployment(
    folder: Path, keys: Keys, clients: int, state: Path | None = None
) -> Iterator[Deployment]:
    """A server and its nodes, which are always ended with the block."""
    deployed = Deployment(folder, keys, state)
    try:
        deployed.start_link()
        for client in range(clients):
            deployed.register(client)
            deployed.start_node(client)
        yield deployed
    finally:
        deployed.end()


def free_port() -> int:
    """A port that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def control_of(server: Path) -> Control:
    """The connection to the server on this host that was started from a folder."""
    control = Control(read_addresses(server, SERVER_FILE)["control"], server)
    control.check()
    return control


def become_host(folder: Path, node_config: str) -> None:
    """Replaces this process by the server or the node that a folder of keys is for."""
    os.umask(0o077)
    home, state = folder / "flower", Path(os.environ.get("FEDPROTO_STATE") or folder / "state")
    settings = environment(home) | {"FEDPROTO_STATE": str(state.resolve())}
    with explained(folder, " cannot be used", "; start it as the user whose folder it is"):
        if (folder / NODE_FILE).exists():
            facts = read_addresses(folder, NODE_FILE)
            client = int(facts["client"])
            # Several nodes fit on one host.
            command = node_command(folder, facts["server"], client, NODE_PORT + client, node_config)
        else:
            facts = read_addresses(folder, SERVER_FILE)
            command = server_command(folder, facts["public"], facts["control"], folder / "state.db")
        home.mkdir(exist_ok=True)
    os.chdir(home)  # a neutral directory: Python code in the current one would be found
    os.execve(command[0], command, settings)  # noqa: S606 - our own command
