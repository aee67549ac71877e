"""Jobs and honest answers to them, as messages."""

from __future__ import annotations

import dataclasses

from flwr.app import RecordDict

from fedproto import FedProto
from fedproto.engines.base import LocalJob
from fedproto.engines.training import TrainOptions
from fedproto.flower import wire
from fedproto.flower.wire import UnreadableError
from fedproto.rng.schedule import BatchOrder
from fedproto.rounds.aggregate import Expected, reason_to_refuse
from fedproto.strategies.sections import Method
from fedproto.types import ClientUpdate
from helpers import make_setting, make_state, make_update

SETTING = make_setting()


def job_for(strategy=None, client: int = 4) -> LocalJob:
    return LocalJob(
        client=client,
        state=make_state(),
        method=Method(strategy or FedProto()),
        batches=BatchOrder(0, 1, client, 10, 5, 1),
        train=TrainOptions(),
        lr=0.1,
        seed=0,
        run="abc123",
    )


def honest(**changes) -> ClientUpdate:
    update = make_update(4, counts=(10, 0))
    return dataclasses.replace(update, **changes)


def received(content: RecordDict, job: LocalJob | None = None) -> ClientUpdate | str:
    """The update as the server uses it, or why it does not."""
    job = job or job_for()
    try:
        update, _ = wire.decode_update(content, job, SETTING)
    except UnreadableError as error:
        return str(error)
    return reason_to_refuse(update, Expected.of(job, SETTING)) or update
