"""A run: configuration, data, model and directory in one object; and the training of runs.

The runs of a sweep that share data, architecture and engine train together: their jobs of a round
form one flat list. One run is the sweep of length one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from fedproto.callback import Callback, CallbackList
from fedproto.config import RunConfig
from fedproto.data.base import DataSource, data_root
from fedproto.data.federation import Federation, cautions
from fedproto.engines.auto import Demand, choose, threads
from fedproto.engines.base import AUTO, Engine, Workload, needs_of
from fedproto.engines.processes import make_engine
from fedproto.engines.setting import read_state, setting_of
from fedproto.errors import ConfigError, DataError, StoreError, TrainingError
from fedproto.models.base import build_model, features_of, layers_in_words
from fedproto.rounds.identity import check_reference, check_same, data_identity, model_identity
from fedproto.rounds.jobs import check_fits, check_method
from fedproto.rounds.loop import run_rounds
from fedproto.store import RunStore, read_description
from fedproto.store.checkpoints import ClientMemory
from fedproto.store.run import FORMAT
from fedproto.strategies.values import Setting
from fedproto.types import RoundRecord, ServerState, Tensors

EngineFor: TypeAlias = Callable[[RunConfig, Workload], Engine]
"""Makes the engine of runs that share data, model and options."""


class Run:
    """One strategy under one configuration and seed; making it reads and writes nothing.

    It begins with the initial weights of its model, or with the state `initial`.

    Attributes:
        config: What to train and how.
        federation: The clients' data.
        build: Makes the model with its initial weights; by default the one that `config` names.
        architecture: Equal for runs whose models differ in their weights alone.
        store: The run's directory; None for a run that is not kept.
        records: The rounds done so far.
        last_round: The last round in which a client's update was accepted, by client.
        pause: Number of rounds after which it is left, to be resumed later; None to finish it.
    """

    def __init__(
        self,
        config: RunConfig,
        federation: Federation,
        build: Callable[[], nn.Module] | None = None,
        *,
        architecture: Hashable = None,
        store: RunStore | None = None,
        initial: ServerState | None = None,
    ) -> None:
        if build is None and config.model is not None:
            architecture = replace(config.model.untrained(), init="torch")
        self.config = config
        self.federation = federation
        self.build = build or (lambda: model_for(config, federation))
        self.architecture = architecture
        self.store = store
        self.records: list[RoundRecord] = []
        self.last_round: dict[int, int] = {}
        self.pause: int | None = None
        self._initial = initial
        self._state: ServerState | None = None

    @property
    def state(self) -> ServerState:
        """The server's state: that of the newest checkpoint, then after each round done here."""
        if self._state is None:
            kept = None if self.store is None else self.store.load_checkpoint()
            self._state = kept or self.initial_state()
        return self._state

    @state.setter
    def state(self, state: ServerState) -> None:
        self._state = state

    @cached_property
    def memory(self) -> ClientMemory:
        """The memory of its clients."""
        return ClientMemory() if self.store is None else self.store.client_memory

    def memory_of(self, client: int, setting: Setting) -> Tensors:
        """What a client kept after the last round in which its update was accepted."""
        last_round = self.last_round.get(client)
        kept = self.memory.recall(client, last_round, self.config.method.client_memory(setting))
        if kept is None:
            raise StoreError(
                f"the memory of client {client} after round {last_round} is missing; restore the"
                " run's folder 'clients' from a copy, or start the run again"
            )
        return kept

    @cached_property
    def digest(self) -> str:
        """Identifies the run among others; it stays when the run is given more rounds."""
        return self.config.digest() if self.store is None else self.store.first_digest

    @property
    def stop_reason(self) -> str | None:
        """Why the run is finished or paused; None while it is neither."""
        reason = self.config.stop_reason(self.records)
        if reason is None and self.pause is not None and len(self.records) >= self.pause:
            reason = f"paused after round {len(self.records)}"
        return reason

    def initial_state(self) -> ServerState:
        """The state that training begins with."""
        if self._initial is not None:
            return self._initial
        model = self.build().to(self.config.engine.torch_dtype())
        params, buffers = read_state(model)
        return ServerState(0, params, self.config.train.shared_buffers(model, buffers))

    def check(self, known: dict[Hashable, tuple[Workload, Setting]] | None = None) -> None:
        """Checks that configuration, data and model go together.

        Called before anything is written, so that a mistake leaves no half-made directory behind.

        Args:
            known: What was found out by runs of the same data and architecture, to be added to.
        """
        known = {} if known is None else known
        config, method = self.config, self.config.method
        check_fits(config, self.federation)
        check_reference(config)
        config.engine.process_devices()
        config.augment.check_fits(self.federation.input_shape)
        key = (id(self.federation), self.architecture)
        if key not in known:
            workload = config.workload(self.federation, self.build())
            known[key] = workload, setting_of(workload, dict(workload.model.named_parameters()))
        workload, setting = known[key]
        if "features" in method.needs.before | method.needs.after:
            features_of(workload.model)
        try:
            check_method(config, workload.model, setting)
            method.server_memory(setting)
            method.payload(setting, 1)
        except TrainingError as error:
            if setting.has_head:
                raise
            kind = type(workload.model).__name__
            raise TrainingError(
                f"{error} ({kind}: head(features(x)) does not give its logits; name the layer that"
                f" does with_features(model, head='...'); {layers_in_words(workload.model)})"
            ) from None

    def train(self, callbacks: Sequence[Callback] = ()) -> None:
        """Trains until the run is finished, from where it stands."""
        train([self], callbacks)

    def add(self, state: ServerState, record: RoundRecord) -> None:
        """Adds a finished round; where the run has a directory, it is on disk afterwards."""
        self.state = state
        self.records.append(record)
        if self.store is not None:
            self.store.append(record)
            # Before the checkpoint: rounds after it are done again, and write the same model.
            if self.config.store.best and self.config.stop.best_round(self.records) == record.round:
                self.store.save_best(state)
            self.store.save_checkpoint(state, last=self.stop_reason is not None)

    def is_finished(self, data: Mapping[str, str]) -> bool:
        """Whether it was finished before, on data with these fingerprints."""
        if self.store is None or not self.store.finished:
            return False
        self._check_same(data)
        self.records = self.store.records()
        return True

    def resume(self, data: Mapping[str, str]) -> None:
        """Goes back to the newest checkpoint, or to the beginning; its directory is locked."""
        initial = self.initial_state()
        state = self._state if self.records else None
        if self.store is not None:
            if self.store.format < FORMAT:
                raise StoreError(
                    f"{self.store.path} was begun by an earlier version with other random streams;"
                    " it can be read, but not continued: start a new run"
                )
            state = self.store.load_checkpoint()
            if state is not None or self.store.records():
                self._check_same(data)
            self.records = self.store.go_back_to(0 if state is None else state.round)
        self.last_round = {
            client: record.round for record in self.records for client in record.attention
        }
        state = state or initial
        if state.params.keys() == initial.params.keys():
            # The model's order, which files lose: sums over parameters round by it.
            state = replace(state, params={name: state.params[name] for name in initial.params})
        self.state = state.to(self.config.engine.torch_device())

    def describe(self, data: Mapping[str, str], engine: Engine) -> None:
        """Records the run's data and model, and the engine that continues from here."""
        if self.store is None:
            return
        facts: dict[str, Any] = {}
        if not self.records:
            facts["identity"] = {**data, **self._model_identity()}
            facts["data"] = self.federation.about()
            if self.config.data is not None:
                facts["files"] = self.config.data.file_sizes(data_root())
        before, device = self.engines(), engine.workload.options.torch_device()
        how = {"name": engine.name, "device": device.type, "threads": torch.get_num_threads()}
        if not before or not how.items() <= before[-1].items():
            facts["engines"] = [*before, {"from_round": self.state.round, **how}]
        if facts:
            self.store.describe(**facts)

    def engines(self) -> list[dict[str, Any]]:
        """The engines that have trained the run so far, oldest first."""
        known = {} if self.store is None else read_description(self.store.path)
        return list(known.get("engines", []))

    def _check_same(self, data: Mapping[str, str]) -> None:
        assert self.store is not None  # noqa: S101 - asked of runs with a directory alone
        was = read_description(self.store.path).get("identity", {})
        check_same(was, {**data, **self._model_identity()}, self.store.path)

    def _model_identity(self) -> dict[str, str]:
        """The fingerprints of its model; weights that the seed alone decides are left out."""
        found, named = model_identity(self.build(), self.initial_state()), self.config.model
        if named is not None and named == named.untrained():
            del found["weights"]
        return found


