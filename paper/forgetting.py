"""What becomes of a class in rounds in which few of the cohort hold it.

A client that lacks a class still trains the head's row of it: every sample of another class pushes
its score down. So in rounds with few holders plain averaging forgets the class. Shown here: how the
accuracy of a class changes in a round against the number of its holders in the cohort, and how
unequal the rows of the head become.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedproto.data import data_root
from fedproto.data.federation import Federation, class_counts, sample_labels
from fedproto.measures.scores import PER_CLASS
from fedproto.report.results import StoredRun
from fedproto.report.style import add_legend, new_figure
from paper.base import FoundRun
from paper.cases import Case
from paper.measures import MEASURE, ROW_NORM
from paper.output import Output
from paper.panels import line_of

GUIDED = "Guided"
COLUMNS = ("data_set", "trained_on", "method", "holders", "change", "std_error", "times")


def show_forgetting(output: Output, found: Sequence[tuple[Case, Sequence[FoundRun]]]) -> None:
    """A panel of changes and one of rows per data set; empty if no run was analysed."""
    looked = [
        (case, shown)
        for case, results in found
        if (shown := {r.label: r.run for r in results if r.run.config.measure.takes(MEASURE)})
    ]
    if not looked:
        return
    figure = new_figure(3.2 * len(looked) + 0.6, 5.0)
    grid = figure.subplots(2, len(looked), squeeze=False)
    handles: dict[str, Any] = {}
    lines: list[pd.DataFrame] = []
    for (case, shown), (above, below) in zip(looked, grid.T, strict=True):
        source = next(iter(shown.values())).config.data
        assert source is not None  # noqa: S101 - cases are data sets by name
        federation = source.load(data_root())
        for label, run in shown.items():
            changes, line = changes_by_holders(run, federation), line_of(label, shown)
            lines.append(
                changes.assign(data_set=case.title, trained_on=case.stands_in, method=label)
            )
            handles[label] = above.errorbar(
                changes["holders"],
                changes["change"],
                yerr=changes["std_error"].fillna(0.0),
                marker="o",
                ms=3,
                **line,
            )
            below.plot(*row_spread(run), **line)
        above.axhline(0, color="grey", lw=0.8)
        above.set_title(case.full_title, fontsize="medium")
        above.set_xlabel("clients of the cohort that hold the class")
        below.set_xlabel("round")
        for axes in (above, below):
            axes.grid(alpha=0.3)
            axes.xaxis.get_major_locator().set_params(integer=True)
    grid[0][0].set_ylabel("change of its accuracy\nin that round (points)")
    grid[1][0].set_ylabel("spread of row norms\n(std / mean over classes)")
    add_legend(figure, handles)
    output.csv("guidance-forgetting", COLUMNS, pd.concat(lines))
    output.figure("guidance-forgetting", figure)


def changes_by_holders(run: StoredRun, federation: Federation) -> pd.DataFrame:
    """The change of every class's accuracy in every round, by holders that took part.

    A client holds the classes of all samples that were dealt to it, those that the server keeps for
    validation among them: these depend on the version's random streams, the rest does not.
    """
    counts_kc = class_counts(federation)
    for client, counts in enumerate(counts_kc):
        taken = sample_labels(federation)[federation.validation_of(client)]
        counts += np.bincount(taken, minlength=len(counts))
    holds_kc = counts_kc > 0
    names = [federation.class_name(label) for label in range(holds_kc.shape[1])]
    changes = []
    for before, after in zip(run.records, run.records[1:], strict=False):
        old, new = (record.tables.get(PER_CLASS, {}) for record in (before, after))
        took_part = list(after.attention)
        changes += [
            (int(holds_kc[took_part, label].sum()), 100 * (new[name] - old[name]))
            for label, name in enumerate(names)
            if name in old and name in new
        ]
    groups = pd.DataFrame(changes, columns=["holders", "change"]).groupby("holders")["change"]
    # NumPy's own mean, as in all other tables: groupby's differs in the last digit.
    return pd.DataFrame(
        {
            "change": groups.agg(lambda values: values.mean()),
            "std_error": groups.agg(lambda values: values.sem()),
            "times": groups.size(),
        }
    ).reset_index()


def row_spread(run: StoredRun) -> tuple[list[int], list[float]]:
    """Rounds, and the standard deviation of the head's row norms over their mean."""
    rounds, spread = [], []
    for record in run.records:
        norms = list(record.tables.get(ROW_NORM, {}).values())
        if norms and np.mean(norms) > 0:
            rounds.append(record.round + 1)
            spread.append(float(np.std(norms) / np.mean(norms)))
    return rounds, spread
