"""Draws the pictures of README and of the explanations, from real federations and published tables.

python docs/tools/pictures.py docs/images

Handwritten digits stand in for all images, so that nothing has to be downloaded. The same code and
seed give the same pictures on the same machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from training_pictures import draw_attention, draw_prototypes, held_labels, train

from fedproto.data.digits import Digits
from fedproto.data.synthetic import Synthetic
from fedproto.report.style import COLORS
from fedproto.rng import schedule

BLUE, ORANGE = COLORS[0], COLORS[4]
CURVES = Path(__file__).resolve().parents[2] / "results/serve/serve-rounds.csv"
UPWARDS = {
    "Steady": (3, 19),
    "Steady, newest model": (0, 6),
    "FedACG": (0, -7),
    "FedAvg": (-6, -14),
}
"""Points by which labels are moved, where curves end together."""


def draw_evidence(path: Path) -> None:
    """Published accuracies over rounds, labelled at the curves."""
    table = pd.read_csv(CURVES)
    styles = {
        "Steady": ("Steady", "#d55e00", "-"),
        "Steady, newest model": ("its newest model", "#d55e00", ":"),
        "FedACG": ("FedACG", COLORS[0], "--"),
        "FedAvg": ("FedAvg", "#777777", "-."),
    }
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    shown = {"CIFAR-10, α 0.1": (40, 70), "FEMNIST": (80, 97)}
    for place, (axes, (data_set, limits)) in enumerate(zip(panels, shown.items(), strict=True)):
        of_data = table[table["data_set"] == data_set]
        for method, (label, color, line) in styles.items():
            curve = of_data[of_data["method"] == method]
            axes.plot(curve["round"], curve["mean"], color=color, linestyle=line, linewidth=2)
            end = (curve["round"].iloc[-1], curve["mean"].iloc[-1])
            shift = (5, UPWARDS[method][place])
            axes.annotate(label, end, shift, textcoords="offset points", color=color, va="center")
        axes.set_title(f"{data_set}, {of_data['runs'].max()} seeds", fontsize="medium")
        axes.set(xlabel="round", xlim=(0, 270), xticks=range(0, 201, 50), ylim=limits)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="test accuracy in %")
    figure.savefig(path, dpi=120)


def draw_partition(path: Path) -> None:
    """Heavy-tailed sizes; classes by neighbourhood and by Dirichlet."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    sizes, *panels = figure.subplots(1, 4, width_ratios=(1.25, 1, 1, 1))
    shares = {
        "2 classes in a row": Digits(clients=20),
        "Dirichlet, α = 0.05": Digits(clients=20, partition="dirichlet", alpha=0.05),
        "Dirichlet, α = 1": Digits(clients=20, partition="dirichlet", alpha=1),
    }
    samples = np.sort(Synthetic().load(Path()).train_sizes)[::-1]
    place = np.arange(1, len(samples) + 1)
    sizes.bar(place, samples, color=BLUE)
    sizes.set(yscale="log", xlabel="client, largest first", ylabel="training samples (log scale)")
    sizes.set_title("synthetic: sizes of 30 clients", fontsize="medium")
    for axes, (title, data) in zip(panels, shares.items(), strict=True):
        federation = data.load(Path())
        counts_kc = np.array(
            [
                np.bincount(held_labels(federation, client), minlength=federation.num_classes)
                for client in range(data.clients)
            ]
        )
        image = axes.imshow(
            np.log10(1 + counts_kc.T),
            cmap="cividis",
            aspect="auto",
            vmin=0,
            vmax=2.2,
            origin="lower",
        )
        axes.set(xlabel="client", yticks=range(10), xticks=(0, 5, 10, 15))
        axes.set_title(f"digits: {title}", fontsize="medium")
    panels[0].set_ylabel("class")
    bar = figure.colorbar(image, ax=panels, fraction=0.04)
    ticks = (0, 3, 10, 30, 100)
    bar.set_ticks([float(np.log10(1 + tick)) for tick in ticks], labels=[str(t) for t in ticks])
    bar.set_label("training samples")
    figure.savefig(path, dpi=150)


def draw_stragglers(path: Path) -> None:
    """Local epochs that each client of a cohort finishes, round by round."""
    federation, epochs, rounds = Digits().load(Path()), 20, 6
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    panels = figure.subplots(1, rounds, sharey=True)
    for round_, axes in enumerate(panels):
        clients = schedule.cohort(0, round_, federation.train_sizes, 10, "size")
        slow = schedule.stragglers(0, round_, clients, 0.5)
        done = [
            schedule.partial_epochs(0, round_, client, epochs) if client in slow else epochs
            for client in clients
        ]
        axes.barh(
            range(len(clients)),
            done,
            color=[ORANGE if client in slow else BLUE for client in clients],
            hatch=["///" if client in slow else "" for client in clients],
            edgecolor="white",
            linewidth=0,
        )
        axes.set_yticks([])
        for place, client in enumerate(clients):
            axes.text(-1.2, place, str(client), ha="right", va="center", fontsize="small")
        axes.set(xlim=(0, epochs), xticks=(0, 10, 20))
        axes.set_title(f"round {round_}", fontsize="medium")
    panels[0].set_ylabel("client of the cohort", labelpad=22)
    figure.supxlabel("local epochs done (F = 20)", fontsize="medium")
    figure.legend(
        handles=[
            Patch(color=BLUE, label="finishes all epochs"),
            Patch(
                facecolor=ORANGE,
                hatch="///",
                edgecolor="white",
                label="straggler: dropped, or tolerated with what it did",
            ),
        ],
        loc="outside upper center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    """Draws all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    draw_evidence(folder / "evidence.png")
    draw_partition(folder / "partition.png")
    draw_stragglers(folder / "stragglers.png")
    trained = train(Digits(classes_per_client=3))
    draw_attention(trained, folder / "attention.png")
    draw_prototypes(trained, folder / "prototypes.png")


if __name__ == "__main__":
    main()
