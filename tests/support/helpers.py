"""Small builders that several test modules use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedproto import STRATEGIES, Strategy
from fedproto.callback import Callback
from fedproto.config import RunConfig
from fedproto.config.options import ScheduleOptions
from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine, read_state
from fedproto.engines.training import TrainOptions
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds import Run, run_rounds, runs_from
from fedproto.rounds import train as train_all
from fedproto.rounds.aggregate import combine_updates
from fedproto.rounds.jobs import RoundPlan, plan_round
from fedproto.store import RunStore
from fedproto.strategies.aggregation import AggregateOptions
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Setting, initial_tensors
from fedproto.types import ClientUpdate, Prototypes, RoundRecord, ServerState, Tensors


def every_strategy() -> list[Strategy]:
    """One instance of every registered strategy, with its default options."""
    return [STRATEGIES.get(name)() for name in STRATEGIES.names()]


def strategy_name(strategy: Strategy) -> str:
    return STRATEGIES.name_of(type(strategy))


def engine_for(federation: Federation, model: torch.nn.Module, **options) -> ReferenceEngine:
    return ReferenceEngine(
        Workload(federation, model, task_named(federation.task), EngineOptions(**options))
    )


def config_of(
    strategy: Strategy,
    *,
    rounds: int = 3,
    cohort: int = 4,
    delta: float = 0.5,
    seed: int = 0,
    partial_work: bool | None = None,
    sampling: str = "size",
    **train,
) -> RunConfig:
    options = {"epochs": 3, "batch_size": 4, "lr": 0.1} | train
    return RunConfig(
        strategy=strategy,
        seed=seed,
        train=TrainOptions(**options),
        schedule=ScheduleOptions(
            rounds=rounds,
            cohort=cohort,
            delta=delta,
            partial_work=partial_work,
            sampling=sampling,
        ),
    )


class Notices(Callback):
    """Collects notices."""

    def __init__(self, texts: list[str] | None = None) -> None:
        self.texts = [] if texts is None else texts

    def on_notice(self, text: str) -> None:
        self.texts.append(text)


class AfterRound(Callback):
    """Calls a function of configuration and record after every round."""

    def __init__(self, function) -> None:
        self.on_round = function


def simulate(stores: Sequence[RunStore], *callbacks: Callback, **options) -> None:
    """Trains the runs of some directories."""
    train_all(runs_from(stores), callbacks, **options)


def run_from(config: RunConfig, state: ServerState) -> Run:
    """A run that begins with a state; the engine that trains it knows the data."""
    return Run(config, None, initial=state)


def begin(config: RunConfig, model: torch.nn.Module) -> Run:
    return run_from(config, ServerState(0, *read_state(model)))


def planned(run: Run, federation: Federation) -> RoundPlan:
    """A run's next round, for a model whose features have six channels."""
    setting = Setting(
        run.state.params,
        federation.num_classes,
        len(federation.clients),
        (6, 1),
    )
    return plan_round(run, federation, setting)


def aggregated(
    strategy: Strategy,
    state: ServerState,
    updates: Sequence[ClientUpdate],
    setting: Setting,
    options: AggregateOptions | None = None,
) -> tuple[ServerState, torch.Tensor]:
    """The next state and the clients' weights, without the guard."""
    found = combine_updates(
        Method(strategy, aggregate=options or AggregateOptions()), state, updates, setting
    )
    assert found is not None
    return found[0], torch.tensor(found[1], dtype=torch.float64)


def train_runs(
    runs: Sequence[Run], federation: Federation, model: torch.nn.Module
) -> list[tuple[Run, RoundRecord]]:
    return list(run_rounds(runs, engine_for(federation, model)))


def train(strategy: Strategy, federation: Federation, model: torch.nn.Module, **options) -> Run:
    """A whole small run."""
    run = begin(config_of(strategy, **options), model)
    train_runs([run], federation, model)
    return run


