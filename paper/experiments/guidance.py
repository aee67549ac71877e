"""Beyond the paper: does guidance by classes beat equal weights with toleration, and the field?

The recipes ``guidance-DATASET`` are the deciding comparison, ``guidance-field-DATASET`` the other
opponents and every ingredient by itself; ``guidance-grid`` is what their parameters were chosen
from. Runs of the same data, δ and seed share cohorts, stragglers and batches, so methods are
compared pair by pair, and p-values are corrected for all comparisons of the one or of the other.
"""

from __future__ import annotations

from dataclasses import replace

from fedproto.config import RunConfig
from fedproto.report.figures import label_of
from fedproto.report.results import main_score
from paper.base import EXPERIMENTS, Experiment, FoundRuns
from paper.cases import CLASSIFICATION, FAIR_AND_TOLERANT, Case, Scope
from paper.forgetting import GUIDED, show_forgetting
from paper.library import Request, concentration
from paper.measures import MEASURE
from paper.output import Output
from paper.pairs import show_pairs
from paper.panels import Panel, show_panels

SEGMENTED = "fpascal"
PROTOHEAD = "ProtoHead"
DELTA = 0.5
"""The share of stragglers at which all methods are compared."""
FOLLOWED = (GUIDED, FAIR_AND_TOLERANT, "FedAvgM")
"""Methods that are shown class by class: what is the head's, and what the momentum's."""


@EXPERIMENTS.register("guidance")
class GuidanceStudy(Experiment):
    """Guidance by classes against equal weights with toleration, and the field's methods."""

    title = "Study: guidance by classes (not in the paper)"
    cases = (*CLASSIFICATION, SEGMENTED)

    def requests(self, scope: Scope) -> list[Request]:
        """All runs of the recipes; at smoke scale a few of them."""
        return [
            _looked_into(Request(case.name, config))
            for case in scope.cases(self.cases)
            for recipe in ("guidance", *(["guidance-field"] if case.name != SEGMENTED else []))
            for config in case.runs(recipe=f"{recipe}-{case.name}", own_seeds=scope.seeds is None)
            if scope.scale != "smoke" or _is_little(case, recipe, config)
        ]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Tables of differences, their figure, curves, and what becomes of classes."""
        found = [(case, results.select(case.name)) for case in scope.cases(self.cases)]
        deciding = {
            (case.name, config.title)
            for case, _ in found
            for config in case.runs(recipe=f"guidance-{case.name}")
        }
        show_pairs(
            output,
            "guidance",
            self.title,
            found,
            (PROTOHEAD, GUIDED),
            part_of=lambda case, label: (case.name, label) in deciding,
        )
        curves = [panel for case, _ in found for panel in _panels(case, results)]
        if curves:
            show_panels(output, "guidance-rounds", [curves])
        show_forgetting(output, found)


def _panels(case: Case, results: FoundRuns) -> list[Panel]:
    """A panel of curves for a data set, or for each of its class mixes."""
    found = results.select(case.name, delta=DELTA)
    metric = main_score(result.run for result in found) if found else ""
    panels = []
    for mix in dict.fromkeys(concentration(result.request.config) for result in found):
        lines = {
            label: [
                result
                for result in found
                if result.label == label and concentration(result.request.config) == mix
            ]
            for label in (PROTOHEAD, *FOLLOWED, "FedAvg")
        }
        name = "" if mix is None else f"α = {mix:g}"
        title = case.full_title + (f", {name}" if name else "")
        shown = {label: runs for label, runs in lines.items() if runs}
        axis = f"{label_of(metric)} (%)"
        panels.append(Panel(case, metric, title, axis, shown, 100.0, key=name))
    return panels


def _is_little(case: Case, recipe: str, config: RunConfig) -> bool:
    """Whether a run is among those of the smoke scale."""
    if case.name == SEGMENTED:
        return getattr(config.data, "alpha", None) == 0.1 and config.seed == 0
    field = recipe == "guidance-field"
    few = config.seed == 0 and case.name == "mnist" if field else config.seed < 2
    return few and config.schedule.delta == DELTA


def _looked_into(request: Request) -> Request:
    """The runs that are shown class by class are analysed after every round."""
    config = request.config
    if (
        config.title not in FOLLOWED
        or (config.seed, config.schedule.delta) != (0, DELTA)
        or request.case == SEGMENTED
    ):
        return request
    measured = replace(config, measure=replace(config.measure, every=1, what=(MEASURE,)))
    return replace(request, config=measured, wishes=frozenset({MEASURE}))
