"""Throughput of training DeepLab-V3+ through the engine, beside the bare model in a plain loop.

    python benchmarks/segmentation.py --amp --channels-last --out results/segmentation-speed.json

All train the same model on images of the same size in the same batches on the same device, in
turns, so that a busy machine disturbs them alike. The plain loop takes one batch again and again:
it fetches nothing, and so is the most that any loop can reach. On CUDA it takes part twice: as one
writes it, and with its step captured in a CUDA graph; so does the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedproto import FedAvg, FedProto
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import TensorSamples
from fedproto.data.tasks import task_named
from fedproto.engines.augment import AugmentOptions
from fedproto.engines.base import EngineOptions, LocalJob, Workload
from fedproto.engines.captured import CapturedEngine
from fedproto.engines.reference import ReferenceEngine, read_state
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.models.deeplab import DeepLabOptions
from fedproto.rng import Indices
from fedproto.rng.schedule import BatchOrder
from fedproto.store.run import describe_environment
from fedproto.strategies import Strategy
from fedproto.strategies.sections import Method
from fedproto.types import ServerState

CLASSES = 21
LR = 1e-4


def main() -> None:
    """Measures and writes what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40, help="steps of a job")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    given = parser.parse_args()

    options = EngineOptions(
        device=given.device,
        amp=given.amp,
        channels_last=given.channels_last,
        tf32=given.tf32,
        tune=given.tune,
    )
    federation = random_federation(given.batch * given.steps, given.size)
    model = build_model(DeepLabOptions(), federation.input_shape, CLASSES, seed=0)
    workload = Workload(federation, model, task_named("segmentation"), options)
    cuda = options.torch_device().type == "cuda"
    engines = {"reference": ReferenceEngine(workload)}
    engines |= {"captured": CapturedEngine(workload)} if cuda else {}
    state = ServerState(0, *read_state(model)).to(options.torch_device())
    vary = AugmentOptions(flip=True, scale=(0.5, 2.0))

    def through(
        engine: ReferenceEngine, strategy: Strategy, augment: AugmentOptions | None
    ) -> Callable[[], None]:
        job = LocalJob(
            client=0,
            state=state,
            method=Method(strategy),
            batches=BatchOrder(0, 0, 0, given.batch * given.steps, given.batch, 1),
            train=TrainOptions(epochs=1, batch_size=given.batch, optimizer="adam", lr=LR),
            augment=augment,
            lr=LR,
            seed=0,
        )

        def train() -> None:
            engine.train([job])

        return train

    best = "plain loop, captured" if cuda else "plain loop"
    captures = {"plain loop": False, best: cuda}
    contenders = {
        name: plain_loop(federation, options, given.batch, given.steps, capture=capture)
        for name, capture in captures.items()
    }
    for name, engine in engines.items():
        contenders |= {
            f"{name} engine": through(engine, FedAvg(), None),
            f"{name} engine, augmented": through(engine, FedAvg(), vary),
            f"{name} engine, augmented, FedProto": through(engine, FedProto(), vary),
        }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(given.repeats + 1):
        for name, work in contenders.items():
            _wait(options)
            started = time.perf_counter()
            work()
            _wait(options)
            taken = time.perf_counter() - started
            if repeat:
                seconds[name].append(taken)
            else:  # the first one warms up
                print(f"{name}: {taken:.1f} s at first", flush=True)
    images = given.batch * given.steps
    rates = {name: images / statistics.median(times) for name, times in seconds.items()}
    figures = {
        "arguments": {name: str(value) for name, value in vars(given).items()},
        "environment": describe_environment(),
        "seconds": seconds,
        "images per second": rates,
        f"share of the {best}": {name: rate / rates[best] for name, rate in rates.items()},
    }
    for name, rate in rates.items():
        print(f"{name:40} {rate:9.1f} images/s  {rate / rates[best]:6.1%}", flush=True)
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(figures, indent=2) + "\n")


def random_federation(images: int, size: int) -> Federation:
    """One client with random images and label maps."""
    generator = torch.Generator().manual_seed(0)
    indices: Indices = torch.arange(images).numpy()
    return Federation(
        name="random",
        samples=TensorSamples(
            torch.randn(images, 3, size, size, generator=generator),
            torch.randint(0, CLASSES, (images, size, size), generator=generator),
        ),
        clients=(Client(indices, indices[:0]),),
        num_classes=CLASSES,
        input_shape=(3, size, size),
        task="segmentation",
    )


def plain_loop(
    federation: Federation, options: EngineOptions, batch: int, steps: int, *, capture: bool = False
) -> Callable[[], None]:
    """What one would write without this project, with its step in a CUDA graph if asked for."""
    device = options.torch_device()
    model = build_model(DeepLabOptions(), federation.input_shape, CLASSES, seed=0).to(device)
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    inputs, targets = federation.samples.to(device, torch.float32).batch(
        federation.clients[0].train[:batch]
    )
    optimizer = torch.optim.Adam(
        model.parameters(), lr=LR, fused=device.type == "cuda", capturable=capture
    )
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        with options.autocast(device):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()

    if capture:
        with options.computing():
            aside = torch.cuda.Stream()
            with torch.cuda.stream(aside):
                for _ in range(3):
                    step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()

    def train() -> None:
        with options.computing():
            for _ in range(steps):
                graph.replay() if capture else step()

    return train


def _wait(options: EngineOptions) -> None:
    if options.torch_device().type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
