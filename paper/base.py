"""What an experiment is: it wants runs, and draws a table or figure of the paper from them."""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from fedproto.options import Registry
from fedproto.report.results import StoredRun, comparable
from paper.cases import Scope
from paper.library import Library, Request
from paper.output import Output


class Experiment(abc.ABC):
    """A table or figure."""

    title: ClassVar[str]
    cases: ClassVar[tuple[str, ...]]

    def requests(self, scope: Scope) -> list[Request]:
        """The runs it wants; none unless overridden."""
        del scope
        return []

    def more(self, scope: Scope, library: Library) -> list[Request]:
        """Runs it wants that depend on runs there are already; asked again after training."""
        del scope, library
        return []

    def runs_of_all_cases(
        self,
        scope: Scope,
        *,
        needs: Collection[str] = (),
        wishes: Collection[str] = (),
        centralized: bool = True,
    ) -> list[Request]:
        """All runs of the data sets' recipes.

        Measures of `needs` must have been taken; those of `wishes` are left out where nothing is
        trained. The centralised run is not compared with itself.
        """
        return [
            Request(
                case.name,
                config,
                frozenset(needs),
                wishes=frozenset(wishes) - ({"mmd"} if config.strategy.pooled else set()),
            )
            for case in scope.cases(self.cases)
            for config in [*case.runs(), *(case.centralized() if centralized else [])]
        ]

    @abc.abstractmethod
    def render(self, scope: Scope, results: FoundRuns, output: Output) -> None:
        """Prints and writes the table or figure from the runs that there are."""


EXPERIMENTS: Registry[Experiment] = Registry("experiment", "paper.experiments")


@dataclass(frozen=True)
class FoundRun:
    """A request and the run that answers it."""

    request: Request
    run: StoredRun

    @property
    def label(self) -> str:
        """What the run is called here, whatever it was called where it was made."""
        return self.request.config.title

    @property
    def delta(self) -> float:
        """The share of stragglers."""
        return self.request.config.schedule.delta

    @property
    def alpha(self) -> float | None:
        """The concentration of the class mix, whether or not the data are shared out by one."""
        return getattr(self.request.config.data, "alpha", None)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.request.config.seed


class FoundRuns:
    """The runs that answer an experiment's requests, compared at the rounds they share.

    `modest`: whether runs without what is merely wished for will do.
    """

    def __init__(
        self, requests: Iterable[Request], library: Library, *, modest: bool = False
    ) -> None:
        self.library = library
        self._results: list[FoundRun] = []
        self.missing: list[Request] = []
        for request in requests:
            run = library.find(request, modest=modest)
            if run is None:
                self.missing.append(request)
            else:
                self._results.append(FoundRun(request, run))
        runs = comparable(result.run for result in self._results)
        self._results = [
            FoundRun(result.request, run) for result, run in zip(self._results, runs, strict=True)
        ]

    def __iter__(self) -> Iterator[FoundRun]:
        return iter(self._results)

    def select(
        self,
        case: str,
        label: str | None = None,
        *,
        delta: float | None = None,
        alpha: float | None = None,
    ) -> list[FoundRun]:
        """The results of a data set, of a label, of one δ or α."""
        return [
            result
            for result in self._results
            if result.request.case == case
            and label in (None, result.label)
            and delta in (None, result.delta)
            and alpha in (None, result.alpha)
        ]

    def labels(self, case: str) -> list[str]:
        """The labels of a data set's runs, in the recipe's order."""
        return list(dict.fromkeys(result.label for result in self.select(case)))

    def deltas(self, case: str) -> list[float]:
        """The shares of stragglers that federated runs have."""
        found = {r.delta for r in self.select(case) if not r.request.config.strategy.pooled}
        return sorted(found)
