"""What a real federation costs beyond training: seconds and bytes per round.

    python benchmarks/flower.py --clients 10 --rounds 4

Runs FedProto with the paper's CNN on the handwritten digits, once in process and once over a TLS
deployment on this machine, and prints a table in Markdown. The first round of a deployment also
asks every client who it is and is left out of the mean.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import mean

import torch

from fedproto.config import RunConfig, read_config
from fedproto.flower.deploy import deployment
from fedproto.flower.keys import make_keys
from fedproto.flower.wire import encode_job, encode_update
from fedproto.rounds import Watcher
from fedproto.rounds.planning import plan_round
from fedproto.rounds.runs import Run
from fedproto.simulate import load_federations, simulate
from fedproto.store import RunStore


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    config = _config(options.clients, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        local = RunStore.create(folder / "simulated", config)
        simulate([local])
        remote = RunStore.create(folder / "deployed", config)
        keys = make_keys(folder / "keys", ["localhost"], options.clients)
        started = time.perf_counter()
        with deployment(folder / "flower", keys, options.clients) as deployed:
            up = time.perf_counter() - started
            run = deployed.control.submit(remote.path)
            deployed.control.follow(run, remote.path, [remote], Watcher())
        same = _last(local) == _last(remote)
        seconds = {name: [r.seconds for r in store.records()] for name, store in
                   (("simulator", local), ("deployment", remote))}  # fmt: skip
        sizes = _sizes(config, local)
    print(f"{options.clients} clients of the CNN, {options.rounds} rounds, all in every cohort\n")
    print("| | s/round | first round s | start-up s |")
    print("|---|---|---|---|")
    print(f"| simulator | {mean(seconds['simulator'][1:]):.2f} |"
          f" {seconds['simulator'][0]:.2f} | – |")  # fmt: skip
    print(f"| deployment, TLS | {mean(seconds['deployment'][1:]):.1f} |"
          f" {seconds['deployment'][0]:.1f} | {up:.1f} |\n")  # fmt: skip
    print("| bytes per client and round | |")
    print("|---|---|")
    for what, number in sizes.items():
        print(f"| {what} | {number} |")
    print(f"\nfinal checkpoints are {'bit-identical' if same else 'DIFFERENT'}")


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
    from fedproto.engines.base import Workload
    from fedproto.engines.reference import ReferenceEngine
    from fedproto.models.base import build_model
    from fedproto.tasks import task_named

    (federation,) = load_federations([config]).values()
    assert config.model is not None
    model = build_model(config.model, federation.input_shape, federation.num_classes, 0)
    state = store.load_checkpoint()
    assert state is not None
    job = plan_round(Run(config, state), federation).jobs[0]
    workload = Workload(federation, model, task_named(federation.task), config.engine)
    (update,) = ReferenceEngine(workload).train([job])
    down = _bytes(encode_job(job, config))
    up = _bytes(encode_update(update, state.round))
    total = sum(up.values())
    extra = up["prototypes"] + up["margins"]
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
