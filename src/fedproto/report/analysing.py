"""Analyses of a run's newest model, written to the run's folder ``analysis``.

    scores.json       per client and per class
    calibration.json  expected calibration error and reliability bins
    embedding.json    t-SNE of held-out features
    measures.json     aggregate mean margin, gradient dissimilarity, MMD
    maps/             label maps and entropy maps of some held-out pictures

Every file has the round of the model; the HTML page shows them.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedproto.analysis.embedding import embed
from fedproto.analysis.probe import Probe
from fedproto.analysis.uncertainty import (
    calibration_error,
    feature_entropy,
    relative,
    reliability,
    softmax_entropy,
    upsampled,
)
from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.data.segmentation import palette
from fedproto.disk.files import Folder, explained, write_atomically
from fedproto.disk.files import content as read_content
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import ConfigError, DataError, StoreError, install, unknown_name
from fedproto.measures.base import Gauge
from fedproto.measures.scores import score_classes, score_clients, summarize_clients
from fedproto.report.style import class_colors, picture_of
from fedproto.rng import Purpose, stream
from fedproto.rounds.identity import check_reference, check_same, data_identity, reference_state
from fedproto.rounds.run import model_for
from fedproto.store import RunStore
from fedproto.types import ServerState

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES_EMBEDDED = 100
"""Pictures for t-SNE of label maps, each of which gives hundreds of feature vectors."""

PICTURES_MAPPED = 4

MARGIN = "aggregate_mean_margin"

# From dark blue to yellow, safe for all common kinds of colour vision.
_HEAT = np.array(
    [(0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56)], dtype=np.float64
)


@dataclass
class Subject:
    """A run's newest model with its data, ready to be analysed.

    Attributes:
        facts: Results by name, for a table.
    """

    path: Path
    config: RunConfig
    state: ServerState
    probe: Probe
    facts: dict[str, float] = field(default_factory=dict)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes one file of the analysis."""
        text = json.dumps({"round": self.state.round, **content}, indent=1, allow_nan=False)
        write_atomically(self.path / "analysis" / name, text.encode() + b"\n")


def open_subject(
    path: Path,
    federation: Federation,
    model: nn.Module | None = None,
    state: ServerState | None = None,
) -> Subject:
    """Loads a run's model: that of a state, or the newest.

    Raises:
        StoreError: If there is no run or no checkpoint, or the run was trained on other data.
        ConfigError: If the run was started in Python with a module that is not given here.
    """
    store = RunStore.open(path)
    config = store.config
    if model is None:
        if config.model is None:
            raise ConfigError(
                f"{path} was started from Python with an own module; analyse it there:"
                " fedproto.analyse(fedproto.load(run, model=..., data=...))"
            )
        model = model_for(replace(config, model=config.model.untrained()), federation)
    check_same(store.description().get("identity", {}), data_identity(federation), path)
    state = state or store.load_checkpoint()
    if state is None:
        raise StoreError(f"{path} has no checkpoint yet; nothing to analyse")
    # The run may have been trained on another machine.
    anywhere = replace(config.engine, name="reference", device="auto")
    probe = Probe(replace(config, engine=anywhere).workload(federation, model))
    return Subject(path, config, state.served.to(probe.device), probe)


@dataclass(frozen=True)
class AnalysisRequest:
    """Options of an analysis.

    Attributes:
        what: Names out of `PARTS`.
        reference: Directory of a centrally trained run, for MMD; the run's own when None.
        samples: Features in the t-SNE at most.
    """

    what: tuple[str, ...]
    reference: str | None = None
    samples: int = 2000

    def __post_init__(self) -> None:
        for name in self.what:
            if name not in PARTS:
                raise ConfigError(f"what: {unknown_name('part', name, [*PARTS])}")


def analyse(subject: Subject, request: AnalysisRequest) -> dict[str, float]:
    """Writes the requested parts and returns the results for a table."""
    with explained(subject.path / "analysis", " cannot be written", ""):
        Folder(subject.path).make("analysis")
        for name in request.what:
            PARTS[name](subject, request)
    return subject.facts


def _scores(subject: Subject, request: AnalysisRequest) -> None:
    del request
    probe, task = subject.probe, subject.probe.task
    clients, classes = score_clients(probe, subject.state), score_classes(probe, subject.state)
    tables = {"per_client": clients.table("client"), "per_class": classes.table("class")}
    subject.write("scores.json", tables)
    (tally,) = probe.tallies(subject.state, [probe.federation.test_indices])
    scores = {} if tally is None else task.metrics(tally)
    if task.headline in scores:
        subject.facts[task.headline] = scores[task.headline]
    if clients.values:
        subject.facts["worst tenth of clients"] = summarize_clients(clients.values)[1]


def _calibration(subject: Subject, request: AnalysisRequest) -> None:
    del request
    tally = subject.probe.confidences(subject.state, subject.probe.federation.test_indices)
    subject.facts["ece"] = error = calibration_error(tally)
    bins = [asdict(each) for each in reliability(tally)]
    subject.write("calibration.json", {"ece": error, "bins": bins})


