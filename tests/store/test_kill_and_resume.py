"""Runs killed at every moment of their writing go on to the same records and weights."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from safetensors import safe_open

from fedproto.cli import main

SETTINGS = [
    "--set=data.name=digits",
    "--set=data.clients=12",
    "--set=model.hidden=8",
    "--set=model.features=8",
    "--set=schedule.rounds=3",
    "--set=schedule.cohort=3",
    "--set=train.batch_size=50",
]

# Runs the command line in children of one process for all recipes, so that all is imported once.
# A child kills itself with SIGKILL just before its n-th write reaches the disk, the file whole or
# torn; folders, which are written too, cannot be torn.
KILLER = """
import json, os, signal, sys
from pathlib import Path
import sklearn.datasets, torch, torch._dynamo
from fedproto.cli import main, running
from fedproto.config.recipe import read_recipe

torch.set_num_threads(1)
read_recipe("quickstart")
top = Path(sys.argv[1])

def child(work):
    pid = os.fork()
    if pid == 0:
        os._exit(work())
    return os.waitpid(pid, 0)[1]

def start(command, kill_at=None, torn=False):
    def work():
        calls = [0]
        fsync = os.fsync
        def counting(descriptor):
            is_file = os.path.isfile(f"/proc/self/fd/{descriptor}")
            calls[0] += is_file or not torn
            if calls[0] == kill_at:
                size = os.fstat(descriptor).st_size
                if torn and size:
                    os.ftruncate(descriptor, size - min(size, 40))
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(descriptor)
        os.fsync = counting
        return main(command)
    return child(work)

for recipe, settings in json.loads(sys.argv[2]).items():
    common = ["run", "quickstart", "-q", "--reuse", *settings, "--out"]
    # Here, so that no child does first what is done once a process.
    assert main([*common, str(top / recipe / "whole")]) == 0
    moments = 0
    for torn in (False, True):
        for kill_at in range(1, 100):
            command = [*common, str(top / recipe / f"killed-{kill_at}-{torn}")]
            status = start(command, kill_at, torn)
            if status == 0:
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            moments += 1
            assert start(command) == 0, command
    (top / recipe / "moments").write_text(str(moments))
