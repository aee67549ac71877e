"""Results in Python: records as tables and figures, the model, the run directory."""

from __future__ import annotations

import io
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from torch import nn

from fedproto.api.table import Table, comparison
from fedproto.config import RunConfig
from fedproto.data.base import data_root
from fedproto.data.federation import DataFacts, Federation
from fedproto.data.sharing import HeldOut
from fedproto.engines.setting import load_state
from fedproto.errors import ConfigError, StoreError
from fedproto.options import options_to_dict, read_options
from fedproto.report.arrangement import Arrangement, arrange
from fedproto.report.figures import curves
from fedproto.report.html import write_page
from fedproto.report.results import StoredRun, main_score
from fedproto.report.summary import summarize
from fedproto.rounds.identity import data_identity
from fedproto.store import RunStore, read_description
from fedproto.types import RoundRecord, ServerState

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def stored_facts(path: Path) -> dict[str, Any]:
    """The facts that a run's ``run.json`` keeps about its data; empty where it keeps none.

    Raises:
        StoreError: If they are not valid facts.
    """
    known = read_description(path).get("data", {})
    if "input_shape" not in known:  # runs of earlier versions
        return {}
    try:
        facts = options_to_dict(read_options(DataFacts, dict(known), "data"))
        if min(facts["input_shape"], default=1) < 1:
            raise ValueError(f"data.input_shape: {facts['input_shape']} has a size below 1")
    except (ConfigError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}/run.json has an invalid description of its data: {error};"
            " pass the data: fedproto.load(run, data=...)"
        ) from None
    return {"mean": None, "std": None, **facts}


class Comparable:
    """What one run and several have alike: tables, figures, the page."""

    @property
    def _runs(self) -> Sequence[Result]:
        raise NotImplementedError

    def table(self, metric: str | None = None, baseline: str | None = None) -> Table:
        """One row per method and condition: mean ± standard deviation and difference.

        Args:
            metric: The score to compare by; the task's main one by default.
            baseline: The method that differences are from; the first by default.

        Raises:
            ConfigError: If no run has the score, or no method has the name.
        """
        chosen = self._score(metric)
        rows = summarize(self._arranged(), chosen, baseline=baseline)
        return comparison(rows, chosen, brief=True)

    def rounds(self) -> Table:
        """One row per run and round."""
        return Table([row for result in self._runs for row in _rows(result)])

    def to_pandas(self, metric: str | None = None, baseline: str | None = None) -> Any:
        """The comparison as a data frame; ``rounds().to_pandas()`` has all rounds."""
        return self.table(metric, baseline).to_pandas()

    def to_latex(self, metric: str | None = None, baseline: str | None = None) -> str:
        """The comparison as a LaTeX table; needs the package booktabs."""
        return self.table(metric, baseline).to_latex()

    def _score(self, asked: str | None) -> str:
        return main_score((result.stored() for result in self._runs), asked)

    def plot(self, metric: str | None = None) -> Figure:
        """Curves of a score over the rounds; the task's main one by default.

        Notebooks show it; ``plot().savefig("curves.pdf")`` writes it.

        Raises:
            ConfigError: If no run has such a score.
        """
        figure = curves(self._arranged(), self._score(metric))

        def png() -> bytes:
            content = io.BytesIO()
            figure.savefig(content, format="png", dpi=100)
            return content.getvalue()

        # Notebooks know how to show figures only once pyplot was imported, which this is without.
        figure.__dict__["_repr_png_"] = png
        return figure

    def report(self, path: str | Path) -> Path:
        """Writes the HTML page about the runs."""
        write_page([result.directory for result in self._runs], Path(path), title="runs")
        return Path(path)

    def _arranged(self) -> Arrangement:
        return arrange(result.stored() for result in self._runs if result.records)


