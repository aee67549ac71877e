"""The driver of the round loop: from runs that are to be carried out to runs that are over.

It groups runs that train together, makes their engine, keeps what is to be kept, and refuses to go
on with other data or another model than a run began with.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from fedproto.config import RunConfig
from fedproto.data.federation import Federation, uneven_test
from fedproto.engines.auto import Demand, choose, threads
from fedproto.engines.base import AUTO, ENGINES, Engine, Notify, ignore
from fedproto.engines.setting import read_state
from fedproto.errors import ConfigError, StoreError, unknown_name
from fedproto.measures.base import Gauge
from fedproto.rounds import Watcher, run_rounds
from fedproto.rounds.runs import Run
from fedproto.simulate.identity import check_same, data_identity, model_identity
from fedproto.simulate.reference import check_reference, reference_state
from fedproto.store import RunStore
from fedproto.store.run import FORMAT
from fedproto.types import RoundRecord, ServerState

EngineFor: TypeAlias = Callable[[RunConfig, Federation, nn.Module, Notify], Engine]
"""Makes an engine for runs that share data, model and options."""


@dataclass(frozen=True)
class Assignment:
    """A run to be carried out, with what its configuration only names.

    Attributes:
        build: Makes the module with its initial weights.
        architecture: Equal for runs whose modules are alike but for their weights.
        store: Where it is kept; None for nowhere.
    """

    config: RunConfig
    federation: Federation
    build: Callable[[], nn.Module]
    architecture: Hashable
    store: RunStore | None = None

    def initial(self) -> ServerState:
        """Where the run starts from."""
        model = self.build().to(self.config.engine.torch_dtype())
        params, buffers = read_state(model)
        return ServerState(0, params, self.config.train.shared_buffers(model, buffers))

    @property
    def company(self) -> Hashable:
        """Equal for runs that can train together."""
        config = self.config
        return (
            id(self.federation),
            self.architecture,
            config.task,
            config.engine,
            config.train.batch_norm,
        )


def carry_out(
    assignments: Sequence[Assignment],
    watcher: Watcher | None = None,
    engine_for: EngineFor | None = None,
    patience: float = 0.0,
) -> list[Run | None]:
    """Carries out runs, each from where it stands, until all are over.

    Runs that share data, architecture and engine train together.

    `engine_for` makes the engine, in place of the one that the configuration names; `patience` are
    seconds to wait for another process that is at the same directories.

    Returns:
        The runs, in the order given; None for one that was over before.
    """
    watcher = watcher or Watcher()
    groups: dict[Hashable, list[Assignment]] = {}
    for assignment in assignments:
        groups.setdefault(assignment.company, []).append(assignment)
    runs: dict[int, Run] = {}
    for group in groups.values():
        runs |= _carry_out_together(group, watcher, engine_for, patience)
    return [runs.get(id(assignment)) for assignment in assignments]


def _carry_out_together(
    group: Sequence[Assignment], watcher: Watcher, engine_for: EngineFor | None, patience: float
) -> dict[int, Run]:
    """Carries out runs that share data, architecture and engine; gives them by assignment."""
    federation, configs = group[0].federation, [assignment.config for assignment in group]
    identity: dict[str, str] = {}
    if any(assignment.store is not None for assignment in group):
        identity = data_identity(federation, exact=any(config.store.exact for config in configs))
    left = [assignment for assignment in group if not _is_over(assignment, identity)]
    if not left:
        return {}
    with contextlib.ExitStack() as stack:
        for assignment in left:
            if assignment.store is not None:
                stack.enter_context(assignment.store.locked(patience))
        runs = {id(assignment): _begin(assignment, identity) for assignment in left}
        store_of = {id(runs[id(assignment)]): assignment.store for assignment in left}
        model = left[0].build()
        if engine_for is None:
            # Runs that are over count too: those added to a sweep are trained like the others.
            before = [how for assignment in group for how in _engines(assignment)[-1:]]
            engine = stack.enter_context(
                engine_of(configs, federation, model, watcher.notice, before)
            )
        else:
            engine = engine_for(left[0].config, federation, model, watcher.notice)
            stack.callback(engine.close)
        for assignment in left:
            _describe(assignment, runs[id(assignment)], identity, engine)
        cautions = [check_reference(assignment.config) for assignment in left]
        cautions.append(uneven_test(federation.name, federation.largest_test_share))
        for caution in filter(None, cautions):
            watcher.notice(caution)
        gauge = Gauge(engine.workload, reference_state)
        for run, record in run_rounds(list(runs.values()), federation, engine, watcher, gauge):
            _check_stop(run.config, record)
            if (store := store_of[id(run)]) is not None:
                store.append(record)
                store.save_checkpoint(run.state, last=run.stop_reason is not None)
            watcher.round_done(run.config, run.records)
    return runs


def _check_stop(config: RunConfig, record: RoundRecord) -> None:
    """Checks that what a run is to stop by is among what was taken of it."""
    name, taken = config.stop.metric, record.metrics
    if name is None or not any(key.endswith("loss") and key != "train_loss" for key in taken):
        return  # nothing was tested in this round
    if name not in taken and f"validation_{name}" not in taken and record.round == 0:
        raise ConfigError(f"stop.metric: {unknown_name('metric', name, taken)}")


def _is_over(assignment: Assignment, identity: Mapping[str, str]) -> bool:
    """Whether a run is over; one that is must have been about the same."""
    store = assignment.store
    if store is None or not store.finished:
        return False
    check_same(store.identity(), {**identity, **_model_part(assignment)}, store.path)
    return True


def _begin(assignment: Assignment, identity: Mapping[str, str]) -> Run:
    config, store = assignment.config, assignment.store
    device = config.engine.torch_device()
    if store is None:
        return Run(config, assignment.initial().to(device))
    if store.format < FORMAT and not store.finished:
        raise StoreError(
            f"{store.path} was begun by an earlier version, which drew cohorts and batches from"
            " other random streams; it can be read, but not continued: start a new run"
        )
    state = store.load_checkpoint()
    if state is not None or store.records():
        check_same(store.identity(), {**identity, **_model_part(assignment)}, store.path)
    initial = assignment.initial()
    state = state or initial
    if state.params.keys() == initial.params.keys():
        # The model's order, which files lose: sums over parameters round by it.
        state = replace(state, params={name: state.params[name] for name in initial.params})
    records = store.go_back_to(state.round)
    began_as = (*store.earlier, store.digest)[0]
    return Run(store.config, state.to(device), records, store.client_memory, began_as)


def _model_part(assignment: Assignment) -> dict[str, str]:
    """The fingerprints of a module; weights that the seed alone decides are left out."""
    named = assignment.config.model
    found = model_identity(assignment.build(), assignment.initial())
    if named is not None and named == named.untrained():
        del found["weights"]
    return found


def _describe(
    assignment: Assignment, run: Run, identity: Mapping[str, str], engine: Engine
) -> None:
    """Writes down what a run is trained on, and which engine goes on from here if it changed."""
    store = assignment.store
    if store is None:
        return
    facts: dict[str, Any] = {}
    if not run.records:
        facts["identity"] = {**identity, **_model_part(assignment)}
        facts["data"] = assignment.federation.about()
    engines, device = _engines(assignment), engine.workload.options.torch_device()
    how = {"name": engine.name, "device": device.type, "threads": torch.get_num_threads()}
    if not engines or not how.items() <= engines[-1].items():
        facts["engines"] = [*engines, {"from_round": run.state.round, **how}]
    if facts:
        store.describe(**facts)


def _engines(assignment: Assignment) -> list[dict[str, Any]]:
    """The engines that have trained a run so far, oldest first."""
    store = assignment.store
    return [] if store is None else list(store.description().get("engines", []))


@contextlib.contextmanager
def engine_of(
    configs: Sequence[RunConfig],
    federation: Federation,
    model: nn.Module,
    notify: Notify = ignore,
    before: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Engine]:
    """The engine of runs that train together, with the threads that suit it.

    Where the choice is free, runs go on with the engines they began with.
    """
    first = configs[0]
    workload = first.workload(federation, model, notify)
    choice = choose(first.engine, workload.task, demand_of(configs, federation), before)
    if first.engine.name == AUTO:
        notify(f"engine: {choice.name} ({choice.reason})")
    elif choice.name == "captured" and first.engine.torch_device().type != "cuda":
        notify(
            f"engine 'captured' replays CUDA graphs; on {first.engine.torch_device()} it trains"
            " step by step, as engine 'reference' does"
        )
    workload = replace(workload, options=replace(first.engine, name=choice.name))
    with threads(choice.threads), contextlib.closing(ENGINES.get(choice.name)(workload)) as engine:
        yield engine


def demand_of(configs: Iterable[RunConfig], federation: Federation) -> Demand:
    """Roughly how much work some runs are together, were they at their beginning."""
    size, jobs, steps = float(federation.train_sizes.mean()), 0, 0
    for config in configs:
        pooled = config.strategy.pooled
        each = size * len(federation.clients) if pooled else size
        trained = 1 if pooled else config.schedule.cohort
        epochs = config.schedule.rounds * trained * config.train.epochs
        jobs += trained
        steps += epochs * math.ceil(each / config.train.batch_size)
    return Demand(jobs, steps)
