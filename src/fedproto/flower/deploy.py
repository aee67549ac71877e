"""A deployment on this machine: a SuperLink and a SuperNode per client, each its own processes.

Everything is started in a session of its own and ended by its own process group, whatever
happened in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedproto.callback import Callback
from fedproto.data.base import data_root
from fedproto.errors import ConfigError, FedprotoError, install
from fedproto.flower import leash, superexec
from fedproto.flower.keys import Keys, fingerprint, node_name, public_keys
from fedproto.options import loaded_plugins
from fedproto.store import RunStore

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
                env=environment(home) | {"FEDPROTO_STATE": str(state)},
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
        command = superlink(server, self.public, self._port, database)
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
        command = supernode(folder, self.public, client, free_port(), self._node_config)
        name = node_name(client)
        superexec.write_program(self._home(name) / PROGRAMS, shlex.quote(sys.executable))
        if client in self.nodes:
            self.nodes[client].kill()  # lets go of what the one that ended still holds
        self.nodes[client] = node = self._start(name, command)
        return node

    def _start(self, name: str, command: Sequence[str]) -> Process:
        command = [program(command[0]), *command[1:]]
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


ERROR_FILE = "flower-error.txt"
"""Where the server's app says, in the run directory, why it gave up."""

ANSWER_WITHIN = 60.0
LOOK_EVERY = 0.5
ASK_EVERY = 10.0
ATTEMPTS = 5
UNAVAILABLE = "Connection to the SuperLink is unavailable"
SILENT_AT_MOST = 6
"""Questions in a row that a server may leave without an answer before it is given up."""


class DeploymentError(FedprotoError):
    """A process of Flower's that did not do what it should."""


