"""The jobs of a round: cohort, stragglers, and what each client is asked to train."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.disk.files import at_once
from fedproto.engines.base import Engine, LocalJob
from fedproto.engines.layers import statistics_names
from fedproto.engines.setting import setting_of
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.rng import Purpose, schedule, torch_seed
from fedproto.rounds.claims import DRAWN, believed_sizes
from fedproto.strategies.values import Setting, initial_tensors
from fedproto.types import POOLED, ServerState, Tensors

if TYPE_CHECKING:
    from fedproto.rounds.run import Run


@dataclass(frozen=True)
class RoundPlan:
    """The cohort of a round; the batches of the clients that train, and their jobs once made."""

    cohort: list[int]
    stragglers: list[int]
    dropped: list[int]
    orders: list[schedule.BatchOrder]
    jobs: list[LocalJob] = field(default_factory=list)


def check_fits(config: RunConfig, federation: Federation) -> None:
    """Checks that a configuration can run on a federation."""
    if config.schedule.cohort > len(federation.clients):
        raise ConfigError(
            f"schedule.cohort must be at most {len(federation.clients)}, the number of clients in"
            f" {federation.name}, not {config.schedule.cohort}"
        )
    if config.store.best and not (config.evaluate.validation and len(federation.validation)):
        raise ConfigError(
            "store.best chooses by validation scores; set data.validation to the share of every"
            " client that the server keeps, such as 0.1, and evaluate.validation = true"
        )
    if not (config.evaluate.test or (config.evaluate.validation and len(federation.validation))):
        raise ConfigError(
            "evaluate.test = false needs validation data; set data.validation"
            " to the share of every client that the server keeps, such as 0.1"
        )
    if not federation.train_sizes.all():
        client = int(federation.train_sizes.argmin())
        raise DataError(
            f"client {client} of {federation.name} has no samples to train; leave it out"
        )
    strategy, train = config.strategy, config.train
    if strategy.plain_sgd and not train.memoryless:
        raise ConfigError(
            f"strategy {type(strategy).__name__} assumes plain gradient descent on the"
            " clients; set train.optimizer = 'sgd' or 'sam' and train.momentum = 0"
        )
    if train.epochs < strategy.least_epochs:
        raise ConfigError(
            f"strategy {type(strategy).__name__} needs train.epochs of at least"
            f" {strategy.least_epochs}, not {train.epochs}"
        )


def prepare(runs: Sequence[Run], engine: Engine) -> Setting:
    """Checks runs against model and engine, and gives them their server memory.

    Returns:
        The setting that the runs share.
    """
    setting = setting_of(engine.workload, runs[0].state.params if runs else {})
    for run in runs:
        check_method(run.config, engine.workload.model, setting)
        run.state = with_memory(run.config, run.state, setting)
    return setting


def check_method(config: RunConfig, model: nn.Module, setting: Setting) -> None:
    """Checks that a method and its training can have such a model."""
    config.method.check(setting)
    local = config.train.batch_norm == "local" and statistics_names(model)
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
    begun = {name.rpartition("/")[0] for name in state.memory}  # of a model, all or nothing is kept
    for name, one in declared.items():
        kept, later = state.memory.get(name), name.rpartition("/")[0] not in begun
        if kept is None and (state.round == 0 or (one.initial is None and later)):
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
    plan = participants(config, round_, federation)
    shared: dict[str, Any] = {
        "lr": config.train.lr_at(round_, config.schedule.rounds),
        "broadcast": method.broadcast(run.state, setting),
        "run": run.digest if clients_remember else "",
        "keep_from": config.store.earliest_return(round_),
    }
    received = run.state.model
    kept: list[Tensors] = [{} for _ in plan.orders]
    if method.client_memory(setting) and not clients_remember:
        kept = at_once(lambda one: run.memory_of(one.client, setting), plan.orders)
    jobs = [
        make_job(
            config, received, one, memory=own, last_round=run.last_round.get(one.client), **shared
        )
        for one, own in zip(plan.orders, kept, strict=True)
    ]
    return replace(plan, jobs=jobs)


def make_job(
    config: RunConfig, state: ServerState, batches: schedule.BatchOrder, **fields: Any
) -> LocalJob:
    """A job under a configuration; `fields` are its other fields, or replace the usual ones."""
    usual: dict[str, Any] = {
        "method": config.method,
        "train": config.train,
        "augment": config.augmentation,
        "seed": torch_seed(config.seed, Purpose.INSIDE_MODEL, state.round, batches.client),
    }
    return LocalJob(client=batches.client, state=state, batches=batches, **usual | fields)


def participants(config: RunConfig, round_: int, federation: Federation) -> RoundPlan:
    """The plan of a round without its jobs: a function of the configuration alone."""
    strategy, seed, options = config.strategy, config.seed, config.train
    sizes = federation.train_sizes
    drawn_by = believed_sizes(sizes, config.aggregate.max_claim, DRAWN)
    cohort = schedule.cohort(
        seed, round_, drawn_by, config.schedule.cohort, config.schedule.sampling
    )

    def batches(client: int, number: int, epochs: int, max_steps: int = 0) -> schedule.BatchOrder:
        place = seed, round_, client, number
        return schedule.BatchOrder(*place, options.batch_size, epochs, max_steps)

    if strategy.pooled:
        budget = sum(batches(client, int(sizes[client]), options.epochs).steps for client in cohort)
        total = int(sizes.sum())
        epochs = math.ceil(budget / math.ceil(total / options.batch_size))
        return RoundPlan([], [], [], [batches(POOLED, total, epochs, budget)])

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
    orders = [
        batches(client, int(sizes[client]), epochs_of[client])
        for client in cohort
        if client not in dropped
    ]
    return RoundPlan(cohort, slow, dropped, orders)