@dataclass(frozen=True, repr=False)
class Result(Comparable):
    """A finished run, or one that was loaded from its directory.

    Attributes:
        config: The run's configuration.
        records: One record per round.
        state: The aggregate model's tensors after the last round; None where none were kept.
        build: Makes the module that the tensors belong to; None where it is unknown.
        data: The clients' data; None where it is what the configuration names.
        path: The run's directory; None for a run that was not kept.
    """

    config: RunConfig
    records: list[RoundRecord]
    state: ServerState | None
    build: Callable[[], nn.Module] | None = None
    data: Federation | None = None
    path: Path | None = None

    @property
    def _runs(self) -> Sequence[Result]:
        return (self,)

    @property
    def metrics(self) -> dict[str, float]:
        """The scores of the last round."""
        return self.records[-1].metrics if self.records else {}

    @cached_property
    def model(self) -> nn.Module:
        """A module with the final aggregate weights, in evaluation mode.

        Raises:
            ConfigError: If the module that the weights belong to is unknown.
            StoreError: If no weights were kept.
        """
        if self.build is None:
            raise ConfigError(
                f"{self.path or 'the run'} was started from Python with a module of your own; pass"
                " it: fedproto.load(run, model=...)"
            )
        if self.state is None:
            raise StoreError(
                f"{self.path or 'the run'} has no checkpoint yet, and so no weights; train it with"
                " store.checkpoint_every above 0"
            )
        model = self.build()
        load_state(model, self.state.served)
        return model.eval()

    @cached_property
    def federation(self) -> Federation:
        """The clients' data.

        Raises:
            ConfigError: If it was given in Python and is not passed again.
        """
        if self.data is not None:
            return self.data
        if self.config.data is None:
            raise ConfigError(
                f"{self.path or 'the run'} was started from Python with data of your own; pass it:"
                " fedproto.load(run, data=...)"
            )
        return self.config.data.load(data_root())

    def about_data(self) -> dict[str, Any]:
        """Facts about the run's data; the data is loaded only if they are not stored."""
        facts = {} if self.path is None or self.data is not None else stored_facts(self.path)
        if not facts:
            return self.federation.about()
        source = self.config.data
        if facts["mean"] is not None or not isinstance(source, HeldOut):
            return facts
        # A server that has no samples knows what their configuration gives.
        given = {"given": (source.mean, source.std), "none": ((), ())}.get(source.normalize)
        return facts if given is None else {**facts, "mean": [*given[0]], "std": [*given[1]]}

    def export(self, folder: str | Path) -> Path:
        """Writes the weights for use elsewhere, with a model card.

        Raises:
            StoreError: If no weights were kept, or the folder cannot be written.
        """
        from fedproto.api.export import export  # which asks for results

        export(self, folder)
        return Path(folder)

    def save(self, path: str | Path) -> Path:
        """Keeps a run that was not kept: as a directory that the command line can read.

        Raises:
            StoreError: If the directory holds something already or cannot be written.
        """
        store = RunStore.create(Path(path), self.config)
        if self.data is not None:
            store.describe(identity=data_identity(self.data), data=self.data.about())
        for record in self.records:
            store.append(record)
        if self.state is not None:
            store.save_checkpoint(self.state, last=True)
        return store.path

    @cached_property
    def directory(self) -> Path:
        """The run's directory; a temporary one, for as long as this lives, where it has none."""
        if self.path is not None:
            return self.path
        folder = tempfile.mkdtemp(prefix="fedproto-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return self.save(Path(folder) / "run")

    def stored(self) -> StoredRun:
        """The run as the comparing functions want it."""
        return StoredRun(self.path or Path(), self.config, self.records)

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        where = f", in {self.path}" if self.path is not None else ""
        return (
            f"Result({self.config.title}, seed {self.config.seed}, {len(self.records)} rounds:"
            f" {scores or 'no scores'}{where})"
        )


class Results(Comparable, Sequence[Result]):
    """The runs of a sweep."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = tuple(results)

    @property
    def _runs(self) -> Sequence[Result]:
        return self._results

    @overload
    def __getitem__(self, index: int) -> Result: ...

    @overload
    def __getitem__(self, index: slice | str) -> Results: ...

    def __getitem__(self, index: int | slice | str) -> Result | Results:
        if isinstance(index, slice):
            return Results(self._results[index])
        if not isinstance(index, str):
            return self._results[index]
        found = [result for result in self if result.config.title == index]
        if not found:
            known = ", ".join(dict.fromkeys(result.config.title for result in self))
            raise KeyError(f"no run is called {index!r}; there are {known}")
        return Results(found)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        if not any(result.records for result in self):
            return f"Results({len(self)} runs without rounds)" if self else "Results()"
        return repr(self.table())


def hardly_learned(records: Sequence[RoundRecord]) -> bool:
    """Whether no update, or fewer than were refused, entered the model."""
    used = sum(len(record.epochs) for record in records)
    refused = sum(len(record.failures) for record in records)
    return bool(records) and (used == 0 or refused > used)


def refusals(records: Sequence[RoundRecord]) -> str | None:
    """How many updates were not used, and the reason most of them share; None when all were."""
    used = sum(len(record.epochs) for record in records)
    reasons = Counter(reason for record in records for reason in record.failures.values())
    if reasons:
        (reason, _), *_ = reasons.most_common(1)
        refused = reasons.total()
        return f"{refused:,} of {used + refused:,} updates were not used; most often: {reason}"
    if records and used == 0:
        return records[-1].note
    return None


def _rows(result: Result) -> list[dict[str, Any]]:
    return [
        {
            "run": result.config.title,
            "seed": result.config.seed,
            "round": record.round + 1,
            **record.metrics,
            "clients": len(record.attention),
            "bytes_up": record.bytes_up,
            "bytes_down": record.bytes_down,
            "seconds": record.seconds,
        }
        for record in result.records
    ]