def _embedding(subject: Subject, request: AnalysisRequest) -> None:
    federation, label_maps = subject.probe.federation, subject.probe.task.label_maps
    draw = stream(subject.config.seed, Purpose.EMBEDDED)
    test = federation.test_indices
    number = PICTURES_EMBEDDED if label_maps else request.samples
    chosen = np.asarray(test[draw.permutation(len(test))[:number]])
    ((vectors, labels),) = subject.probe.features(subject.state, [chosen])
    order = torch.from_numpy(draw.permutation(len(vectors))[: request.samples]).to(vectors.device)
    vectors, labels = vectors[order], labels[order]
    points = embed(vectors.float().cpu().numpy())
    names = list(map(federation.class_name, range(federation.num_classes)))
    content = {
        "method": "tsne",
        "x": np.round(points[:, 0], 4).tolist(),
        "y": np.round(points[:, 1], 4).tolist(),
        "class": labels.tolist(),
        "classes": names,
        "colors": class_colors(len(names), label_maps=label_maps),
    }
    subject.write("embedding.json", content)


def _measures(subject: Subject, request: AnalysisRequest) -> None:
    own = subject.config.measure
    reference = request.reference or own.reference
    names = ["margin", "dissimilarity", *(["mmd"] if reference is not None else [])]
    gauge = Gauge(subject.probe.workload, reference_state)
    found: dict[str, float] = {}
    for name in names:
        options = replace(own, every=1, what=(name,), reference=reference)
        check_reference(replace(subject.config, measure=options))
        found |= gauge.take(options, subject.config.seed, subject.state).metrics
    subject.write("measures.json", {**found, "reference": reference})
    subject.facts |= found


def _maps(subject: Subject, request: AnalysisRequest) -> None:
    del request
    if not subject.probe.task.label_maps:
        return
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError(f"maps need Pillow: {install('images')}")
    test = subject.probe.federation.test_indices
    order = stream(subject.config.seed, Purpose.MAPPED).permutation(len(test))
    chosen = [int(index) for index in np.sort(test[order[:PICTURES_MAPPED]])]
    folder = Folder(subject.path).make("analysis/maps")
    for old in folder.glob("*.png"):
        old.unlink()
    for index in chosen:
        save_maps(subject.probe, subject.state, index, folder)


def save_maps(probe: Probe, state: ServerState, index: int, folder: Path) -> None:
    """Writes picture, label maps and entropy maps of one sample.

    Entropies are shown as shares of the largest possible one, from dark blue (0) to yellow (1).
    """
    from PIL import Image

    scores, features, target = probe.maps(state, index)
    size = (target.shape[-2], target.shape[-1])
    softmax = relative(softmax_entropy(scores)[0], scores.shape[1])
    feature = relative(upsampled(feature_entropy(features), size)[0], features.shape[1])
    picture = picture_of(probe.federation.samples, index)
    if picture.shape[-1] == 1:
        picture = picture[..., 0]

    def file(kind: str) -> Path:
        return folder / f"{index:06d}-{kind}.png"

    _save(Image.fromarray(picture), file("picture"))
    save_labels(target[0].cpu().numpy().astype(np.uint8), file("truth"))
    save_labels(scores.argmax(dim=1)[0].cpu().numpy().astype(np.uint8), file("prediction"))
    save_heat(softmax, file("softmax-entropy"))
    save_heat(feature, file("feature-entropy"))


def save_labels(labels: NDArray[np.uint8], path: Path) -> Path:
    """Writes a label map ``[H, W]`` in PASCAL VOC's format: class indices with its palette."""
    from PIL import Image

    picture = Image.fromarray(labels)
    picture.putpalette(palette().tobytes())
    return _save(picture, path)


def save_heat(values: NDArray[np.float64], path: Path) -> Path:
    """Writes values between 0 (dark blue) and 1 (yellow), ``[H, W]``."""
    from PIL import Image

    levels = np.linspace(0, 1, len(_HEAT))
    colours = np.stack([np.interp(values, levels, _HEAT[:, channel]) for channel in range(3)], -1)
    return _save(Image.fromarray(np.rint(colours).astype(np.uint8)), path)


def _save(picture: Image, path: Path) -> Path:
    with explained(path, " cannot be written", "", DataError):
        content = io.BytesIO()
        picture.save(content, "PNG")
        write_atomically(path, content.getvalue())
    return path


PARTS: Mapping[str, Callable[[Subject, AnalysisRequest], None]] = {
    "scores": _scores,
    "calibration": _calibration,
    "measures": _measures,
    "embedding": _embedding,
    "maps": _maps,
}


def read_parts(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Those of a run's analysis files that exist, by name without the ending."""
    found = {}
    for name in names:
        file = path / "analysis" / f"{name}.json"
        if file.exists():
            try:
                found[name] = read_json(read_content(file))
            except (StoreError, DamagedError) as error:
                raise StoreError(
                    f"{file} cannot be read ({error}); make it again: fedproto analyse {path}"
                ) from None
    return found
