"""Figure S3: features of the final models in the plane, FedAvg above FedProto, for every α.

The paper shows FPascal; MNIST is ours, since its models train on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedproto import analyse, load
from fedproto.errors import DataError
from fedproto.report.panels import EMBEDDING, read_part
from fedproto.report.style import new_figure
from paper.base import EXPERIMENTS, Experiment, FoundRun, FoundRuns
from paper.cases import Scope
from paper.library import Request, concentration
from paper.output import Output

SHOWN = ("FedAvg", "FedProto")
SAMPLES = {"smoke": 150, "quick": 600, "paper": 2000}
COLUMNS = ("data_set", "trained_on", "alpha", "method", "class", "x", "y")


@EXPERIMENTS.register("tsne")
class EmbeddingGrid(Experiment):
    """t-SNE of the features of held-out pixels, in the colours of PASCAL VOC, or images."""

    title = "Figure S3: t-SNE of the features, for every α"
    cases = ("fpascal", "mnist")

    def requests(self, scope: Scope) -> list[Request]:
        """FedAvg and FedProto of the first seed at the smallest δ, for every α."""
        return [
            Request(case.name, config, checkpoint=True, instead="analysis/embedding.json")
            for case in scope.cases(self.cases)
            for config in first_of_each(case.runs(lambda config: config.title in SHOWN))
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A row per method, a column per α."""
        output.say("The paper gives no figures for these plots, only the picture.")
        for case in scope.cases(self.cases):
            wanted = [result for result in results.select(case.name) if result.label in SHOWN]
            found: dict[tuple[str, float], Mapping[str, Any]] = {}
            for result in output.track(wanted, "t-SNE"):
                try:
                    alpha = concentration(result.request.config) or 0.0
                    found[result.label, alpha] = _embedding(result, scope)
                except DataError as error:
                    output.say(f"{case.name} {result.label}: {error}")
            if not found:
                continue
            name = "tsne" if case.name == "fpascal" else f"tsne-{case.name}"
            output.csv(
                name,
                COLUMNS,
                [
                    (case.title, case.stands_in, alpha, label, content["classes"][kind], x, y)
                    for (label, alpha), content in found.items()
                    for kind, x, y in zip(content["class"], content["x"], content["y"], strict=True)
                ],
            )
            output.figure(name, _draw(case.full_title, found))


def first_of_each(configs: list[Any]) -> list[Any]:
    """Of runs that differ in δ and seed alone the one with the smallest of both."""
    chosen: dict[Any, Any] = {}
    for config in sorted(configs, key=lambda config: (config.schedule.delta, config.seed)):
        chosen.setdefault((config.title, config.data), config)
    return list(chosen.values())


def _embedding(result: FoundRun, scope: Scope) -> Mapping[str, Any]:
    """The run's own embedding where it has one, else a new one that it keeps."""
    path = result.run.path
    found = read_part(path, EMBEDDING, dict)
    if found is None:
        found = analyse(load(path), [EMBEDDING], samples=SAMPLES[scope.scale])["embedding"]
    assert found is not None  # noqa: S101 - written now
    return found


def _draw(title: str, found: Mapping[tuple[str, float], Mapping[str, Any]]) -> Any:
    alphas = sorted({alpha for _, alpha in found})
    figure = new_figure(1.9 * len(alphas) + 1.6, 4.6)
    grid = figure.subplots(len(SHOWN), len(alphas), squeeze=False)
    handles: dict[str, Any] = {}
    for row, label in zip(grid, SHOWN, strict=True):
        row[0].set_ylabel(label)
        for axes, alpha in zip(row, alphas, strict=True):
            axes.set_xticks([])
            axes.set_yticks([])
            if label == SHOWN[0] and alpha:
                axes.set_title(f"α = {alpha:g}", fontsize="medium")
            if (label, alpha) not in found:
                axes.text(0.5, 0.5, "no run", ha="center", transform=axes.transAxes)
                continue
            content = found[label, alpha]
            x, y, kinds = (np.asarray(content[name]) for name in ("x", "y", "class"))
            for kind in np.unique(kinds):
                inside = kinds == kind
                handles[content["classes"][kind]] = axes.scatter(
                    x[inside], y[inside], s=5, color=content["colors"][kind], linewidths=0
                )
    figure.suptitle(title.replace("\n", " "), fontsize="medium")
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside right center",
        frameon=False,
        markerscale=3,
        fontsize="small",
    )
    return figure
