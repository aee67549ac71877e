"""Scores of the clients' own models, and of a fine-tuned model on clients that never took part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedproto.data.federation import Federation
from fedproto.data.tasks import headline
from fedproto.engines.base import Engine, LocalJob
from fedproto.errors import ConfigError
from fedproto.rng import Purpose, schedule, torch_seed
from fedproto.rounds.client_memory import remembered
from fedproto.rounds.runs import Run
from fedproto.strategies.base import Setting, Strategy
from fedproto.strategies.sections import Method
from fedproto.types import ClientUpdate, ServerState, Tensors

PERSONAL, FINETUNED = "personal_", "finetuned_"
"""Prefixes of metrics; ``worst_tenth_`` in front for the mean over the worst tenth of clients."""


def personal_scores(
    run: Run,
    state: ServerState,
    last_round: Mapping[int, int],
    federation: Federation,
    engine: Engine,
    setting: Setting,
) -> dict[str, float]:
    """Mean over clients of the scores of their own models; nothing for methods without any.

    Clients that never took part, which `last_round` does not name, are tested with the served
    model, from which they would start.
    """
    needs = run.config.method.needs
    if not needs.personal_model and "personal" not in needs.hooks:
        return {}
    declared = run.config.method.client_memory(setting)
    jobs = []
    for client in _tested(federation):
        last = last_round.get(client)
        memory: Tensors = {}
        if not engine.clients_remember and last is not None:
            memory = remembered(run.memory, client, last, declared) or {}
        job = _job(run, state, client, federation, run.config.method, epochs=0)
        digest = run.digest if engine.clients_remember else ""
        jobs.append(replace(job, memory=memory, last_round=last, run=digest))
    return _summary(PERSONAL, engine.evaluate_personal(jobs))


def finetuned_scores(
    run: Run,
    state: ServerState,
    last_round: Mapping[int, int],
    federation: Federation,
    engine: Engine,
) -> dict[str, float]:
    """Mean scores on new clients of the served model, fine-tuned on each; nothing unless asked.

    New clients are those that never took part; all clients where every one did.
    """
    epochs = run.config.evaluate.finetune_epochs
    if not epochs:
        return {}
    if not engine.holds_data:
        raise ConfigError(
            "evaluate.finetune_epochs needs the clients' data; set it to 0 over Flower"
        )
    tested = _tested(federation)
    new = [client for client in tested if client not in last_round] or tested
    plain = Method(Strategy())
    jobs = [_job(run, state, client, federation, plain, epochs) for client in new]
    updates = [one for one in engine.train(jobs) if isinstance(one, ClientUpdate)]
    scores = [
        engine.evaluate(
            [ServerState(state.round, one.params, one.buffers)], federation.clients[one.client].test
        )[0]
        for one in updates
    ]
    return _summary(FINETUNED, scores)


def _tested(federation: Federation) -> list[int]:
    return [index for index, client in enumerate(federation.clients) if len(client.test)]


def _job(
    run: Run, state: ServerState, client: int, federation: Federation, method: Method, epochs: int
) -> LocalJob:
    config, number = run.config, int(federation.train_sizes[client])
    size = config.train.batch_size
    return LocalJob(
        client=client,
        state=state,
        method=method,
        batches=schedule.BatchOrder(config.seed, state.round, client, number, size, epochs),
        train=config.train,
        augment=config.augmentation,
        lr=config.train.lr_at(config.schedule.rounds - 1, config.schedule.rounds),
        seed=torch_seed(config.seed, Purpose.INSIDE_MODEL, state.round, client),
    )


def _summary(prefix: str, scores: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means over clients, and over the worst tenth of them by the task's main score."""
    found: Sequence[Mapping[str, float]] = [one for one in scores if one]
    if not found:
        return {}
    means = {f"{prefix}{name}": float(np.mean([one[name] for one in found])) for name in found[0]}
    main = headline(found[0])
    worst = np.sort([one[main] for one in found])[: max(1, len(found) // 10)]
    return {**means, f"worst_tenth_{prefix}{main}": float(worst.mean())}
