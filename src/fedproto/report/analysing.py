"""The folder ``analysis`` of a run: what can be said of its newest model.

    scores.json       per client and per class
    calibration.json  expected calibration error and reliability bins, with reliability.png
    embedding.json    t-SNE of held-out features, with embedding.png
    measures.json     aggregate mean margin, gradient dissimilarity, MMD
    maps/             label maps and entropy maps of some held-out pictures

Every file says after how many rounds the model was looked at.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedproto.analysis.calibration import calibration_error, reliability
from fedproto.analysis.embedding import embed
from fedproto.analysis.runs import Correlation, pearson
from fedproto.analysis.scores import score_classes, score_clients
from fedproto.data.tasks import headline
from fedproto.disk.files import Folder, explained, write_atomically
from fedproto.disk.files import content as read_content
from fedproto.disk.integrity import DamagedError, read_json
from fedproto.errors import ConfigError, StoreError, unknown_name
from fedproto.measures.base import Gauge
from fedproto.report.analysis_figures import draw_embedding, draw_reliability, have_matplotlib
from fedproto.report.looks import class_colors
from fedproto.report.maps import save_maps
from fedproto.report.subject import Subject
from fedproto.rng import Purpose, stream
from fedproto.simulate.reference import check_reference, reference_state

PICTURES_EMBEDDED = 100
"""Label maps give hundreds of feature vectors each; so many pictures are enough for t-SNE."""

MARGIN = "aggregate_mean_margin"
MODEL_MEASURES = ("margin", "dissimilarity", "mmd")
"""What the part ``measures`` consists of; MMD needs a reference."""


@dataclass(frozen=True)
class AnalysisRequest:
    """What is asked of an analysis.

    Attributes:
        what: Names out of `PARTS`.
        reference: Directory of a centrally trained run, for MMD; the run's own when None.
        measures: Names out of `MODEL_MEASURES`; all that can be had when empty.
    """

    what: tuple[str, ...]
    reference: str | None = None
    samples: int = 2000
    pictures: int = 4
    measures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, kind, given, known in (
            ("what", "part", self.what, [*PARTS]),
            ("measure", "measure", self.measures, MODEL_MEASURES),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{option}: {unknown_name(kind, name, known)}")


def analyse(subject: Subject, request: AnalysisRequest) -> dict[str, float]:
    """Writes the parts that are asked for; what was found, by name, for a table."""
    with explained(subject.folder, " cannot be written", ""):
        Folder(subject.path).make("analysis")
        for name in request.what:
            PARTS[name](subject, request)
    return subject.facts


def _scores(subject: Subject, request: AnalysisRequest) -> None:
    del request
    clients = score_clients(subject.probe, subject.state)
    classes = score_classes(subject.probe, subject.state)
    tables = {"per_client": clients.table("client"), "per_class": classes.table("class")}
    _write(subject, "scores.json", tables)
    tested, task = subject.probe.federation.test_indices, subject.probe.task
    (tally,) = subject.probe.tallies(subject.state, [tested])
    scores = {} if tally is None else task.metrics(tally)
    if task.headline in scores:
        subject.facts[task.headline] = scores[task.headline]
    if clients.values:
        subject.facts["worst tenth of clients"] = float(np.quantile(clients.values, 0.1))


def _calibration(subject: Subject, request: AnalysisRequest) -> None:
    del request
    tally = subject.probe.confidences(subject.state, subject.probe.federation.test_indices)
    bins, error = reliability(tally), calibration_error(tally)
    _write(subject, "calibration.json", {"ece": error, "bins": [asdict(each) for each in bins]})
    if have_matplotlib():
        draw_reliability(bins, error, subject.folder / "reliability.png")
    subject.facts["ece"] = error


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
    _write(subject, "embedding.json", content)
    if have_matplotlib():
        draw_embedding(content, subject.folder / "embedding.png")


def _measures(subject: Subject, request: AnalysisRequest) -> None:
    own = subject.config.measure
    reference = request.reference or own.reference
    names = request.measures or [
        name for name in MODEL_MEASURES if name != "mmd" or reference is not None
    ]
    gauge = Gauge(subject.probe.workload, reference_state)
    found: dict[str, float] = {}
    for name in names:
        options = replace(own, every=1, what=(name,), reference=reference)
        check_reference(replace(subject.config, measure=options))
        found |= gauge.take(options, subject.config.seed, subject.state).metrics
    earlier = _measured_before(subject)
    if "mmd" not in found:
        reference = earlier.get("reference")
    _write(subject, "measures.json", {**earlier, **found, "reference": reference})
    subject.facts |= found


def _measured_before(subject: Subject) -> dict[str, Any]:
    """What an earlier look at the same model found, which may have taken minutes."""
    try:
        content = read_parts(subject.path, ["measures"]).get("measures")
    except StoreError:  # damaged, and about to be replaced
        return {}
    if not isinstance(content, dict) or content.pop("round", None) != subject.state.round:
        return {}
    return content


def _maps(subject: Subject, request: AnalysisRequest) -> None:
    if not subject.probe.task.label_maps:
        return
    if importlib.util.find_spec("PIL") is None:
        raise ConfigError("maps need Pillow: pip install 'fedproto[images]'")
    test = subject.probe.federation.test_indices
    order = stream(subject.config.seed, Purpose.MAPPED).permutation(len(test))
    chosen = [int(index) for index in np.sort(test[order[: request.pictures]])]
    folder = Folder(subject.path).make("analysis/maps")
    for old in folder.glob("*.png"):
        old.unlink()
    for index in chosen:
        save_maps(subject.probe, subject.state, index, folder)


PARTS: Mapping[str, Callable[[Subject, AnalysisRequest], None]] = {
    "scores": _scores,
    "calibration": _calibration,
    "measures": _measures,
    "embedding": _embedding,
    "maps": _maps,
}


def correlation(found: Sequence[Mapping[str, float]]) -> tuple[str, Correlation] | None:
    """Of the margin with the main score over runs; None where fewer than three have both."""
    metric = headline(name for facts in found for name in facts)
    points = [(facts[MARGIN], facts[metric]) for facts in found if {MARGIN, metric} <= facts.keys()]
    if len(points) < 3:
        return None
    margins, scores = zip(*points, strict=True)
    return metric, pearson(margins, scores)


def _write(subject: Subject, name: str, content: Mapping[str, Any]) -> None:
    described = {"round": subject.state.round, **content}
    text = json.dumps(described, indent=1, allow_nan=False)
    write_atomically(subject.folder / name, text.encode() + b"\n")


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