class Control:
    """A connection to a server through the command ``flwr``."""

    def __init__(self, folder: Path, address: str, server: Path | None) -> None:
        """Keeps its own files in a folder; `server` has the certificate and the clients' keys."""
        self._folder = folder.resolve()
        self._address = address
        self._server = server
        self._home = self._folder / "home"
        self._home.mkdir(parents=True, exist_ok=True)
        trust = (
            "insecure = true"
            if server is None
            else f"root-certificates = {json.dumps(str((server / 'ca.crt').resolve()))}"
        )
        (self._home / "config.toml").write_text(
            '[superlink]\ndefault = "fedproto"\n\n'
            f"[superlink.fedproto]\naddress = {json.dumps(address)}\n{trust}\n",
            encoding="utf-8",
        )

    def register(self, public_key: Path, name: str) -> None:
        """Makes a node's key known to the server under a name."""
        self._flwr("supernode", "register", str(public_key.resolve()), "--name", name)

    def submit(self, out: Path) -> str:
        """Starts the run of a directory, or goes on with it; the number that Flower gives it."""
        (out / ERROR_FILE).unlink(missing_ok=True)
        app = self._folder / "app"
        known = {} if self._server is None else public_keys(self._server)
        write_app(app, out, {client: fingerprint(path) for client, path in known.items()})
        return str(self._flwr("run", str(app), "fedproto")["run-id"])

    def status(self, run: str) -> str:
        """What Flower says of a run, such as ``running`` or ``finished:completed``."""
        found = self._flwr("list", "--run-id", run)["runs"]
        return str(found[0]["status"]) if found else "unknown"

    def stop(self, run: str) -> None:
        """Stops a run; what it has done is safe in its directory."""
        with contextlib.suppress(DeploymentError):
            self._flwr("stop", run)

    def follow(
        self,
        run: str,
        out: Path,
        stores: Sequence[RunStore],
        callback: Callback,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Reports rounds to a callback as they are done, until all runs are finished.

        `check` is called now and then, and raises if there is no use in waiting.
        """
        seen = [len(store.records()) for store in stores]
        asked, silent = time.monotonic(), 0
        while True:
            _report(stores, seen, callback)
            over = all(store.finished for store in stores)
            error = out / ERROR_FILE
            if error.exists():
                raise DeploymentError(error.read_text(encoding="utf-8").strip())
            if check is not None and not over:
                check()
            if over or time.monotonic() - asked > ASK_EVERY:
                asked = time.monotonic()
                try:
                    status = self.status(run)
                    silent = 0
                except DeploymentError:
                    # A server under load fails now and then; the records tell how far the run is.
                    silent += 1
                    if silent > SILENT_AT_MOST:
                        raise
                    time.sleep(ASK_EVERY)
                    continue
                if over and status.startswith("finished"):
                    return
                # The last round may be done between our look at it and Flower's answer.
                late = all(store.finished for store in stores)
                if status.startswith("finished") and not late:
                    raise DeploymentError(
                        f"Flower ended the run ({status}) before it was done; see the log of the"
                        " SuperLink"
                    )
            time.sleep(LOOK_EVERY)

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """What Flower's command answers; a server that has just started is asked again."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._ask(*arguments)
            except DeploymentError as error:
                if UNAVAILABLE not in str(error):
                    raise
                time.sleep(ASK_EVERY)
        return self._ask(*arguments)

    def _ask(self, *arguments: str) -> dict[str, Any]:
        if not answers(self._address):
            # Flower's command would try for a minute.
            raise DeploymentError(f"no server answers at {self._address}; start it first")
        command = [program("flwr"), *arguments, "--format", "json"]
        try:
            done = subprocess.run(  # noqa: S603 - our own commands
                command,
                cwd=self._folder,
                env=environment(self._home),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWER_WITHIN,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeploymentError(
                f"the server at {self._address} did not answer within {ANSWER_WITHIN:g} s"
            ) from None
        with contextlib.suppress(ValueError):
            answer = json.loads(done.stdout)
            if done.returncode == 0 and isinstance(answer, dict) and answer.get("success", True):
                return answer
        text = " ".join((done.stdout + done.stderr).split())[-500:]
        raise DeploymentError(f"flwr {' '.join(arguments[:2])} failed: {text}")


def answers(address: str) -> bool:
    """Whether somebody listens at a host and port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=3):
            return True
    except (OSError, ValueError):
        return False


def _report(stores: Sequence[RunStore], seen: list[int], callback: Callback) -> None:
    for index, store in enumerate(stores):
        records = store.records()
        for record in records[seen[index] :]:
            callback.on_round(store.config, record)
        seen[index] = max(seen[index], len(records))


ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Otherwise every app resolves dependencies by itself; all hosts have them installed.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Seconds between two looks for work; a second by default, for each message of a round.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
}

PROGRAMS = "bin"
"""Folder of our programs that Flower's find before its own, in the home of a node."""

_APP = """\
[project]
name = "fedproto-run"
version = "1.0.0"
description = "A fedproto run"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedproto"

[tool.flwr.app.components]
serverapp = "fedproto_run.server:app"
clientapp = "fedproto_run.client:app"

[tool.flwr.app.config]
out = {out}
keys = {keys}
"""


def program(name: str) -> str:
    """A command of Flower's, of the environment that this program runs in."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise ConfigError(f"the command {name} is not there; {install('flower')}")
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes, with a home of their own."""
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {
        **os.environ,
        **ENVIRONMENT,
        "FLWR_HOME": str(home),
        "FEDPROTO_DATA": str(data_root().resolve()),
        "FEDPROTO_PLUGINS": " ".join(loaded_plugins()),
        # Flower's programs start others of theirs by name alone, and one of these is ours.
        "PATH": os.pathsep.join(
            [str(home / PROGRAMS), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        ),
        # They run in other directories than this one.
        "PYTHONPATH": os.pathsep.join(str(Path(part).resolve()) for part in inherited),
    }


def superlink(server: Path | None, public: str, port: int, database: Path) -> list[str]:
    """The server's command: for its owner at a port of loopback, for nodes at a public address.

    Without its folder of certificates it is insecure, and nodes too reach it at that port.
    """
    where = [*("--database", str(database)), *("--host", "127.0.0.1"), *("--port", str(port))]
    if server is None:
        return ["flower-superlink", "--insecure", *where]
    return [
        *("python3", "-P", "-m", "fedproto.flower.superlink", "--public", public),
        *("--ssl-ca-certfile", str(server / "ca.crt")),
        *("--ssl-certfile", str(server / "server.crt")),
        *("--ssl-keyfile", str(server / "server.key")),
        *("--enable-supernode-auth", *where),
    ]


def supernode(
    node: Path | None, address: str, client: int, port: int, node_config: str = ""
) -> list[str]:
    """A node's command; without its folder of keys it is insecure."""
    secure = ["--insecure"]
    if node is not None:
        secure = [
            *("--root-certificates", str(node / "ca.crt")),
            *("--auth-supernode-private-key", str(node / "node.key")),
        ]
    config = f"partition-id={client} {node_config}".strip()
    where = [*("--superlink", address), *("--port", str(port)), *("--node-config", config)]
    return ["flower-supernode", *secure, *where]


def write_app(folder: Path, out: Path, keys: Mapping[int, str]) -> None:
    """The app to submit: our ServerApp and ClientApp, the directory of the run, clients' keys."""
    package = folder / "fedproto_run"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(
        _APP.format(out=json.dumps(str(out.resolve())), keys=json.dumps(json.dumps(keys))),
        encoding="utf-8",
    )
    (package / "__init__.py").write_text('"""A fedproto run."""\n', encoding="utf-8")
    for side in ("server", "client"):
        (package / f"{side}.py").write_text(
            f'"""The {side} side."""\n\nfrom fedproto.flower.{side}_app import app\n\n'
            '__all__ = ["app"]\n',
            encoding="utf-8",
        )
