"""Scores of a round: the served model, the clients' own models, and a model fine-tuned on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.data.tasks import headline
from fedproto.engines.base import Engine, LocalJob
from fedproto.measures.base import finite
from fedproto.measures.scores import worst_tenth
from fedproto.rng import schedule
from fedproto.rounds.jobs import make_job
from fedproto.strategies.base import HeadAlone, Strategy
from fedproto.strategies.sections import Method
from fedproto.strategies.values import Setting
from fedproto.types import ClientUpdate, ServerState

if TYPE_CHECKING:
    from fedproto.rounds.run import Run

SERVED = ""
"""Name of the served model among those that are tested."""

AT_ONCE = 32
"""Clients whose models are tested together, where cohorts are smaller."""

PERSONAL, FINETUNED = "personal_", "finetuned_"
"""Prefixes of metrics; ``worst_tenth_`` in front for the mean over the worst tenth of clients."""


def evaluate_round(
    runs: Sequence[Run],
    states: Sequence[ServerState],
    engine: Engine,
    setting: Setting,
) -> list[dict[str, dict[str, float]]]:
    """Scores of every run after a round, of each model that it tests by name; none if not due."""
    tested = [models_to_test(run, state) for run, state in zip(runs, states, strict=True)]
    scores: list[dict[str, dict[str, float]]] = [{name: {} for name in one} for one in tested]
    due = [
        (run, models, found)
        for run, state, models, found in zip(runs, states, tested, scores, strict=True)
        if run.config.evaluate.due(state.round, run.config.schedule.rounds)
    ]
    federation = engine.workload.federation
    for prefix, indices in (("", federation.test_indices), ("validation_", federation.validation)):
        # All models at once: an engine may test them together.
        asked = [
            (model, found[name])
            for run, models, found in due
            if (
                len(indices) and run.config.wants_validation if prefix else run.config.evaluate.test
            )
            for name, model in models.items()
        ]
        metrics = engine.evaluate([model for model, _ in asked], indices) if asked else []
        for (_, own), values in zip(asked, metrics, strict=True):
            own |= {prefix + name: value for name, value in values.items()}
    for run, models, found in due:
        if run.config.evaluate.test and found[SERVED]:
            found[SERVED] |= _personal_scores(run, models[SERVED], engine, setting)
    return [{name: finite(own) for name, own in found.items()} for found in scores]


def models_to_test(run: Run, state: ServerState) -> dict[str, ServerState]:
    """The served model, under an empty name, and those of ``serve.also``."""
    others = {name: state.also.get(name, state) for name in run.config.serve.also}
    return {SERVED: state.served, **others}


def _personal_scores(
    run: Run, state: ServerState, engine: Engine, setting: Setting
) -> dict[str, float]:
    """Mean over clients of the scores of their own models; nothing for methods without any.

    Clients that never took part are tested with the served model, from which they would start.
    """
    needs = run.config.method.needs
    if not needs.personal_model and "personal" not in needs.hooks:
        return {}
    federation, elsewhere = engine.workload.federation, engine.clients_remember
    tested, scores = _tested(federation), list[Mapping[str, float]]()
    for part in [tested] if elsewhere else _in_parts(tested, run.config):
        jobs = [
            _job(
                run.config,
                state,
                client,
                federation,
                memory={} if elsewhere else run.memory_of(client, setting),
                last_round=run.last_round.get(client),
                run=run.digest if elsewhere else "",
            )
            for client in part
        ]
        scores += engine.evaluate_personal(jobs)
    return _summary(PERSONAL, scores)


def finetuned_scores(run: Run, state: ServerState, engine: Engine) -> dict[str, float]:
    """Mean scores on new clients of the served model, fine-tuned on each; nothing unless asked.

    New clients are those that never took part; all clients where every one did.
    """
    epochs = run.config.evaluate.finetune_epochs
    if not epochs:
        return {}
    if engine.clients_remember:  # over Flower, nodes train for the rounds alone
        engine = engine.substitute()
    federation = engine.workload.federation
    tested = _tested(federation)
    new = [client for client in tested if client not in run.last_round] or tested
    plain = Method(HeadAlone() if run.config.strategy.finetunes_head else Strategy())
    scores = list[Mapping[str, float]]()
    for part in _in_parts(new, run.config):
        jobs = [_job(run.config, state, one, federation, epochs, method=plain) for one in part]
        for one in engine.train(jobs):
            if isinstance(one, ClientUpdate):
                model = ServerState(state.round, one.params, one.buffers)
                scores += engine.evaluate([model], federation.clients[one.client].test)
    return finite(_summary(FINETUNED, scores))


def _in_parts(clients: Sequence[int], config: RunConfig) -> list[Sequence[int]]:
    """Clients in parts of a cohort or so: memory may not suffice for a model of each."""
    size = max(config.schedule.cohort, AT_ONCE)
    return [clients[start : start + size] for start in range(0, len(clients), size)]


def _tested(federation: Federation) -> list[int]:
    return [index for index, client in enumerate(federation.clients) if len(client.test)]


def _job(
    config: RunConfig,
    state: ServerState,
    client: int,
    federation: Federation,
    epochs: int = 0,
    **fields: Any,
) -> LocalJob:
    """A job from the served model, at the learning rate of the last round."""
    number = int(federation.train_sizes[client])
    order = schedule.BatchOrder(
        config.seed, state.round, client, number, config.train.batch_size, epochs
    )
    rate = config.train.lr_at(config.schedule.rounds - 1, config.schedule.rounds)
    return make_job(config, state.model, order, lr=rate, **fields)


def _summary(prefix: str, scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the clients that have a score, and over the worst tenth by the main score.

    In segmentation a client has none of the classes that are neither in its maps nor predicted.
    """
    names = dict.fromkeys(name for one in scores for name in one)
    taken = {name: [one[name] for one in scores if name in one] for name in names}
    means = {f"{prefix}{name}": float(np.mean(values)) for name, values in taken.items()}
    main = headline(names)
    worst = {f"worst_tenth_{prefix}{main}": worst_tenth(taken[main])} if main in taken else {}
    return means | worst
