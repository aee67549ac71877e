"""Pictures of a federation: how classes are spread over clients, and what the samples look like."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto.data.federation import Federation
from fedproto.data.masks import VOID, palette
from fedproto.data.samples import MappedSamples
from fedproto.data.statistics import class_counts
from fedproto.errors import ConfigError
from fedproto.report.looks import COLORS, literal, new_figure, save_figure
from fedproto.rng import Indices

SHOWN_CLIENTS = 30
# From the ninth class on the colours come again with another pattern.
_HATCHES = ("", "////", "....", "xxxx", "----", "oooo", "||||", "++++")


def draw_class_mixes(federations: Sequence[tuple[str, Federation]], path: Path) -> Path:
    """Writes `class_mix_figure` as a PNG file."""
    return save_figure(class_mix_figure(federations), path)


def class_mix_figure(federations: Sequence[tuple[str, Federation]]) -> Any:
    """The three panels of the supplementary's data figure, one row per federation.

    Classes per client; clients by number of classes; the class mix of 30 clients chosen at random,
    in colours and patterns that are told apart with all common kinds of colour vision.
    """
    figure = new_figure(10, 2.4 * len(federations) + 0.4)
    rows = figure.subplots(len(federations), 3, squeeze=False)
    for (title, federation), panels in zip(federations, rows, strict=True):
        counts = class_counts(federation)
        classes = (counts > 0).sum(axis=1)
        panels[0].bar(np.arange(len(classes)), classes, width=1.0, color=COLORS[0])
        panels[0].set_ylabel(f"{title}\n# classes" if title else "# classes")
        panels[0].set_ylim(0, counts.shape[1] + 0.5)
        panels[1].bar(
            np.arange(counts.shape[1] + 1),
            np.bincount(classes, minlength=counts.shape[1] + 1),
            color=COLORS[0],
        )
        panels[1].set_ylabel("# clients")
        _draw_mix(panels[2], counts)
    heads = ("Distribution of # classes", "Distribution of # clients", "Class mix per client")
    feet = ("client ID (k)", "# classes per client", "class distribution")
    for column, (head, foot) in enumerate(zip(heads, feet, strict=True)):
        rows[0][column].set_title(head, fontsize="medium")
        rows[-1][column].set_xlabel(foot)
    return figure


def draw_contact_sheet(
    federation: Federation, path: Path, *, clients: int = 10, samples: int = 10
) -> Path:
    """Samples of the first clients, a row per client; masks are laid over their images."""
    if len(federation.input_shape) != 3 or federation.input_shape[0] not in (1, 3):
        raise ConfigError(
            f"a contact sheet needs images, not inputs of shape {federation.input_shape}"
        )
    shown = federation.clients[:clients]
    figure = new_figure(1.1 * samples + 0.6, 1.15 * len(shown))
    grid = figure.subplots(len(shown), samples, squeeze=False)
    for number, (client, row) in enumerate(zip(shown, grid, strict=True)):
        images, captions = _pictures(federation, client.train[:samples])
        for column, axes in enumerate(row):
            axes.axis("off")
            if column < len(images):
                axes.imshow(images[column], interpolation="nearest")
                axes.set_title(literal(captions[column]), fontsize=6, pad=1)
        row[0].text(
            -0.1,
            0.5,
            f"client {number}",
            transform=row[0].transAxes,
            ha="right",
            va="center",
            fontsize=7,
        )
    return save_figure(figure, path)


def _draw_mix(axes: Any, counts: Indices) -> None:
    rng = np.random.RandomState(0)
    shown = np.sort(rng.permutation(len(counts))[:SHOWN_CLIENTS])
    mix = counts[shown] / counts[shown].sum(axis=1, keepdims=True)
    left = np.zeros(len(shown))
    for label in range(mix.shape[1]):
        axes.barh(
            np.arange(len(shown)),
            mix[:, label],
            left=left,
            height=0.9,
            color=COLORS[label % len(COLORS)],
            hatch=_HATCHES[label // len(COLORS) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.3,
        )
        left += mix[:, label]
    axes.set_xlim(0, 1)
    axes.set_ylabel("client ID")
    ticks = np.arange(0, len(shown), max(1, len(shown) // 6))
    axes.set_yticks(ticks, [str(shown[tick]) for tick in ticks])
    axes.set_ylim(len(shown) - 0.5, -0.5)


def _pictures(federation: Federation, indices: Indices) -> tuple[NDArray[np.float64], list[str]]:
    """Images ``[N, H, W, 3]`` between 0 and 1, and what to write above each."""
    samples = federation.samples
    if isinstance(samples, MappedSamples):
        inputs, targets = samples.raw(indices)
    else:
        inputs, targets = samples.batch(indices)
        inputs = (inputs - inputs.min()) / max(float(inputs.max() - inputs.min()), 1e-9)
    images = np.broadcast_to(
        inputs.double().cpu().numpy().transpose(0, 2, 3, 1),
        (len(inputs), *federation.input_shape[1:], 3),
    )
    if not federation.has_label_maps:
        return images, [federation.class_name(int(target)) for target in targets]
    masks = targets.cpu().numpy()
    colours = palette()[masks] / 255
    painted = ((masks > 0) & (masks != VOID))[..., None]
    named = [
        ", ".join(
            federation.class_name(int(label)) for label in np.unique(mask) if label not in (0, VOID)
        )
        for mask in masks
    ]
    return np.where(painted, 0.45 * images + 0.55 * colours, images), named
