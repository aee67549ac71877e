"""Requests to end leave neither keys nor processes behind, however many come."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Everything as it is, but for Flower's own processes: starting them takes long, and so does ending.
SCRIPT = """
import contextlib, sys, time
from types import SimpleNamespace
import fedproto.flower.deploy
from fedproto.cli import main

@contextlib.contextmanager
def deployment(folder, keys, clients, state):
    def submit(path):
        print(folder, flush=True)
        time.sleep(60)
    try:
        yield SimpleNamespace(control=SimpleNamespace(submit=submit), link=None)
    finally:
        time.sleep(1.5)

fedproto.flower.deploy.deployment = deployment
settings = ["--set=data.clients=2", "--set=schedule.cohort=2", f"--out={sys.argv[1]}"]
sys.exit(main(["flower", "up", "quickstart", *settings]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_second_request_to_end_leaves_no_keys_behind(tmp_path, number):
    pytest.importorskip("flwr")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        # Those of tests may be started with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    folder = Path(process.stdout.readline().strip())
    assert (folder / "keys" / "server" / "server.key").exists()
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.3)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "rounds are safe" in errors
    assert not folder.exists()