def model_for(config: RunConfig, federation: Federation) -> nn.Module:
    """The model that a configuration names, with its initial weights."""
    assert config.model is not None  # noqa: S101 - checked by `load_federations`
    return build_model(config.model, federation.input_shape, federation.num_classes, config.seed)


def named_data(config: RunConfig) -> DataSource:
    """A run's data set; a run whose data or model only a program has is refused."""
    if config.data is None or config.model is None:
        raise ConfigError(
            "the run has no [data] or no [model]; if it was started from Python with own data or an"
            " own module, continue it there: fedproto.run(..., out=...)"
        )
    return config.data


def load_federations(configs: Iterable[RunConfig]) -> dict[DataSource, Federation]:
    """Loads the data of some runs and checks that all of them can run on it."""
    federations: dict[DataSource, Federation] = {}
    known: dict[Hashable, tuple[Workload, Setting]] = {}
    for config in configs:
        data = named_data(config)
        if data not in federations:
            try:
                federations[data] = data.load(data_root())
            except MemoryError as error:
                raise DataError(f"the data does not fit into memory: {error}") from None
        Run(config, federations[data]).check(known)
    return federations


def runs_from(
    stores: Sequence[RunStore], federations: Mapping[DataSource, Federation] | None = None
) -> list[Run]:
    """The runs of directories; the data of unfinished ones is loaded unless it is given.

    Finished runs are among them where their data is at hand.
    """
    if federations is None:
        federations = load_federations(store.config for store in stores if not store.finished)
    return [
        Run(store.config, federations[data], store=store)
        for store in stores
        if (data := store.config.data) is not None and data in federations
    ]


