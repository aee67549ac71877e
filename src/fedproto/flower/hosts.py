"""What each host of a federation needs beside its keys: a start script and a systemd unit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from fedproto.flower.deploy import ENVIRONMENT, PROGRAMS, superlink, supernode
from fedproto.flower.keys import Keys, node_name
from fedproto.flower.superexec import write_program

SERVER_FILE = "server.json"
NODE_PORT = 9094
"""Flower's own for a SuperNode's local interface; counted up, so that several fit on one host."""

_SCRIPT = """\
#!/bin/sh
# {title}
# Needs fedproto[flower] on the PATH; works from wherever this folder was copied to.
set -eu
umask 077
here=$(cd "$(dirname "$0")" && pwd)
cd "$here"
{environment}
export FLWR_HOME="$here/flower"
export PATH="$here/bin:$PATH"
export FEDPROTO_STATE="${{FEDPROTO_STATE:-$here/state}}"
exec {command}
"""

_UNIT = """\
[Unit]
Description={title}
After=network-online.target
Wants=network-online.target

[Service]
User=fedproto
Environment=PATH={path}
ExecStart={folder}/{script}
Restart=on-failure
RestartSec=10
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={writable}

[Install]
WantedBy=multi-user.target
"""


def write_host_files(keys: Keys, host: str, port: int, clients: int, install: Path) -> None:
    """Writes start scripts and systemd units beside the keys.

    Clients reach the server under `host` and its owner on loopback, one port above; the folder of a
    host will lie at `install` on it.
    """
    facts = {"control": f"127.0.0.1:{port + 1}"}
    (keys.server / SERVER_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")
    here, everywhere = Path("$here"), f"0.0.0.0:{port}"  # clients are on other hosts
    _write(
        keys.server,
        "superlink",
        "The server of a fedproto federation",
        superlink(here, everywhere, port + 1, here / "state.db"),
        install,
        f"{install} /var/lib/fedproto",
    )
    for client in range(clients):
        write_program(keys.node(client) / PROGRAMS, "python3")
        _write(
            keys.node(client),
            "supernode",
            f"{node_name(client)} of a fedproto federation",
            supernode(
                here, f"{host}:{port}", client, NODE_PORT + client, "${FEDPROTO_NODE_CONFIG:-}"
            ),
            install,
            str(install),
        )


def _write(
    folder: Path, name: str, title: str, command: list[str], install: Path, writable: str
) -> None:
    script = folder / f"{name}.sh"
    script.write_text(
        _SCRIPT.format(
            title=title,
            environment="\n".join(f"export {key}={value}" for key, value in ENVIRONMENT.items()),
            command=" \\\n  ".join(_quoted(word) for word in command),
        ),
        encoding="utf-8",
    )
    script.chmod(0o755)
    unit = _UNIT.format(
        title=title,
        folder=install,
        script=script.name,
        path=f"{install}/venv/bin:/usr/bin:/bin",
        writable=writable,
    )
    (folder / f"fedproto-{name}.service").write_text(unit, encoding="utf-8")


def _quoted(word: str) -> str:
    return f'"{word}"' if "$" in word else shlex.quote(word)
