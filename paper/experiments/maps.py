"""Figure 6: what the final models see in two pictures, and how sure they are of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedproto import load
from fedproto.api.analysing import Subject
from fedproto.data.federation import Federation
from fedproto.data.segmentation import palette
from fedproto.errors import DataError
from fedproto.measures.uncertainty import feature_entropy, relative, softmax_entropy, upsampled
from fedproto.report.style import new_figure, picture_of
from fedproto.rng import Indices, Purpose, stream
from fedproto.types import VOID
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import CENTRALIZED, Case, Scope
from paper.experiments.tsne import first_of_each
from paper.library import Request
from paper.output import Output

SHOWN = ("FedAvg", "FedProto")
ALPHAS = (0.01, 0.1, 1.0)
PICTURES = 2
KINDS = ("segmentation", "softmax entropy", "feature entropy")
COLUMNS = (
    "data_set",
    "trained_on",
    "sample",
    "alpha",
    "method",
    "pixel_accuracy",
    "mean_softmax_entropy",
    "mean_feature_entropy",
)


@dataclass(frozen=True)
class Seen:
    """What a model sees in a picture; entropies as shares of the largest possible one."""

    labels: NDArray[np.int64]
    softmax: NDArray[np.float64]
    features: NDArray[np.float64]
    accuracy: float


@EXPERIMENTS.register("maps")
class QualitativeMaps(Experiment):
    """Label maps and entropy maps of two held-out pictures, for three α."""

    title = "Figures 6 and S4: label maps and entropy maps"
    cases = ("fpascal",)

    def requests(self, scope: Scope) -> list[Request]:
        """FedAvg and FedProto of the first seed at the smallest δ, and the centralised run."""
        wanted = []
        for case in scope.cases(self.cases):
            runs = case.runs(
                lambda config: (
                    config.title in SHOWN and getattr(config.data, "alpha", None) in ALPHAS
                )
            )
            wanted += [
                Request(case.name, config, checkpoint=True)
                for config in [*first_of_each(runs), *case.centralized()[:1]]
            ]
        return wanted

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Three rows per picture, a column per model."""
        output.say("The paper gives no figures for these maps, only the pictures.")
        for case in scope.cases(self.cases):
            try:
                self._render(case, results.select(case.name), output)
            except DataError as error:
                output.say(f"{case.name} is left out: {error}")

    def _render(self, case: Case, results: Sequence[FoundRun], output: Output) -> None:
        order = {label: position for position, label in enumerate((*SHOWN, CENTRALIZED))}
        models = sorted(
            results,
            key=lambda each: (each.label == CENTRALIZED, each.alpha or 0, order[each.label]),
        )
        loaded = [load(each.run.path) for each in models]
        chosen = _held_out([result.federation for result in loaded])
        seen: dict[tuple[int, int], Seen] = {}
        for position, result in enumerate(output.track(loaded, "maps")):
            subject = Subject(result)
            for index in chosen:
                seen[position, index] = _look(subject, index)
        output.csv(
            "maps",
            COLUMNS,
            [
                (
                    case.title,
                    case.stands_in,
                    index,
                    None if models[position].label == CENTRALIZED else models[position].alpha,
                    models[position].label,
                    found.accuracy,
                    float(found.softmax.mean()),
                    float(found.features.mean()),
                )
                for (position, index), found in seen.items()
            ],
        )
        heads = [
            each.label if each.label == CENTRALIZED else f"{each.label}\nα = {each.alpha:g}"
            for each in models
        ]
        output.figure("maps", _draw(case.full_title, loaded[0].federation, chosen, heads, seen))


def _held_out(federations: Sequence[Federation]) -> list[int]:
    """Pictures that none of the models was trained on, of different classes where possible."""
    left: Indices | None = None
    for federation in federations:
        tested = federation.validation if len(federation.validation) else federation.test_indices
        left = np.asarray(tested if left is None else np.intersect1d(left, tested))
    if left is None or not len(left):
        raise DataError("no picture is held out from all of these runs")
    mixed = left[stream(0, Purpose.MAPPED).permutation(len(left))]
    labels = federations[0].labels
    kinds = mixed if labels is None else labels[mixed]
    _, first = np.unique(kinds, return_index=True)
    others = np.setdiff1d(np.arange(len(mixed)), first)
    return [int(mixed[index]) for index in [*np.sort(first), *others][:PICTURES]]


def _look(subject: Subject, index: int) -> Seen:
    scores, features, target = subject.probe.maps(subject.state, index)
    size = (target.shape[-2], target.shape[-1])
    labels = scores.argmax(dim=1)[0].cpu().numpy()
    truth = target[0].cpu().numpy()
    counted = truth != VOID
    feature_map = upsampled(feature_entropy(features), size)[0]
    return Seen(
        labels,
        relative(softmax_entropy(scores)[0], scores.shape[1]),
        relative(feature_map, features.shape[1]),
        float((labels == truth)[counted].mean()),
    )


def _draw(
    title: str,
    federation: Federation,
    chosen: Sequence[int],
    heads: Sequence[str],
    seen: dict[tuple[int, int], Seen],
) -> Any:
    columns = ["picture", *heads, "truth"]
    figure = new_figure(1.15 * len(columns) + 0.8, 1.2 * 3 * len(chosen) + 0.9)
    grid = figure.subplots(3 * len(chosen), len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set_visible(False)
    heat = None
    for number, index in enumerate(chosen):
        rows = grid[3 * number : 3 * number + 3]
        for kind, row in zip(KINDS, rows, strict=True):
            row[0].set_ylabel(kind, fontsize="x-small")
        rows[0][0].imshow(picture_of(federation.samples, index).squeeze(), cmap="gray")
        _, target = federation.samples.batch(np.array([index]))
        rows[0][-1].imshow(palette()[target[0].cpu().numpy()])
        for position in range(len(heads)):
            found = seen[position, index]
            rows[0][position + 1].imshow(palette()[found.labels])
            for values, row in ((found.softmax, rows[1]), (found.features, rows[2])):
                heat = row[position + 1].imshow(values, cmap="cividis", vmin=0, vmax=1)
    for axes, head in zip(grid[0], columns, strict=True):
        axes.set_title(head, fontsize="small")
    if heat is not None:
        figure.colorbar(
            heat, ax=grid, shrink=0.5, label="entropy, as a share of the largest possible"
        )
    figure.suptitle(title.replace("\n", " "), fontsize="medium")
    return figure