"""


def records(path: Path) -> list[dict]:
    lines = (path / "rounds.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in ("seconds", "hash")}
        for line in lines
    ]


def kept_by_clients(path: Path) -> dict[str, bytes]:
    """What every client kept last."""
    folders = sorted((path / "clients").glob("*"))
    return {one.name: sorted(one.glob("*.safetensors"))[-1].read_bytes() for one in folders}


def final_weights(path: Path) -> bytes:
    return sorted((path / "checkpoints").glob("*.safetensors"))[-1].read_bytes()


def best_model(path: Path) -> bytes | None:
    file = path / "checkpoints" / "best.safetensors"
    return file.read_bytes() if file.exists() else None


def groups(files: Iterable[Path]) -> set[str]:
    """The groups of tensors in some files, such as ``served-model/params``."""
    found: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            found |= {name.rpartition("/")[0] for name in file.keys()}  # noqa: SIM118
    return found


WITH_MEMORY = [
    "--set=strategy.name=scaffold",
    "--set=server.optimizer=adam",
    "--set=server.lr=0.1",
    "--set=schedule.cohort=2",
]


BEST = ["--set=store.best=true", "--set=data.validation=0.2", "--set=store.checkpoint_every=2"]
SERVED_AVERAGE = ["--set=strategy.name=fedavg", "--set=serve.average=ema"]
PERSONAL_HEAD, PERSONAL_MODEL = (
    [f"--set=strategy.name={name}", "--set=schedule.cohort=2"] for name in ("fedper", "ditto")
)


RECIPES = {
    "fedproto": [],
    "with memory": WITH_MEMORY,
    "best average": [*SERVED_AVERAGE, *BEST],
    "personal head": PERSONAL_HEAD,
    "personal model": PERSONAL_MODEL,
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Every recipe once as a whole, and once for each of its writes, killed there and resumed."""
    folder = tmp_path_factory.mktemp("killed")
    script = folder / "killer.py"
    script.write_text(KILLER)
    for name in RECIPES:
        (folder / name).mkdir()
    settings = {name: [*SETTINGS, *more] for name, more in RECIPES.items()}
    command = [sys.executable, str(script), str(folder), json.dumps(settings)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_every_write(killed, recipe):
    # A round writes a record and a checkpoint with its folder, beside what is written at the start.
    assert int((killed / recipe / "moments").read_text()) >= 24
    whole = killed / recipe / "whole"
    runs = [path for path in (killed / recipe).iterdir() if path.name.startswith("killed")]
    assert len(runs) >= 24
    for path in runs:
        assert records(path) == records(whole), path.name
        assert final_weights(path) == final_weights(whole), path.name
        assert kept_by_clients(path) == kept_by_clients(whole), path.name
        assert best_model(path) == best_model(whole), path.name
        assert not list(path.rglob("*.partial")), path.name
    assert (best_model(whole) is not None) == (recipe == "best average")


KILLS = int(os.environ.get("FEDPROTO_KILLS", "6"))
"""Kills at random instants; ``make kills`` asks for two hundred."""

EVERYTHING = """
extends = "quickstart"
[data]
name = "digits"
clients = 12
validation = 0.2
[model]
hidden = 8
features = 8
[schedule]
rounds = 4
cohort = 4
delta = 0.5
[train]
lr = 0.1
[store]
best = true
[evaluate]
validation = true

[[variants]]
label = "personal head, served averages"
strategy = { name = "fedper" }
serve = { average = "ema", also = ["average=window"] }

[[variants]]
label = "personal model, look-ahead, few checkpoints"
strategy = { name = "ditto" }
server = { lookahead = 0.85 }
store = { best = true, checkpoint_every = 2, keep = 1 }

[[variants]]
label = "computed heads, adam, private statistics"
strategy = { name = "fedavg" }
server = { optimizer = "adam", lr = 0.1 }
serve = { head = "lda", also = ["head=ridge", "average=ema"] }
privacy = { min_samples = 2 }

[[variants]]
label = "memory of clients, the default defence"
strategy = { name = "scaffold" }
aggregate = { clip_norm = "median", clip_times = 3.0, max_share = 1.5, max_claim = 2.0 }
"""

# Children of one process, killed by it at an instant drawn anew for every start.
RANDOM_KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import sklearn.datasets, torch, torch._dynamo
from fedproto.cli import main
from fedproto.config.recipe import read_recipe

torch.set_num_threads(1)
read_recipe("quickstart")
folder, wanted, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
recipe = ["sweep", str(folder / "everything.toml"), "-q", "--reuse"]

def start(name, kill_after=None):
    pid = os.fork()
    if pid == 0:
        os._exit(main([*recipe, f"--out={folder / name}"]))
    ends = None if kill_after is None else time.monotonic() + kill_after
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if ends is not None and time.monotonic() > ends:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        time.sleep(0.0005)

began = time.monotonic()
assert start("whole") == 0
takes, kills, chain = time.monotonic() - began, 0, 0
while kills < wanted:
    while (status := start(f"killed-{chain}", draw.uniform(0, takes))) != 0:
        assert status == signal.SIGKILL, status
        kills += 1
    chain += 1
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(24 * 3600)
def test_killed_at_random_instants_with_everything_switched_on(tmp_path):
    (tmp_path / "everything.toml").write_text(EVERYTHING)
    script = tmp_path / "killer.py"
    script.write_text(RANDOM_KILLER)
    seed = 1 if "FEDPROTO_KILLS" not in os.environ else time.time_ns()
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(KILLS), str(seed)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) >= KILLS
    whole = tmp_path / "whole"
    runs = [path.parent.name for path in whole.glob("*/run.json")]
    assert len(runs) == 4
    # Everything is switched on: it is in the files that are compared.
    checkpoints = (sorted((whole / run / "checkpoints").glob("round-*"))[-1] for run in runs)
    assert groups(checkpoints) >= {
        *("params", "served-model/params", "also-model/average=window/params"),
        *("also-model/head=ridge/params", "also-model/average=ema/params"),
        *("server/lookahead", "server/momentum", "server/square", "control", "serve/average"),
    }
    assert groups(whole.glob("*/clients/*/*")) == {"personal", "control"}
    assert all(best_model(whole / run) is not None for run in runs)
    chains = list(tmp_path.glob("killed-*"))
    for killed, run in ((chain, run) for chain in chains for run in runs):
        found, wanted, where = killed / run, whole / run, f"{killed.name}/{run}, seed {seed}"
        assert records(found) == records(wanted), where
        assert final_weights(found) == final_weights(wanted), where
        assert kept_by_clients(found) == kept_by_clients(wanted), where
        assert best_model(found) == best_model(wanted), where
        assert not list(found.rglob("*.partial")), where
    print(f"{done.stdout.split()[-1]} kills in {len(chains)} chains of {len(runs)} runs")  # noqa: T201


def fedproto(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from fedproto.cli import main; sys.exit(main())",
            *arguments,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        # In the background of a script, and after some programs, interrupts are ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


LONG = [
    "sweep", "quickstart", "--set=schedule.rounds=4", "--set=train.epochs=1",
    "--set=sweep.seed=[0, 1]", "--quiet",
]  # fmt: skip


def wait_for_rounds(process: subprocess.Popen[str], folder: Path, number: int) -> None:
    """Until so many rounds are on record in all."""
    while sum(path.read_bytes().count(b"\n") for path in folder.rglob("rounds.jsonl")) < number:
        assert process.poll() is None
        time.sleep(0.01)


def test_a_sweep_killed_in_the_middle_of_training_goes_on(tmp_path):
    assert main([*LONG, f"--out={tmp_path / 'whole'}"]) == 0

    process = fedproto(*LONG, f"--out={tmp_path / 'killed'}")
    wait_for_rounds(process, tmp_path / "killed", 3)  # the second run is one round behind the first
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)

    assert main(["resume", str(tmp_path / "killed"), "--quiet"]) == 0
    for run in ("fedproto-seed0", "fedproto-seed1"):
        assert records(tmp_path / "killed" / run) == records(tmp_path / "whole" / run)
        assert final_weights(tmp_path / "killed" / run) == final_weights(tmp_path / "whole" / run)


def test_an_interrupt_ends_cleanly_and_says_how_to_resume(tmp_path):
    process = fedproto(*LONG, "--set=schedule.rounds=9000", f"--out={tmp_path / 'run'}")
    wait_for_rounds(process, tmp_path / "run", 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedproto resume {tmp_path / 'run'}" in errors
    assert "Traceback" not in errors
