"""A deployment on this machine: a SuperLink and a SuperNode per client, each its own processes.

Everything is started in a session of its own and ended by its own process group, whatever
happened in between.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedproto.flower import commands, leash, superexec
from fedproto.flower.commands import node_name
from fedproto.flower.control import Control, DeploymentError, answers
from fedproto.flower.keys import Keys

START_FOR = 60.0
END_FOR = 10.0


class Process:
    """One of Flower's programs with all that it starts.

    Its working directory is a neutral one, because Python code there would be found. In `state` a
    node keeps what it remembers between its rounds.
    """

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, home: Path, state: Path
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # The leash ends it when this process is gone, even if it was killed.
            self._process = subprocess.Popen(  # noqa: S603 - our own commands
                [sys.executable, str(Path(leash.__file__)), *command],
                cwd=folder,
                env=commands.environment(home) | {"FEDPROTO_STATE": str(state)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The number of the process and of its group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Waits for the end; the exit code, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """Ends it and what it started at once, as a power cut would."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def end(self) -> None:
        """Asks it to end, and ends it if it does not."""
        self._signal(signal.SIGTERM)
        self.wait(END_FOR)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class Deployment:
    """A server and nodes on this machine.

    Without keys it is insecure. `node_config` are settings of every node beside its id.
    """

    def __init__(
        self,
        folder: Path,
        keys: Keys | None,
        node_config: str = "threads=1",
        state: Path | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self._state = (state or folder / "nodes").resolve()
        self.keys = keys
        self.nodes: dict[int, Process] = {}
        self.link: Process | None = None
        self._node_config = node_config
        self._port = free_port()
        self._address = f"127.0.0.1:{self._port}"
        self.public = self._address if keys is None else f"127.0.0.1:{free_port()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.control = Control(self.folder, self._address, keys.server if keys else None)

    def start_link(self) -> None:
        """Starts the server, or starts it again on the same database."""
        ends = time.monotonic() + END_FOR
        while answers(self._address) and time.monotonic() < ends:
            time.sleep(0.2)  # one that was killed is still letting go of its port
        server = None if self.keys is None else self.keys.server.resolve()
        database = self.folder / "state.db"
        command = commands.superlink(server, self.public, self._port, database)
        self.link = self._start("superlink", command)
        ends = time.monotonic() + START_FOR
        while not answers(self._address):
            if self.link.exit_code is not None or time.monotonic() > ends:
                raise DeploymentError(f"the SuperLink did not start; see {self.link.log}")
            time.sleep(0.2)

    def register(self, client: int) -> None:
        """Makes a client's key known to the server."""
        if self.keys is not None:
            self.control.register(self.keys.public_key(client), node_name(client))

    def start_node(self, client: int, keys: Keys | None = None) -> Process:
        """Starts a client's node, or starts it again under its old id."""
        keys = keys or self.keys
        folder = None if keys is None else keys.node(client).resolve()
        command = commands.supernode(folder, self.public, client, free_port(), self._node_config)
        name = node_name(client)
        superexec.write_program(self._home(name) / commands.PROGRAMS, shlex.quote(sys.executable))
        if client in self.nodes:
            self.nodes[client].kill()  # lets go of what the one that ended still holds
        self.nodes[client] = node = self._start(name, command)
        return node

    def _start(self, name: str, command: Sequence[str]) -> Process:
        command = [commands.program(command[0]), *command[1:]]
        return Process(name, command, self.folder, self._home(name), self._state)

    def _home(self, name: str) -> Path:
        return self.folder / f"home-{name}"

    def end(self) -> None:
        """Ends all processes, the nodes first."""
        everything = [*self.nodes.values(), *([self.link] if self.link else [])]
        for process in everything:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in everything:
            process.end()


@contextlib.contextmanager
def deployment(
    folder: Path,
    keys: Keys | None,
    clients: int,
    node_config: str = "threads=1",
    state: Path | None = None,
) -> Iterator[Deployment]:
    """A server with all its nodes started, taken down again at the end whatever happens."""
    deployed = Deployment(folder, keys, node_config, state)
    try:
        deployed.start_link()
        for client in range(clients):
            deployed.register(client)
            deployed.start_node(client)
        yield deployed
    finally:
        with _undisturbed():
            deployed.end()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Lets an impatient second Ctrl-C, or request to end, not leave processes or keys behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
