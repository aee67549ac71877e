"""Figure 5: mIoU of federated segmentation over rounds, and against the class mix α."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedproto.report.style import add_legend, new_figure
from paper.base import EXPERIMENTS, FoundRuns
from paper.cases import CENTRALIZED, SEGMENTATION, Case, Scope
from paper.comparison import Comparison, ComparisonTable, show
from paper.curves import Averaged, spread
from paper.library import Request
from paper.output import Output
from paper.panels import Panel, line_of, show_panels
from paper.printed import printed

SCORE = "test mIoU (%)"


@EXPERIMENTS.register("segmentation")
class SegmentationCurves(ComparisonTable):
    """How segmentation depends on how mixed the clients' classes are."""

    title = "Figure 5: mIoU against the class mix α"
    cases = SEGMENTATION

    def requests(self, scope: Scope) -> list[Request]:
        """All α and δ of the two recipes, and the centralised run."""
        return self.runs_of_all_cases(scope)

    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """The final mIoU of every α and of centralised training."""
        del output
        rows: list[Comparison] = []
        for case in scope.cases(self.cases):
            for alpha in _alphas(results, case.name):
                for label in _labels(results, case.name):
                    chosen = results.select(case.name, label, alpha=alpha)
                    ours = spread(chosen, "miou", 100)
                    rows.append(Comparison(case, SCORE, f"{label}, α = {alpha:g}", ours, None))
            for name, ours in _centralized(results, case):
                paper = printed("data", case.name, "centralized")
                rows.append(Comparison(case, SCORE, name, ours, paper))
        return rows

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """A panel of curves per α, and the final mIoU against α."""
        output.say(
            "The paper gives no figures for these curves, only the picture; of centralised training"
            " it prints the mIoU."
        )
        show(output, "segmentation", self.title, self.rows(scope, results, output))
        cases = scope.cases(self.cases)
        shown = [case for case in cases if _alphas(results, case.name)]
        if shown:
            show_panels(
                output, "segmentation-rounds", [self._panels(case, results) for case in shown]
            )
            output.figure("segmentation", _against_alpha(shown, results))

    def _panels(self, case: Case, results: FoundRuns) -> list[Panel]:
        return [
            Panel(
                case,
                "miou",
                f"{case.full_title}, α = {alpha:g}",
                SCORE,
                {
                    label: results.select(case.name, label, alpha=alpha)
                    for label in _labels(results, case.name)
                },
                factor=100,
                key=f"alpha={alpha:g}",
            )
            for alpha in _alphas(results, case.name)
        ]


def _alphas(results: FoundRuns, case: str) -> list[float]:
    return sorted({r.alpha for r in results.select(case) if r.label != CENTRALIZED and r.alpha})


def _labels(results: FoundRuns, case: str) -> list[str]:
    return [label for label in results.labels(case) if label != CENTRALIZED]


def _centralized(results: FoundRuns, case: Case) -> Iterator[tuple[str, Averaged]]:
    """The centralised run's mIoU on the test part and on the validation part, where measured."""
    for metric, where in (("miou", ""), ("validation_miou", " (validation)")):
        ours = spread(results.select(case.name, CENTRALIZED), metric, 100)
        if ours is not None:
            yield CENTRALIZED + where, ours


def _against_alpha(cases: list[Case], results: FoundRuns) -> Any:
    figure = new_figure(4.2 * len(cases) + 0.4, 3.4)
    handles: dict[str, Any] = {}
    for case, axes in zip(cases, figure.subplots(1, len(cases), squeeze=False)[0], strict=True):
        alphas = _alphas(results, case.name)
        for index, label in enumerate(_labels(results, case.name)):
            runs = {alpha: results.select(case.name, label, alpha=alpha) for alpha in alphas}
            points = [(a, found) for a in alphas if (found := spread(runs[a], "miou", 100))]
            # A little apart, so that the bars of the methods do not hide each other.
            apart = 1 + 0.06 * (index - 1)
            handles[label] = axes.errorbar(
                [alpha * apart for alpha, _ in points],
                [found.mean for _, found in points],
                yerr=[found.over_deltas or 0.0 for _, found in points],
                marker="os^vD"[index % 5],
                capsize=2,
                **line_of(label),
            )
        for name, central in [*_centralized(results, case)][:1]:
            handles[name] = axes.axhline(central.mean, **line_of(CENTRALIZED))
        axes.set_xscale("log")
        axes.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
        axes.minorticks_off()
        axes.set_title(case.full_title, fontsize="medium")
        axes.set_xlabel("concentration α of the class mix (larger: more alike)")
        axes.set_ylabel(SCORE)
        axes.grid(alpha=0.3)
    add_legend(figure, handles)
    return figure
