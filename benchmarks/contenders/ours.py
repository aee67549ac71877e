"""This package: its own round loop with one of its engines.

ours.py WORK OUT ENGINE [SEEDS]

An engine may lack a part, to measure what it is worth: `processes:spectra` computes convolutions
directly, `processes:backpropagation` leaves gradients to PyTorch.
"""

from __future__ import annotations

import sys

import numpy as np
from common import Work, quiet, serve
from torch import Tensor

from fedproto import FedAvg
from fedproto.config import RunConfig
from fedproto.config.options import EvaluateOptions, ScheduleOptions
from fedproto.data.federation import Client, Federation
from fedproto.data.samples import TensorSamples
from fedproto.engines import manual, processes
from fedproto.engines.base import EngineOptions
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.training import TrainOptions
from fedproto.models.base import build_model
from fedproto.models.small import CNNOptions, MLPOptions
from fedproto.rounds import Run, run_rounds
from fedproto.rounds.run import engine_of


def main() -> None:
    """Serves rounds."""
    path, out, name, *more = sys.argv[1:]
    number = int(more[0]) if more else 1
    name, _, without = name.partition(":")
    if without == "spectra":
        manual.WIDE_KERNEL = 10**9
    elif without:
        processes.ManualTrainer = ReferenceEngine  # type: ignore[assignment, misc]
    quiet()
    work = Work(path)
    nothing = np.empty(0, dtype=np.int64)
    federation = Federation(
        name="work",
        samples=TensorSamples(work.inputs, work.targets),
        clients=tuple(
            Client(np.arange(start, start + size, dtype=np.int64), nothing)
            for start, size in zip(work.starts, work.sizes, strict=True)
        ),
        num_classes=10,
        input_shape=tuple(work.inputs.shape[1:]),
    )
    options = CNNOptions() if work.inputs.dim() == 4 else MLPOptions()
    model = build_model(options, federation.input_shape, 10, seed=0)
    everlasting = 10**9
    config = RunConfig(
        strategy=FedAvg(),
        seed=work.seed,
        train=TrainOptions(epochs=work.epochs, batch_size=work.batch_size, lr=work.lr),
        schedule=ScheduleOptions(rounds=everlasting, cohort=work.cohorts.shape[1]),
        engine=EngineOptions(name=name, device="cpu"),
        evaluate=EvaluateOptions(every=everlasting),
    )
    runs = [Run(config, federation, work.model) for _ in range(number)]

    with engine_of([config], federation, model) as engine:
        rounds = run_rounds(runs, engine)

        def train_round(round_: int) -> dict[str, Tensor]:
            for _ in runs:
                _, record = next(rounds)
                if record.cohort != work.cohorts[round_].tolist():
                    raise RuntimeError(f"cohort {record.cohort} is not that of the work")
            return dict(runs[-1].state.params)

        serve(train_round, out)


if __name__ == "__main__":
    main()
