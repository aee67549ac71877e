"""Who does what in a round: cohort, stragglers and jobs, with all that the jobs need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.engines.base import Engine, LocalJob
from fedproto.engines.layers import statistics_names
from fedproto.engines.setting import setting_of
from fedproto.errors import ConfigError, StoreError
from fedproto.rng import Purpose, schedule, torch_seed
from fedproto.rounds.client_memory import remembered
from fedproto.rounds.runs import Run
from fedproto.strategies.base import Setting, initial_tensors
from fedproto.types import POOLED, ServerState, Tensors


@dataclass(frozen=True)
class Roster:
    """Who takes part in a round, and the batches of each client that trains."""

    cohort: list[int]
    stragglers: list[int]
    dropped: list[int]
    batches: list[schedule.BatchOrder]


@dataclass(frozen=True)
class RoundPlan:
    """The jobs of a round, and who is in its cohort."""

    roster: Roster
    jobs: list[LocalJob]


def check_fits(config: RunConfig, federation: Federation) -> None:
    """Checks that a configuration can run on a federation."""
    if config.schedule.cohort > len(federation.clients):
        raise ConfigError(
            f"schedule.cohort must be at most {len(federation.clients)}, the number of clients in"
            f" {federation.name}, not {config.schedule.cohort}"
        )
    method, train = config.method, config.train
    strategy = method.strategy
    if strategy.plain_sgd and not train.memoryless:
        raise ConfigError(
            f"strategy {type(strategy).__name__} is made for plain gradient descent on the"
            " clients; set train.optimizer = 'sgd' or 'sam' and train.momentum = 0"
        )
    if train.epochs < strategy.least_epochs:
        raise ConfigError(
            f"strategy {type(strategy).__name__} needs train.epochs of at least"
            f" {strategy.least_epochs}, not {train.epochs}"
        )
    config.aggregate.check_fits(
        config.schedule.cohort, pooled=strategy.pooled, weighs_tensors=method.weighs_rows
    )


def remember_all(runs: Sequence[Run], engine: Engine) -> Setting:
    """Gives runs that begin their memory, and checks that of others; returns their setting."""
    setting = setting_of(engine.workload, runs[0].state.params if runs else {})
    for run in runs:
        run.config.method.check(setting)
        _check_frozen(run.config, engine)
        run.state = with_memory(run.config, run.state, setting)
    return setting


def _check_frozen(config: RunConfig, engine: Engine) -> None:
    """Refuses frozen models whose batch-norm statistics nobody has."""
    local = config.train.batch_norm == "local" and statistics_names(engine.workload.model)
    if local and config.method.needs.frozen:
        raise ConfigError(
            f"strategy {type(config.strategy).__name__} compares with frozen models, whose"
            " batch-norm statistics are not sent with train.batch_norm = 'local'; use 'average'"
        )


def with_memory(config: RunConfig, state: ServerState, setting: Setting) -> ServerState:
    """A state with all that strategy and sections keep; initial where a run begins.

    Raises:
        StoreError: If a state from later on lacks something or holds it in another shape.
    """
    declared = config.method.server_memory(setting)
    for name, one in declared.items():
        kept = state.memory.get(name)
        if kept is None and (state.round == 0 or one.initial is None):
            continue
        if kept is None or tuple(kept.shape) != one.shape or kept.dtype != one.dtype:
            raise StoreError(
                f"the checkpoint of round {state.round} does not hold '{name}' as"
                f" {type(config.strategy).__name__} keeps it; start the run again"
            )
    device = next(iter(state.params.values())).device if state.params else "cpu"
    initial = {name: one.to(device) for name, one in initial_tensors(declared).items()}
    return replace(state, memory={**initial, **state.memory})


def plan_round(
    run: Run, federation: Federation, setting: Setting, *, clients_remember: bool = False
) -> RoundPlan:
    """Cohort, stragglers and jobs of a run's next round.

    With `clients_remember`, clients keep their memory themselves, out of the run's reach.
    """
    config, round_, method = run.config, run.state.round, run.config.method
    roster = roster_of(config, round_, federation)
    augment, lr = config.augmentation, config.train.lr_at(round_, config.schedule.rounds)
    broadcast, declared = method.broadcast(run.state, setting), method.client_memory(setting)

    def memory_of(client: int, last_round: int | None) -> Tensors:
        if clients_remember:
            return {}
        kept = remembered(run.memory, client, last_round, declared)
        if kept is None:
            raise StoreError(
                f"the memory of client {client} after round {last_round} is missing; restore the"
                " run's folder 'clients' from a copy, or start the run again"
            )
        return kept

    jobs = [
        LocalJob(
            client=batches.client,
            state=run.state,
            method=method,
            batches=batches,
            train=config.train,
            augment=augment,
            lr=lr,
            seed=torch_seed(config.seed, Purpose.INSIDE_MODEL, round_, batches.client),
            secret=torch_seed(config.seed, Purpose.SECRET, batches.client),
            broadcast=broadcast,
            memory=memory_of(batches.client, run.last_round.get(batches.client)),
            run=run.digest if clients_remember else "",
            last_round=run.last_round.get(batches.client),
            keep_from=config.store.earliest_return(round_),
        )
        for batches in roster.batches
    ]
    return RoundPlan(roster, jobs)


def roster_of(config: RunConfig, round_: int, federation: Federation) -> Roster:
    """Who takes part in a round and trains how much: a function of the configuration alone."""
    strategy, seed, options = config.strategy, config.seed, config.train
    sizes = federation.train_sizes
    cohort = schedule.cohort(seed, round_, sizes, config.schedule.cohort, config.schedule.sampling)

    def batches(
        client: int, num_examples: int, epochs: int, max_steps: int = 0
    ) -> schedule.BatchOrder:
        return schedule.BatchOrder(
            seed, round_, client, num_examples, options.batch_size, epochs, max_steps
        )

    if strategy.pooled:
        budget = sum(batches(client, int(sizes[client]), options.epochs).steps for client in cohort)
        total = int(sizes.sum())
        epochs = math.ceil(budget / math.ceil(total / options.batch_size))
        return Roster([], [], [], [batches(POOLED, total, epochs, budget)])

    slow = schedule.stragglers(seed, round_, cohort, config.schedule.delta)
    dropped = [] if config.partial_work else slow
    epochs_of = {
        client: schedule.partial_epochs(
            seed, round_, client, options.epochs, config.schedule.least_epochs
        )
        if client in slow
        else options.epochs
        for client in cohort
    }
    taking_part = [
        batches(client, int(sizes[client]), epochs_of[client])
        for client in cohort
        if client not in dropped
    ]
    return Roster(cohort, slow, dropped, taking_part)