def same_tensors(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def make_update(
    client: int,
    num_examples: int = 10,
    seed: int = 0,
    counts: Sequence[int] = (5, 5),
    epochs: int = 1,
) -> ClientUpdate:
    """A random update of a model with one weight matrix, a batch norm and its counter."""
    generator = torch.Generator().manual_seed(seed + client)
    count = torch.tensor(counts)
    mean = torch.rand(len(counts), 3, generator=generator)
    return ClientUpdate(
        client=client,
        num_examples=num_examples,
        params={
            "weight": torch.randn(len(counts), 3, generator=generator),
            "bias": torch.randn(len(counts), generator=generator, dtype=torch.float64),
        },
        buffers={
            "running_var": torch.rand(3, generator=generator),
            "num_batches_tracked": torch.tensor(client),
        },
        train_loss=0.5 if epochs else None,
        epochs_done=epochs,
        steps=2 * epochs,
        lr=0.1,
        payload={
            SUM: mean * count.unsqueeze(-1),
            COUNT: count,
            MARGIN: torch.where(count > 0, torch.rand(len(counts), generator=generator), 0),
        },
    )


def job_of(
    method: Method, state: ServerState, client: int, num_examples: int, epochs: int = 1
) -> LocalJob:
    batches = BatchOrder(0, state.round, client, num_examples, 5, epochs)
    return LocalJob(client, state, method, batches, TrainOptions(), lr=0.1, seed=0)


def make_state(round_: int = 1, seed: int = 100, counts: Sequence[int] = (5, 5)) -> ServerState:
    """A state of that model; from the second round on with aggregate prototypes."""
    update = make_update(0, seed=seed, counts=counts)
    memory = {SUM: update.payload[SUM].double(), COUNT: update.payload[COUNT]}
    return ServerState(round_, update.params, update.buffers, memory if round_ else {})


def make_setting(counts: Sequence[int] = (5, 5), clients: int = 20) -> Setting:
    """What declarations depend on, for that model."""
    params = make_update(0, counts=counts).params
    features = (3, 1)
    return Setting(params, len(counts), clients, features, head=tuple(params))


def prototypes_of(source: ClientUpdate | ServerState) -> Prototypes:
    """The prototypes that an update sends or a state keeps."""
    tensors = source.payload if isinstance(source, ClientUpdate) else source.memory
    return Prototypes(tensors[SUM], tensors[COUNT])


def state_for(strategy: Strategy, round_: int = 1) -> ServerState:
    """A state with the memory that a strategy keeps."""
    state = make_state(round_)
    declared = strategy.server_memory(make_setting())
    kept = {
        name: one.to(declared[name].dtype) for name, one in state.memory.items() if name in declared
    }
    return replace(state, memory={**initial_tensors(declared), **kept})


def update_for(strategy: Strategy, client: int, num_examples: int = 10, **options) -> ClientUpdate:
    """An update with the payload that a strategy declares, within its bounds."""
    update = make_update(client, num_examples, **options)
    return replace(update, payload=_payload_for(strategy, update))


def _payload_for(strategy: Strategy, update: ClientUpdate) -> Tensors:
    generator = torch.Generator().manual_seed(50 + update.client)
    payload = {}
    for name, one in strategy.payload(make_setting(), update.num_examples).items():
        if name in update.payload:
            payload[name] = update.payload[name]
            continue
        low, high = max(one.low, -1.0), min(one.high, 1.0)
        drawn = torch.rand(one.shape, generator=generator, dtype=torch.float64)
        payload[name] = (low + (high - low) * drawn).to(one.dtype)
    return payload


def wait_until(true: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Until something is true, of a process or a file."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, f"waited in vain for {what}"
        time.sleep(0.2)


class Clock:
    """In place of `time`: every look at it is a minute later."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        self._now += 60
        return self._now

    def sleep(self, seconds: float) -> None:
        del seconds
