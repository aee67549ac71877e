"""Table 1: classes, clients and samples of the data sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedproto.data.base import data_root
from fedproto.data.celeba import CelebA, read_attribute, read_identities
from fedproto.data.federation import Federation, class_counts, statistics
from fedproto.data.partition import by_key
from fedproto.data.samples import TensorSamples
from fedproto.errors import DataError
from fedproto.report.style import COLORS, panel_grid
from paper.base import EXPERIMENTS, FoundRuns
from paper.cases import CLASSIFICATION, SEGMENTATION, Case, Scope
from paper.comparison import Comparison, ComparisonTable, show
from paper.curves import Averaged
from paper.output import Output
from paper.printed import printed

COUNTS = {
    "classes": "classes",
    "clients": "clients",
    "samples": "samples",
    "mean": "samples per client, mean",
    "std": "samples per client, std",
}


@EXPERIMENTS.register("data")
class DataTable(ComparisonTable):
    """The left half of the paper's Table 1, counted."""

    title = "Table 1: the data sets"
    cases = CLASSIFICATION + SEGMENTATION

    def rows(self, scope: Scope, results: FoundRuns, output: Output) -> list[Comparison]:
        """Counts."""
        del results
        return [row for case, found in _loaded(scope, output) for row in _counts(case, found)]

    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Counts, and how the sizes of the clients are spread."""
        del results
        loaded = list(_loaded(scope, output))
        sizes = [(case, class_counts(found).sum(axis=1)) for case, found in loaded]
        rows = [row for case, found in loaded for row in _counts(case, found)]
        show(output, "data", self.title, rows)
        if sizes:
            output.figure("data", _draw(sizes))


def _loaded(scope: Scope, output: Output) -> Iterator[tuple[Case, Federation]]:
    """The federations that are there, with a word on what is not."""
    for case in scope.cases(DataTable.cases):
        try:
            federation, remark = _load(case)
        except DataError as error:
            output.say(f"{case.name} is left out: {error}")
            continue
        if remark:
            output.say(f"{case.name}: {remark}")
        yield case, federation


def _counts(case: Case, federation: Federation) -> Iterator[Comparison]:
    counted = statistics(federation)
    for name, row in COUNTS.items():
        ours = Averaged(float(counted[name]), None, None, 0)
        yield Comparison(case, "", row, ours, printed("data", case.name, name))


def _load(case: Case) -> tuple[Federation, str]:
    """The federation to count, and what is to be said of it.

    Where images are missing the official lists still tell how many there should be.
    """
    source = case.sources()[0]
    federation = source.load(data_root())
    if not isinstance(source, CelebA):
        return federation, ""
    complete = listed(source, data_root())
    if len(complete.samples) == len(federation.samples):
        return federation, ""
    return complete, (
        f"counted by the official lists; of their {len(complete.samples):,} images"
        f" {len(federation.samples):,} are here, of {len(federation.clients):,} clients"
    )


def listed(source: CelebA, root: Path) -> Federation:
    """The clients of CelebA's official lists, with labels alone instead of images."""
    tree = source.tree(root)
    names, identities = read_identities(tree)
    labels = torch.from_numpy(read_attribute(tree, names, source.attribute).astype(np.int64))
    samples = TensorSamples(torch.empty(len(labels), 0), labels)
    parts = by_key(identities, minimum=source.minimum)
    return source.federation("celeba", samples, parts, num_classes=2)


def _draw(sizes: list[tuple[Case, Any]]) -> Any:
    figure, panels = panel_grid(len(sizes), 3, (3.2, 2.5), (0.0, 0.0))
    for axes, (case, counts) in zip(panels, sizes, strict=True):
        ranked = np.sort(counts)[::-1]
        axes.plot(np.arange(1, len(ranked) + 1), ranked, color=COLORS[0], label="clients")
        axes.axhline(ranked.mean(), color=COLORS[1], ls="--", label=f"mean {ranked.mean():.1f}")
        if ranked[0] >= 10 * ranked[-1]:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.yaxis.set_minor_formatter("")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(case.full_title, fontsize="medium")
        axes.set_xlabel("clients, largest first")
        axes.set_ylabel("samples")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    return figure
