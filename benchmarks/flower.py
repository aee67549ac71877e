"""What a real federation costs beyond training: seconds and bytes per round.

    python benchmarks/flower.py --clients 10 --rounds 4 --out results/flower.json

Runs FedProto with the paper's CNN on the handwritten digits, once in process and over a TLS
deployment on this machine: `warm`, as it is, and `cold`, with every ClientApp started by Flower's
own SuperExec. Beside them an `empty` app, which imports nothing but Flower and sends nothing but a
number. Prints a table in Markdown. The first round of a deployment also asks every client who it
is and is left out of the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from fedproto.callback import Callback
from fedproto.config import RunConfig, read_config
from fedproto.flower import deploy
from fedproto.flower.deploy import deployment
from fedproto.flower.keys import Keys, make_keys
from fedproto.flower.wire import encode_job, encode_update
from fedproto.rounds import Run, load_federations, runs_from, train
from fedproto.rounds.jobs import plan_round
from fedproto.store import RunStore
from fedproto.store.run import describe_environment

WARM, COLD, EMPTY = "warm", "cold", "empty"

EMPTY_SERVER = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    wanted, out = context.run_config["wanted"], Path(context.run_config["out"])
    while len(nodes := list(grid.get_node_ids())) < wanted:
        time.sleep(0.5)
    seconds = []
    for number in range(context.run_config["rounds"]):
        started = time.perf_counter()
        content = RecordDict({"round": ConfigRecord({"number": number})})
        asked = [Message(content, node, "train", group_id=str(number)) for node in nodes]
        replies = list(grid.send_and_receive(asked, timeout=300))
        assert len(replies) == wanted and not any(reply.has_error() for reply in replies)
        seconds.append(time.perf_counter() - started)
    out.write_text(json.dumps(seconds))
"""

EMPTY_CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    return Message(message.content, reply_to=message)
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[WARM, EMPTY], choices=[WARM, COLD, EMPTY])
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    config = _config(options.clients, options.rounds)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local = RunStore.create(folder / "simulated", config)
        train(runs_from([local]))
        rows["simulator"] = {"rounds": [record.seconds for record in local.records()]}
        keys = make_keys(folder / "keys", ["localhost"], options.clients)
        for part in options.parts:
            if part == EMPTY:
                rows[part] = _empty(folder / part, keys, options.clients, options.rounds)
            else:
                store = RunStore.create(folder / f"{part}-run", config)
                rows[part] = _deployed(folder / part, keys, store, options.clients, part == WARM)
                rows[part]["same bits as the simulator"] = _last(local) == _last(store)
            print(part, rows[part], flush=True)
        sizes = _sizes(config, local)
    _print(options, rows, sizes)
    if options.out is not None:
        figures = {
            "date": time.strftime("%Y-%m-%d"),
            "environment": describe_environment(),
            "clients": options.clients,
            "seconds": rows,
            "bytes per client and round": sizes,
        }
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def _deployed(
    folder: Path, keys: Keys, store: RunStore, clients: int, warm: bool
) -> dict[str, Any]:
    """Seconds of a run's rounds over a deployment."""
    started = time.perf_counter()
    with (
        nullcontext() if warm else _as_flower_does(),
        deployment(folder, keys, clients) as deployed,
    ):
        up = time.perf_counter() - started
        run = deployed.control.submit(store.path)
        deployed.control.follow(run, store.path, [store], Callback())
    return {"rounds": [record.seconds for record in store.records()], "start-up": up}


