"""The SuperExec of a node, found as ``flower-superexec``: it starts Flower's ClientApps by fork.

For every message Flower starts a process that imports PyTorch and reads the data, seconds of work
for a round that may train for less. Here that is done once, by the process that waits for messages;
each message still gets a process of its own, as a copy of that one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from fedproto.errors import FedprotoError
from fedproto.options import load_plugin

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult

    from fedproto.data.base import DataSource
    from fedproto.data.federation import Federation

PROGRAM = "flower-superexec"
"""The name under which a SuperNode looks for this program."""

SMALL = {"data": "synthetic", "model": "mlp", "strategy": "fedavg"}

_kept: dict[tuple[DataSource, Path], Federation] = {}
_tell: Connection | None = None


def write_program(folder: Path, python: str) -> None:
    """Puts this program into a folder, for a PATH on which Flower finds it before its own."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / PROGRAM
    script = f"from {__name__} import main; main()"
    program.write_text(f'#!/bin/sh\nexec {python} -P -c "{script}" "$@"\n', encoding="utf-8")
    program.chmod(0o755)


def load(source: DataSource, root: Path) -> Federation:
    """The data of a node, kept for its next messages where a process waits for them."""
    known = _kept.get((source, root))
    if known is not None:
        return known
    federation = source.load(root)
    if _tell is not None:
        with contextlib.suppress(OSError, ValueError):
            _tell.send((source, root))
    return federation


def main() -> None:
    """Runs Flower's own SuperExec, with another way to start a ClientApp."""
    from flwr.supercore.cli.flower_superexec import flower_superexec

    try:
        _start_by_fork()
    except (ImportError, AttributeError, FedprotoError) as error:
        # Another Flower, or a plugin that is broken: then every message in Flower's own way.
        sys.stderr.write(f"ClientApps are started one by one: {error}\n")
    flower_superexec()


def _start_by_fork() -> None:
    import torch
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor import LaunchResult, SubprocessExecutor
    from flwr.supernode.runtime import run_clientapp  # noqa: F401 - so that no copy needs to

    import fedproto.flower.client_app  # noqa: F401 - likewise
    from fedproto.config import read_config

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads would not survive the copying
    for plugin in os.environ.get("FEDPROTO_PLUGINS", "").split():
        load_plugin(plugin)
    # To read a configuration is to import all strategies, models and data sets; to make an
    # optimizer is to import PyTorch's compiler, a second and a half.
    read_config({name: {"name": one} for name, one in SMALL.items()})
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a copy ended
    hear, tell = Pipe(duplex=False)
    as_usual = SubprocessExecutor.launch

    def launch(executor: SubprocessExecutor, spec: ExecutionSpec) -> LaunchResult:
        if spec.task_type is not TaskType.CLIENT_APP:
            return as_usual(executor, spec)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            torch.set_num_threads(threads)
            _be_clientapp(spec, tell)
        return LaunchResult.accepted()

    def reconcile(executor: SubprocessExecutor) -> None:
        """Called while there is nothing to do."""
        del executor
        # What goes wrong here goes wrong in the next copy too, which tells the server.
        with contextlib.suppress(Exception):
            while hear.poll():
                source, root = hear.recv()
                if (source, root) not in _kept:
                    _kept.clear()
                    _kept[source, root] = source.load(root)

    os.environ.pop("FEDPROTO_PLUGINS", None)  # no copy needs to load them again
    for method in (launch, reconcile):
        setattr(SubprocessExecutor, method.__name__, method)


def _be_clientapp(spec: ExecutionSpec, tell: Connection) -> None:
    """What a copy does: a message, and nothing after it."""
    global _tell
    code = 1
    try:
        from flwr.supercore.exit.exit_handler import registered_exit_handlers
        from flwr.supercore.tls import validate_and_resolve_root_certificates
        from flwr.supernode.runtime.run_clientapp import run_clientapp

        _tell = tell
        registered_exit_handlers.clear()  # those of the process that goes on waiting
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        run_clientapp(
            runtime_api_address=spec.runtime_api_address,
            token=spec.token,
            insecure=spec.insecure,
            certificates=validate_and_resolve_root_certificates(
                spec.root_certificates_path, spec.insecure
            ),
            parent_pid=spec.parent_pid,
            runtime_dependency_install=spec.runtime_dependency_install,
        )
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
