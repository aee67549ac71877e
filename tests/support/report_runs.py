"""Run directories with made-up rounds and analyses, for the tests of the report page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedproto import FedAvg, FedProto, Strategy
from fedproto.config import RunConfig
from fedproto.data.synthetic import Synthetic
from fedproto.store import RunStore
from fedproto.types import RoundRecord
from helpers import config_of

# Ends a script, opens a tag, closes a quote: whatever a label holds is shown as text.
NASTY = "</script><img src=x onerror=alert(1)> \"quoted\" 'so' & {{data}}"


def make_record(
    round_: int, *, clients: int = 12, cohort: int = 5, level: float = 0.8
) -> RoundRecord:
    rng = np.random.RandomState(round_)
    chosen = sorted(rng.choice(clients, cohort, replace=False).tolist())
    weights = rng.dirichlet(np.full(cohort, 5.0)).tolist()
    score = level * (1 - 0.8 ** (round_ + 1)) + rng.normal(0, 0.01)
    return RoundRecord(
        round=round_,
        cohort=chosen,
        stragglers=[],
        dropped=[],
        epochs=dict.fromkeys(chosen, 2),
        attention=dict(zip(chosen, weights, strict=True)),
        metrics={"accuracy": score, "loss": 2 * (1 - score), "train_loss": 1.5 * (1 - score)},
        bytes_down=1000,
        bytes_up=1000,
        seconds=0.25,
    )


def write_run(
    path: Path,
    *,
    rounds: int = 30,
    planned: int | None = None,
    strategy: Strategy | None = None,
    label: str = "",
    seed: int = 0,
    clients: int = 12,
    cohort: int = 5,
    level: float = 0.8,
    delta: float | None = None,
) -> RunConfig:
    config = config_of(strategy or FedAvg(), rounds=planned or rounds, cohort=cohort, seed=seed)
    config = replace(config, label=label, data=Synthetic(clients=clients))
    if delta is not None:
        config = replace(config, schedule=replace(config.schedule, delta=delta))
    RunStore.create(path, config)
    records = [
        make_record(round_, clients=clients, cohort=cohort, level=level) for round_ in range(rounds)
    ]
    append_records(path, records)
    return config


def append_records(path: Path, records: Sequence[RoundRecord]) -> None:
    store = RunStore.open(path)
    for record in records:
        store.append(record)


def write_analysis(path: Path, *, clients: int = 12, level: float = 0.8) -> None:
    rng = np.random.RandomState(clients)
    folder = path / "analysis"
    (folder / "maps").mkdir(parents=True)
    names, colors = ["cat", "dog", "bird"], ["#400080", "#400000", "#808000"]

    def save(name: str, content: object) -> None:
        (folder / name).write_text(json.dumps(content))

    scores = np.clip(rng.normal(level, 0.15, clients), 0, 1).tolist()
    tables = {
        "client": {str(client): score for client, score in enumerate(scores)},
        "class": dict(zip(names, (level, 0.5, 0.9), strict=True)),
    }
    save("measures.json", {"round": 30, "reference": None, "tables": tables})
    labels = rng.randint(0, 3, 150)
    centers = np.array([(0, 0), (20, 5), (8, 18)])
    places = np.concatenate([centers[labels] + rng.normal(0, 3, (150, 2)), centers])
    save(
        "embedding.json",
        {
            "round": 30,
            "method": "tsne",
            "x": places[:, 0].tolist(),
            "y": places[:, 1].tolist(),
            "class": [*labels.tolist(), 0, 1, 2],
            "prototypes": 3,
            "classes": names,
            "colors": colors,
        },
    )
    from PIL import Image

    for name in ("000009-truth", "000009-picture", "000009-prediction"):
        pixels = rng.randint(0, 255, (24, 32, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "maps" / f"{name}.png")


def write_sweep(folder: Path) -> None:
    """Two seeds of one strategy and one run of another, with an analysis of all but the last."""
    for seed in (0, 1):
        path = folder / f"avg-{seed}"
        write_run(path, label="Averaging", seed=seed, level=0.7)
        write_analysis(path, level=0.7)
    write_run(folder / "proto", strategy=FedProto(), label=NASTY, level=0.85)
    write_analysis(folder / "proto", level=0.85)
