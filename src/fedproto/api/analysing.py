"""Analyses of a run's model, written to the run's folder ``analysis``.

    measures.json     measures by name, and their tables: per client and per class
    embedding.json    t-SNE of held-out features; the last points are the classes' prototypes
    maps/             label maps and entropy maps of some held-out pictures

Every file has the round of the model; the HTML page shows them.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedproto.api.result import Result
from fedproto.data.segmentation import palette
from fedproto.disk.files import Folder, explained, write_atomically, write_output
from fedproto.errors import ConfigError, StoreError, install, unknown_name
from fedproto.measures import MEASURES, Meter, Taken
from fedproto.measures.probe import Probe
from fedproto.measures.uncertainty import feature_entropy, relative, softmax_entropy, upsampled
from fedproto.report.panels import EMBEDDING, Measured, read_measured, read_part
from fedproto.report.style import class_colors, picture_of
from fedproto.rng import Purpose, stream
from fedproto.rounds.identity import check_reference, check_same, data_identity, reference_state
from fedproto.store import read_description
from fedproto.types import POOLED

if TYPE_CHECKING:
    from PIL.Image import Image

MAPS = "maps"
PARTS = ("clients", "margin", "dissimilarity", "mmd", EMBEDDING, MAPS)
"""What is analysed by default, as far as it can be; MMD needs a reference."""

PICTURES_EMBEDDED = 100
"""Pictures for t-SNE of label maps, each of which gives hundreds of feature vectors."""

PICTURES_MAPPED = 4

# From dark blue to yellow, safe for all common kinds of colour vision.
_HEAT = np.array(
    [(0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56)], dtype=np.float64
)


class Subject:
    """A run's model with its data, ready to be analysed.

    Raises:
        StoreError: If there is no checkpoint, or the run was trained on other data.
        ConfigError: If the run was started in Python with data or a module not given here.
    """

    def __init__(self, result: Result) -> None:
        self.path, self.config, model = result.directory, result.config, result.model
        assert result.state is not None  # noqa: S101 - the model has its weights
        identity = read_description(self.path).get("identity", {})
        check_same(identity, data_identity(result.federation), self.path)
        # The run may have been trained on another machine.
        anywhere = replace(self.config.engine, name="reference", device="auto")
        self.probe = Probe(replace(self.config, engine=anywhere).workload(result.federation, model))
        self.state = result.state.served.to(self.probe.device)

    def write(self, name: str, found: Mapping[str, Any]) -> None:
        """Writes one file of the analysis."""
        text = json.dumps({"round": self.state.round, **found}, indent=1, allow_nan=False)
        write_atomically(self.path / "analysis" / f"{name}.json", text.encode() + b"\n")


def analyse(
    result: Result,
    what: Iterable[str] | None = None,
    *,
    reference: str | Path | None = None,
    samples: int = 2000,
) -> dict[str, Any]:
    """Analyses a run's model, as ``fedproto analyse`` does.

    Args:
        result: The run; files go to the folder ``analysis`` of its directory, where it has one.
        what: Names of measures, "embedding" and "maps", or one; by default those of `PARTS` that
            are possible.
        reference: Directory of a finished run of strategy 'centralized', for MMD; by default the
            one that the run's configuration names.
        samples: Features in the t-SNE at most.

    Returns:
        The ``round`` of the model, the measures' ``metrics`` by name, their ``tables`` (scores per
        client and per class), and the ``embedding`` or None.

    Raises:
        FedprotoError: If a part is unknown, or the run's data or model are not at hand.
    """
    known = [*MEASURES.names(), EMBEDDING, MAPS]
    parts = [what] if isinstance(what, str) else list(what or ())
    for name in parts:
        if name not in known:
            raise ConfigError(f"what: {unknown_name('part', name, known)}")
    subject = Subject(result)
    compared = subject.config.measure.reference if reference is None else str(reference)
    impossible = {
        "mmd": compared is None,
        EMBEDDING: importlib.util.find_spec("sklearn") is None,
        MAPS: not subject.probe.task.label_maps or importlib.util.find_spec("PIL") is None,
    }
    parts = parts or [name for name in PARTS if not impossible.get(name)]
    with explained(subject.path / "analysis", " cannot be written", ""):
        Folder(subject.path).make("analysis")
        taken = _measure(subject, [one for one in parts if one not in (EMBEDDING, MAPS)], compared)
        if EMBEDDING in parts:
            _embed_features(subject, samples)
        if MAPS in parts and subject.probe.task.label_maps:
            _draw_maps(subject)
    return {
        "round": subject.state.round,
        "metrics": taken.metrics,
        "tables": taken.tables,
        "embedding": read_part(subject.path, EMBEDDING, dict),
    }


def _measure(subject: Subject, names: list[str], reference: str | None) -> Taken:
    if not names:
        return Taken()
    options = replace(subject.config.measure, every=1, what=tuple(names), reference=reference)
    check_reference(replace(subject.config, measure=options))
    meter = Meter(subject.probe.workload, reference_state)
    taken = meter.take(options, subject.config.seed, subject.state)
    earlier = None
    with suppress(StoreError):  # damaged, and about to be replaced
        earlier = read_measured(subject.path)
    if earlier is None or earlier.round != subject.state.round:
        earlier = Measured(subject.state.round, None, {}, {})
    found = {
        **earlier.metrics,
        **taken.metrics,
        "reference": reference if "mmd" in names else earlier.reference,
        "tables": {**earlier.tables, **taken.tables},
    }
    subject.write("measures", found)
    return taken


def _embed_features(subject: Subject, samples: int) -> None:
    federation, label_maps = subject.probe.federation, subject.probe.task.label_maps
    draw = stream(subject.config.seed, Purpose.EMBEDDED)
    test = federation.test_indices
    number = PICTURES_EMBEDDED if label_maps else samples
    chosen = np.asarray(test[draw.permutation(len(test))[:number]])
    ((vectors, labels),) = subject.probe.features(subject.state, [chosen])
    order = torch.from_numpy(draw.permutation(len(vectors))[:samples]).to(vectors.device)
    prototypes = subject.probe.prototypes(subject.state, federation.train_indices(POOLED))
    seen = prototypes.seen.nonzero().flatten()
    points = embed(torch.cat([vectors[order], prototypes.mean[seen]]).float().cpu().numpy())
    names = list(map(federation.class_name, range(federation.num_classes)))
    found = {
        "method": "tsne",
        "x": np.round(points[:, 0], 4).tolist(),
        "y": np.round(points[:, 1], 4).tolist(),
        "class": [*labels[order].tolist(), *seen.tolist()],
        "prototypes": len(seen),
        "classes": names,
        "colors": class_colors(len(names), label_maps=label_maps),
    }
    subject.write(EMBEDDING, found)


def embed(e_nd: NDArray[np.float32]) -> NDArray[np.float64]:
    """t-SNE (van der Maaten & Hinton 2008): a point in the plane per feature vector.

    Starts from the first two principal components, so the same features give the same points.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(f"t-SNE needs scikit-learn: {install('digits')}")
    from sklearn.manifold import TSNE

    number = len(e_nd)
    if number < 4:
        raise ConfigError(f"t-SNE needs at least four feature vectors, not {number}")
    if not np.isfinite(e_nd).all():
        raise ConfigError("t-SNE needs finite feature vectors; has the model diverged?")
    spread = e_nd.shape[1] > 1 and (e_nd != e_nd[0]).any()
    tsne = TSNE(
        perplexity=min(30.0, (number - 1) / 3), init="pca" if spread else "random", random_state=0
    )
    return np.asarray(tsne.fit_transform(e_nd), dtype=np.float64)


