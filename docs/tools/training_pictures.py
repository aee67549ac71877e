"""Draws what happens to prototypes in local training, and the attention that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedproto import Federation, FedProto
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.digits import Digits
from fedproto.data.tasks import Classification
from fedproto.engines.base import EngineOptions, Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.setting import load_state, read_state, setting_of
from fedproto.engines.training import TrainOptions
from fedproto.equations import (
    class_prototypes,
    local_margin,
    minmax_normalize,
    other_class_distance,
    same_class_distance,
)
from fedproto.models.base import build_model, features_of
from fedproto.models.small import CNNOptions
from fedproto.report.style import COLORS
from fedproto.rng import Indices
from fedproto.rounds import Run, run_rounds
from fedproto.rounds.jobs import plan_round
from fedproto.types import ClientUpdate, Prototypes, RoundRecord, ServerState

BLUE, VERMILION, ORANGE, SKY = (COLORS[place] for place in (0, 1, 4, 5))
MARKERS = "osD"
TRAIN = TrainOptions(epochs=2, lr=0.05)
SCHEDULE = ScheduleOptions(rounds=60, cohort=10, delta=0.5)


@dataclass
class Trained:
    """A federation with a strategy trained on it, ready for one more look."""

    federation: Federation
    engine: ReferenceEngine
    run: Run


def train(data: Digits) -> Trained:
    """A short run of FedProto, in process."""
    federation = data.load(Path())
    model = build_model(CNNOptions(), federation.input_shape, federation.num_classes, seed=0)
    params, buffers = read_state(model)
    config = RunConfig(strategy=FedProto(), train=TRAIN, schedule=SCHEDULE)
    run = Run(config, federation, initial=ServerState(0, params, buffers))
    engine = ReferenceEngine(Workload(federation, model, Classification(), EngineOptions()))
    for _ in run_rounds([run], engine):
        pass
    return Trained(federation, engine, run)


def draw_prototypes(trained: Trained, path: Path) -> None:
    """A client's features and prototypes before and after local training, and its margins."""
    federation, run = trained.federation, trained.run
    client = _evenest(federation)
    indices = federation.train_indices(client)
    inputs, labels = federation.samples.batch(indices)
    model = build_model(CNNOptions(), federation.input_shape, federation.num_classes, seed=0)
    update = _train_one(trained, client)
    features = [
        _features(model, state, inputs)
        for state in (run.state, ServerState(0, update.params, update.buffers))
    ]
    before, after = (class_prototypes(e, labels, federation.num_classes) for e in features)
    center, axes_2d = _plane(torch.cat(features))
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    classes = [int(label) for label in before.seen.nonzero().flatten()]
    flat = [(e - center) @ axes_2d for e in features]
    spots = [(part.mean - center) @ axes_2d for part in (before, after)]
    for axes, points, title in zip(
        (left, middle), flat, ("received model", "after local training"), strict=True
    ):
        for place, label in enumerate(classes):
            own = points[labels == label]
            axes.scatter(
                own[:, 0],
                own[:, 1],
                s=12,
                color=COLORS[place],
                alpha=0.35,
                marker=MARKERS[place],
                lw=0,
            )
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel="1st principal axis of the features", ylabel="2nd")
    for place, label in enumerate(classes):
        color, marker = COLORS[place], MARKERS[place]
        style = {"s": 110, "marker": marker, "edgecolor": "black", "zorder": 3}
        left.scatter(*spots[0][label], color=color, label=f"prototype of {label}", **style)
        middle.scatter(*spots[0][label], color="none", **(style | {"edgecolor": color}))
        middle.scatter(*spots[1][label], color=color, **style)
        middle.annotate(
            "",
            xy=spots[1][label].tolist(),
            xytext=spots[0][label].tolist(),
            arrowprops={"arrowstyle": "->", "color": "black", "shrinkA": 5, "shrinkB": 6},
        )
    for axes in (left, middle):
        axes.set(xlim=_limits(flat, 0), ylim=_limits(flat, 1))
    left.legend(frameon=False, fontsize="small", loc="best")
    _draw_margins(right, before, after, classes)
    figure.savefig(path, dpi=150)


