"""Flower's commands as we use them: arguments, environment, and the app that is submitted."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fedproto.data.base import data_root
from fedproto.errors import ConfigError, install
from fedproto.options.registry import loaded_plugins

ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    # Otherwise every app resolves dependencies by itself; all hosts have them installed.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Seconds between two looks for work; a second by default, for each message of a round.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3",
}

_PREFIX = "client-"
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


def node_name(client: int) -> str:
    """The name under which a client's node is registered."""
    return f"{_PREFIX}{client}"


def is_node_name(name: str) -> bool:
    """Whether a name is one of ours, and so binds a key to a client."""
    return name.startswith(_PREFIX)


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
