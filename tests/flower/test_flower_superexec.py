"""A node's SuperExec: a process for every message, none of which imports or loads anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from fedproto.flower.superexec import PROGRAM, write_program

SCRIPT = """
import os, sys, time
from pathlib import Path
from flwr.supercore.constant import TaskType
from flwr.supercore.exit.exit_handler import add_exit_handler
from flwr.supercore.superexec.executor import ExecutionSpec, SubprocessExecutor
from flwr.supernode.runtime import run_clientapp as runtime
from fedproto.data.synthetic import Synthetic
from fedproto.flower import superexec

folder = Path(sys.argv[1])
source = Synthetic(clients=2, seed=1)
loads = folder / "loads"
own = Synthetic.load

def load(self, root):
    with loads.open("a") as log:
        log.write(f"{os.getpid()}\\n")
    return own(self, root)

def clientapp(**options):
    federation = superexec.load(source, folder)
    (folder / options["token"]).write_text(f"{os.getpid()} {len(federation.clients)}")
    from flwr.supercore.exit import ExitCode, flwr_exit
    flwr_exit(ExitCode.SUCCESS)

Synthetic.load = load
runtime.run_clientapp = clientapp
add_exit_handler(lambda: (folder / "closed").touch())
superexec._start_by_fork()
executor = SubprocessExecutor()
for token in ("first", "second", "third"):
    none = (True, None, False, None, False, 1)
    executor.launch(ExecutionSpec(TaskType.CLIENT_APP, "127.0.0.1:1", token, *none))
    while not (folder / token).exists() or not (folder / token).read_text():
        time.sleep(0.02)
    time.sleep(0.1)
    executor.reconcile()
print(os.getpid())
"""


def test_messages_are_copies_of_a_process_that_holds_the_data(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    waiting = done.stdout.strip().splitlines()[-1]
    answers = [(tmp_path / token).read_text().split() for token in ("first", "second", "third")]
    assert [clients for _, clients in answers] == ["2", "2", "2"]
    assert len({waiting, *(pid for pid, _ in answers)}) == 4
    # The first message finds nothing; what it loads, the waiting process loads for all others.
    assert (tmp_path / "loads").read_text().split() == [answers[0][0], waiting]
    assert not (tmp_path / "closed").exists()


def test_the_program_is_flowers_own_with_the_same_options(tmp_path):
    write_program(tmp_path, sys.executable)
    done = subprocess.run(
        [tmp_path / PROGRAM, "--help"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert "--runtime-api-address" in done.stdout
    assert os.access(tmp_path / PROGRAM, os.X_OK)
