"""A held-out picture beside its true and predicted label map and its entropy maps, as PNG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedproto.analysis.entropy import feature_entropy, softmax_entropy, upsampled
from fedproto.analysis.probe import Probe
from fedproto.data.samples import MappedSamples, Samples
from fedproto.report.maps import save_heat, save_labels, save_picture
from fedproto.types import ServerState


def save_maps(probe: Probe, state: ServerState, index: int, folder: Path) -> list[Path]:
    """Writes the maps of one sample.

    Entropies are shown as shares of the largest possible one, from dark blue (0) to yellow (1).
    """
    scores, features, target = probe.maps(state, index)
    size = (target.shape[-2], target.shape[-1])
    stem = folder / f"{index:06d}"

    def file(kind: str) -> Path:
        return stem.with_name(f"{stem.name}-{kind}.png")

    feature_map = upsampled(feature_entropy(features), size)
    return [
        save_picture(picture_of(probe.federation.samples, index), file("picture")),
        save_labels(_bytes(target[0]), file("truth")),
        save_labels(_bytes(scores.argmax(dim=1)[0]), file("prediction")),
        save_heat(_relative(softmax_entropy(scores)[0], scores.shape[1]), file("softmax-entropy")),
        save_heat(_relative(feature_map[0], features.shape[1]), file("feature-entropy")),
    ]


def picture_of(samples: Samples, index: int) -> NDArray[np.uint8]:
    """A sample's input as a picture ``[H, W, channels]``; stretched where it is no picture."""
    where = np.array([index])
    raw = samples.raw(where) if isinstance(samples, MappedSamples) else samples.batch(where)
    values = raw[0][0].double().movedim(0, -1).cpu().numpy()
    low, high = float(values.min()), float(values.max())
    if low < 0 or high > 1:
        values = (values - low) / max(high - low, 1e-12)
    return np.asarray(np.rint(255 * values), dtype=np.uint8)


def _bytes(labels: Tensor) -> NDArray[np.uint8]:
    return labels.cpu().numpy().astype(np.uint8)


def _relative(entropy: Tensor, channels: int) -> NDArray[np.float64]:
    return np.asarray(entropy.double().cpu().numpy() / np.log(max(channels, 2)))
