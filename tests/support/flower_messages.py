"""Jobs and honest answers to them, as messages."""

from __future__ import annotations

import dataclasses

from flwr.app import RecordDict

from fedproto import FedProto
from fedproto.engines.base import LocalJob
from fedproto.flower import wire
from fedproto.flower.wire import UnreadableError
from fedproto.rounds.aggregate import reason_to_refuse
from fedproto.strategies.sections import Method
from fedproto.types import ClientUpdate
from helpers import job_of, make_setting, make_state, make_update

SETTING = make_setting()


def job_for(strategy=None, client: int = 4) -> LocalJob:
    job = job_of(Method(strategy or FedProto()), make_state(), client, 10)
    return dataclasses.replace(job, run="abc123")


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
    return reason_to_refuse(update, job, SETTING) or update