def _draw_maps(subject: Subject) -> None:
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(f"maps need Pillow: {install('images')}")
    test = subject.probe.federation.test_indices
    order = stream(subject.config.seed, Purpose.MAPPED).permutation(len(test))
    folder = Folder(subject.path).make("analysis/maps")
    for old in folder.glob("*.png"):
        old.unlink()
    for index in map(int, np.sort(test[order[:PICTURES_MAPPED]])):
        for kind, picture in _maps(subject, index).items():
            _save(picture, folder / f"{index:06d}-{kind}.png")


def _maps(subject: Subject, index: int) -> dict[str, Image]:
    """Picture, label maps and entropy maps of one sample.

    Entropies are shown as shares of the largest possible one, from dark blue (0) to yellow (1).
    """
    from PIL import Image

    scores, features, target = subject.probe.maps(subject.state, index)
    size = (target.shape[-2], target.shape[-1])
    softmax = relative(softmax_entropy(scores)[0], scores.shape[1])
    feature = relative(upsampled(feature_entropy(features), size)[0], features.shape[1])
    picture = picture_of(subject.probe.federation.samples, index)
    if picture.shape[-1] == 1:
        picture = picture[..., 0]
    return {
        "picture": Image.fromarray(picture),
        "truth": _label_map(target[0].cpu().numpy().astype(np.uint8)),
        "prediction": _label_map(scores.argmax(dim=1)[0].cpu().numpy().astype(np.uint8)),
        "softmax-entropy": _heat_map(softmax),
        "feature-entropy": _heat_map(feature),
    }


def _label_map(labels: NDArray[np.uint8]) -> Image:
    from PIL import Image

    picture = Image.fromarray(labels)
    picture.putpalette(palette().tobytes())
    return picture


def _heat_map(values: NDArray[np.float64]) -> Image:
    """Values ``[H, W]`` between 0 (dark blue) and 1 (yellow)."""
    from PIL import Image

    levels = np.linspace(0, 1, len(_HEAT))
    colours = np.stack([np.interp(values, levels, _HEAT[:, channel]) for channel in range(3)], -1)
    return Image.fromarray(np.rint(colours).astype(np.uint8))


def save_labels(labels: NDArray[np.uint8], path: Path) -> Path:
    """Writes a label map ``[H, W]`` in PASCAL VOC's format: class indices with its palette."""
    return _save(_label_map(labels), path)


def _save(picture: Image, path: Path) -> Path:
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return write_output(path, encoded.getvalue())
