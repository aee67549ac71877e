"""Figure 5: mIoU of federated segmentation over rounds, and against the class mix α."""

from __future__ import annotations

from typing import Any

from fedproto.report.looks import add_legend, new_figure
from paper.base import EXPERIMENTS, FoundRuns
from paper.cases import CENTRALIZED, SEGMENTATION, Case, Scope
from paper.comparison import Comparison, ComparisonTable, show
from paper.curves import Averaged, spread
from paper.library import Request
from paper.output import Output
from paper.panels import Panel, line_of, show_panels, titled
from paper.printed import Printed, printed

METRICS = ("miou", "validation_miou")


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
                    rows.append(_row(case, f"{label}, α = {alpha:g}", spread(chosen, "miou")))
            central = results.select(case.name, CENTRALIZED)
            for metric in METRICS:
                ours = spread(central, metric)
                if ours is not None:
                    name = CENTRALIZED + (" (validation)" if metric != "miou" else "")
                    rows.append(_row(case, name, ours, printed("data", case.name, "centralized")))
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
                f"{titled(case)}, α = {alpha:g}",
                "test mIoU (%)",
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


def _row(case: Case, name: str, ours: Averaged | None, paper: Printed | None = None) -> Comparison:
    scaled = ours and ours.scaled(100)
    return Comparison(case, "test mIoU (%)", name, scaled, paper)


def _against_alpha(cases: list[Case], results: FoundRuns) -> Any:
    figure = new_figure(4.2 * len(cases) + 0.4, 3.4)
    handles: dict[str, Any] = {}
    for case, axes in zip(cases, figure.subplots(1, len(cases), squeeze=False)[0], strict=True):
        alphas = _alphas(results, case.name)
        for index, label in enumerate(_labels(results, case.name)):
            values = [spread(results.select(case.name, label, alpha=a), "miou") for a in alphas]
            points = [(a, s.scaled(100)) for a, s in zip(alphas, values, strict=True) if s]
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
        for metric in METRICS:
            central = spread(results.select(case.name, CENTRALIZED), metric)
            if central is not None:
                name = CENTRALIZED + (" (validation)" if metric != "miou" else "")
                handles[name] = axes.axhline(100 * central.mean, **line_of(CENTRALIZED))
                break
        axes.set_xscale("log")
        axes.set_xticks(alphas, [f"{alpha:g}" for alpha in alphas])
        axes.minorticks_off()
        axes.set_title(titled(case), fontsize="medium")
        axes.set_xlabel("concentration α of the class mix (larger: more alike)")
        axes.set_ylabel("test mIoU (%)")
        axes.grid(alpha=0.3)
    add_legend(figure, handles)
    return figure
