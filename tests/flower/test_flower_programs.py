"""Flower's programs with our changes: SuperExec by fork, a SuperNode that waits to be let in."""

from __future__ import annotations

import stat
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

import httpx

from fedproto.flower import programs
from fedproto.flower.deploy import Process

SCRIPT = """
import os, sys, time
from pathlib import Path
from flwr.supercore.constant import TaskType
from flwr.supercore.exit.exit_handler import add_exit_handler
from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor
from flwr.supernode.runtime import run_clientapp as runtime
from fedproto.flower import programs

folder = Path(sys.argv[1])

def clientapp(**options):
    already = all(name in sys.modules for name in ("torch", "fedproto.flower.client_app"))
    (folder / options["token"]).write_text(f"{os.getpid()} {already}")
    from flwr.supercore.exit import ExitCode, flwr_exit
    flwr_exit(ExitCode.SUCCESS)

runtime.run_clientapp = clientapp
add_exit_handler(lambda: (folder / "closed").touch())
programs.start_by_fork()
executor = SubprocessExecutor()
for token in ("first", "second", "third"):
    none = (True, None, False, None, False, 1)
    executor.launch(ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", token, *none))
    while not (folder / token).exists() or not (folder / token).read_text():
        time.sleep(0.02)
print(os.getpid())
"""


def test_messages_are_copies_of_a_process_that_has_imported_everything(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    waiting = done.stdout.strip().splitlines()[-1]
    answers = [(tmp_path / token).read_text().split() for token in ("first", "second", "third")]
    assert [already for _, already in answers] == ["True"] * 3
    assert len({waiting, *(pid for pid, _ in answers)}) == 4
    assert not (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    ("program", "option"),
    [
        (["superexec"], "--runtime-api-address"),
        (["supernode"], "--auth-supernode-private-key"),
        (["superlink", "localhost:1"], "--enable-supernode-auth"),
    ],
)
def test_the_programs_are_flowers_own_with_the_same_options(program, option):
    done = subprocess.run(
        programs.command_of(*program, "--help"),
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert option in done.stdout + done.stderr


class Server:
    """Answers a node's first calls with some errors."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)

    def activate(self, client, request):
        assert (client, request) == ("client", "request")
        if not self.statuses:
            return "activated"
        response = httpx.Response(self.statuses.pop(0), request=httpx.Request("POST", "http://x"))
        response.raise_for_status()
        raise AssertionError(response)


def test_a_node_waits_while_its_key_is_active_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr(programs, "ACTIVATE_EVERY", 0.01)
    server = Server(412, 412)
    assert programs.patient(server.activate)("client", "request") == "activated"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("earlier process of this node" in line for line in lines)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_node_does_not_wait_for_a_server_that_refuses_it(status):
    server = Server(status, status)
    with pytest.raises(httpx.HTTPStatusError):
        programs.patient(server.activate)("client", "request")
    assert server.statuses == [status]


def test_a_node_gives_up_when_its_key_stays_active(monkeypatch):
    monkeypatch.setattr(programs, "ACTIVATE_EVERY", 0.01)
    monkeypatch.setattr(programs, "EXPIRED_WITHIN", 0.05)
    with pytest.raises(httpx.HTTPStatusError):
        programs.patient(Server(*[412] * 1000).activate)("client", "request")


def test_logs_and_files_of_processes_are_for_this_user_alone(tmp_path):
    """A server's database has the messages: weights, statistics and claims."""
    made = "import pathlib, sys; pathlib.Path('state.db').touch(); print('log')"
    process = Process("server", [sys.executable, "-c", made], tmp_path, tmp_path)
    while process.exit_code is None:
        time.sleep(0.05)
    process.end()
    files = [tmp_path / "state.db", process.log]
    assert process.log.read_text() == "log\n"
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