def _empty(folder: Path, keys: Keys, clients: int, rounds: int) -> dict[str, Any]:
    """Seconds of the rounds of an app that does nothing, all by Flower's own programs."""
    app, out = folder / "nothing", folder / "seconds.json"
    package = app / "nothing"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server.py").write_text(EMPTY_SERVER)
    (package / "client.py").write_text(EMPTY_CLIENT)
    (app / "pyproject.toml").write_text(
        '[project]\nname = "nothing"\nversion = "1.0.0"\nlicense = "Apache-2.0"\n'
        'dependencies = []\n[tool.flwr.app]\npublisher = "nobody"\n'
        '[tool.flwr.app.components]\nserverapp = "nothing.server:app"\n'
        'clientapp = "nothing.client:app"\n[tool.flwr.app.config]\n'
        f"wanted = {clients}\nrounds = {rounds}\nout = {json.dumps(str(out.resolve()))}\n"
    )
    started = time.perf_counter()
    with _as_flower_does(), deployment(folder, keys, clients) as deployed:
        up = time.perf_counter() - started
        deployed.control._flwr("run", str(app), "fedproto")
        while not out.exists():
            time.sleep(0.5)
        return {"rounds": json.loads(out.read_text()), "start-up": up}


@contextmanager
def _as_flower_does() -> Iterator[None]:
    """Nodes are Flower's own program, which starts Flower's own SuperExec."""
    ours = deploy.node_command
    flowers = str(Path(sys.executable).parent / "flower-supernode")
    deploy.node_command = lambda *given: [flowers, *ours(*given)[5:]]
    try:
        yield
    finally:
        deploy.node_command = ours


def _print(
    options: argparse.Namespace, rows: dict[str, dict[str, Any]], sizes: dict[str, str]
) -> None:
    print(f"{options.clients} clients of the CNN, {options.rounds} rounds, all in every cohort\n")
    print("| | s/round | first round s | start-up s | the same bits |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        first, *others = row["rounds"]
        same = row.get("same bits as the simulator", "–")
        print(
            f"| {name} | {mean(others):.2f} | {first:.1f} | {row.get('start-up', 0):.1f} | {same} |"
        )
    print("\n| bytes per client and round | |")
    print("|---|---|")
    for what, number in sizes.items():
        print(f"| {what} | {number} |")


def _config(clients: int, rounds: int) -> RunConfig:
    return read_config(
        {
            "data": {"name": "digits", "clients": clients},
            "model": {"name": "cnn"},
            "strategy": {"name": "fedproto"},
            "train": {"epochs": 1, "batch_size": 10},
            "schedule": {"rounds": rounds, "cohort": clients},
            "engine": {"name": "reference", "device": "cpu"},
            "flower": {"evaluate_on": "server"},
        }
    )


def _last(store: RunStore) -> bytes:
    return sorted((store.path / "checkpoints").iterdir())[-1].read_bytes()


def _sizes(config: RunConfig, store: RunStore) -> dict[str, str]:
    """Sizes of the messages themselves, headers included, before TLS."""
    from fedproto.data.tasks import task_named
    from fedproto.engines.base import Workload
    from fedproto.engines.reference import ReferenceEngine
    from fedproto.engines.setting import setting_of
    from fedproto.models.base import build_model

    (federation,) = load_federations([config]).values()
    assert config.model is not None
    model = build_model(config.model, federation.input_shape, federation.num_classes, 0)
    state = store.load_checkpoint()
    assert state is not None
    setting = setting_of(config.workload(federation, model), state.params)
    job = plan_round(Run(config, federation, initial=state), federation, setting).jobs[0]
    workload = Workload(federation, model, task_named(federation.task), config.engine)
    (update,) = ReferenceEngine(workload).train([job])
    down = _bytes(encode_job(job, config))
    up = _bytes(encode_update(update))
    total = sum(up.values())
    extra = up["payload"]
    return {
        "down": f"{sum(down.values()):,}",
        "up": f"{total:,}",
        "of these prototypes, counts and margins": f"{extra:,} ({extra / total:.2%})",
        "of these round information": f"{up['update']:,}",
    }


def _bytes(content: object) -> dict[str, int]:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return {
        name: sum(len(part.deflate()) for part in get_all_nested_objects(record).values())
        for name, record in content.items()  # type: ignore[attr-defined]
    }


if __name__ == "__main__":
    main()