def _draw_margins(axes: Axes, before: Prototypes, after: Prototypes, classes: list[int]) -> None:
    old_cd, new_cd = minmax_normalize(before.mean), minmax_normalize(after.mean)
    same_c = same_class_distance(old_cd, new_cd, before.seen, after.seen)
    other_c = other_class_distance(old_cd, new_cd, before.seen, after.seen)
    margin_c = local_margin(before, after)
    places = np.arange(len(classes))
    axes.bar(places - 0.2, same_c[classes], 0.38, color=ORANGE, label="d⁺: how far it moved")
    axes.bar(
        places + 0.2,
        other_c[classes],
        0.38,
        color=SKY,
        hatch="//",
        edgecolor="white",
        label="d⁻: mean distance to the others",
    )
    for place, label in enumerate(classes):
        axes.text(
            place, float(other_c[label]) + 0.06, f"μ = {float(margin_c[label]):.2f}", ha="center"
        )
    axes.set_xticks(places, [f"class {label}" for label in classes])
    axes.set(ylim=(0, float(other_c.max()) * 1.45), ylabel="distance of normalised prototypes")
    axes.set_title("distances and local margins", fontsize="medium")
    axes.legend(frameon=False, fontsize="small", loc="upper center")


def draw_attention(trained: Trained, path: Path) -> None:
    """Weights of one cohort, and of all rounds, by size and by prototypes."""
    run = trained.run
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    record = run.records[-1]
    clients = sorted(record.attention)
    sizes = trained.federation.train_sizes
    by_size = sizes[clients] / sizes[clients].sum()
    places = np.arange(len(clients))
    left.bar(
        places - 0.2,
        by_size,
        0.38,
        color=VERMILION,
        hatch="//",
        edgecolor="white",
        label="share of the samples (FedAvg)",
    )
    left.bar(
        places + 0.2,
        [record.attention[client] for client in clients],
        0.38,
        color=BLUE,
        label="attention (FedProto)",
    )
    left.axhline(1 / len(clients), color="black", lw=1, ls="--", label="all alike")
    left.set_xticks(places, [str(client) for client in clients])
    left.set(xlabel="client of the cohort", ylabel="weight in the average")
    left.set_title(f"the cohort of round {record.round}", fontsize="medium")
    left.set_ylim(0, max(by_size) * 1.45)
    left.legend(frameon=False, fontsize="small", loc="upper center")
    rounds = np.array([record.round for record in run.records])
    for color, alpha, name, values in (
        (
            VERMILION,
            0.35,
            "shares of the samples (FedAvg)",
            [_size_shares(r, sizes) for r in run.records],
        ),
        (BLUE, 0.75, "attention (FedProto)", [list(r.attention.values()) for r in run.records]),
    ):
        low, high = (np.array([pick(one) for one in values]) for pick in (min, max))
        right.fill_between(rounds, low, high, color=color, alpha=alpha, lw=0, label=name)
    right.axhline(1 / SCHEDULE.cohort, color="black", lw=1, ls="--", label="all alike")
    right.set(xlabel="round", ylabel="smallest to largest weight", xlim=(0, rounds[-1]))
    right.set_ylim(0, right.get_ylim()[1] * 1.3)
    right.set_title("all rounds", fontsize="medium")
    right.legend(frameon=False, fontsize="small", loc="upper center")
    figure.savefig(path, dpi=150)


def _size_shares(record: RoundRecord, sizes: Indices) -> list[float]:
    own = sizes[sorted(record.attention)]
    return list(own / own.sum())


def _train_one(trained: Trained, client: int) -> ClientUpdate:
    """A client's update from the run's last state, with all its epochs."""
    run = trained.run
    longer = RunConfig(
        strategy=run.config.strategy,
        train=TRAIN,
        schedule=ScheduleOptions(
            rounds=SCHEDULE.rounds + 1, cohort=len(trained.federation.clients)
        ),
    )
    setting = setting_of(trained.engine.workload, run.state.params)
    again = Run(longer, trained.federation, initial=run.state)
    plan = plan_round(again, trained.federation, setting)
    (job,) = (job for job in plan.jobs if job.client == client)
    return trained.engine.train_client(job)


@torch.no_grad()
def _features(model: torch.nn.Module, state: ServerState, inputs: Tensor) -> Tensor:
    load_state(model, state)
    return features_of(model.eval())(inputs)


def _plane(points: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and first two principal axes."""
    center = points.mean(dim=0)
    return center, torch.linalg.svd(points - center, full_matrices=False).Vh[:2].T


def _limits(points: list[Tensor], axis: int) -> tuple[float, float]:
    values = torch.cat(points)[:, axis]
    pad = 0.08 * float(values.max() - values.min())
    return float(values.min()) - pad, float(values.max()) + pad


def held_labels(federation: Federation, client: int) -> Indices:
    """The classes of a client's training samples."""
    return federation.samples.batch(federation.train_indices(client))[1].numpy()


def _evenest(federation: Federation) -> int:
    """The client whose rarest class has the most samples: one that makes a clear picture."""
    counts = [np.bincount(held_labels(federation, k)) for k in range(len(federation.clients))]
    return int(np.argmax([min(count[count > 0]) for count in counts]))