def train(
    runs: Sequence[Run],
    callbacks: Sequence[Callback] = (),
    *,
    engine_for: EngineFor | None = None,
    patience: float = 0.0,
) -> None:
    """Trains runs, each from where it stands, until all are finished.

    Args:
        runs: Those that share data, architecture and engine train together.
        callbacks: Follow the training.
        engine_for: Makes the engine, in place of the one that the configuration names.
        patience: Seconds to wait for another process that uses the same directories.
    """
    callback = CallbackList(callbacks)
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        config = run.config
        engine = config.engine, config.train.batch_norm
        groups.setdefault((id(run.federation), run.architecture, engine), []).append(run)
    try:
        for group in groups.values():
            _train_together(group, callback, engine_for, patience)
    finally:
        callback.on_end()


def _train_together(
    group: Sequence[Run], callback: Callback, engine_for: EngineFor | None, patience: float
) -> None:
    """Trains runs that share data, architecture and engine."""
    federation, configs = group[0].federation, [run.config for run in group]
    data: dict[str, str] = {}
    if any(run.store is not None for run in group):
        data = data_identity(federation)
    unfinished = [run for run in group if not run.is_finished(data)]
    if not unfinished:
        return
    with contextlib.ExitStack() as stack:
        for run in unfinished:
            if run.store is not None:
                stack.enter_context(run.store.folder.locked(patience))
        for run in unfinished:
            run.resume(data)
        model = unfinished[0].build()
        if engine_for is None:
            # Finished runs count too: those added to a sweep are trained like the others.
            before = [how for run in group for how in run.engines()[-1:]]
            engine = stack.enter_context(engine_of(configs, federation, model, callback, before))
        else:
            first = unfinished[0].config
            engine = engine_for(first, first.workload(federation, model, callback))
            stack.callback(engine.close)
        for run in unfinished:
            run.describe(data, engine)
        about_references = [check_reference(run.config) for run in unfinished]
        for caution in filter(None, [*about_references, *cautions(federation.about())]):
            callback.on_notice(caution)
        for _ in run_rounds(unfinished, engine):
            pass


@contextlib.contextmanager
def engine_of(
    configs: Sequence[RunConfig],
    federation: Federation,
    model: nn.Module,
    callback: Callback | None = None,
    before: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Engine]:
    """The engine of runs that train together, with the threads that suit it.

    Where the choice is free, runs keep the engines they began with.
    """
    first = configs[0]
    workload = first.workload(federation, model, callback)
    needs = {workload.needs | needs_of(one.method) for one in configs}
    choice = choose(first.engine, needs, demand_of(configs, federation), before)
    if first.engine.name == AUTO:
        workload.callback.on_notice(f"engine: {choice.name} ({choice.reason})")
    workload = replace(workload, options=replace(first.engine, name=choice.name))
    with threads(choice.threads), contextlib.closing(make_engine(choice.name, workload)) as engine:
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
