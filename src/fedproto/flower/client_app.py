"""The client's side: identifies itself, trains and tests on its own data, which it never sends.

A SuperNode is configured by its owner with ``--node-config``:

    partition-id   the client's stable id in the federation (needed)
    local-client   which client of the data set found here it is; partition-id by default
    threads        PyTorch's threads; 0 leaves it to PyTorch

The environment variable FEDPROTO_DATA names the folder of the data here, FEDPROTO_STATE that of the
client's memory between its rounds, for strategies that need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedproto.config import RunConfig
from fedproto.data.base import data_root
from fedproto.data.federation import Client, Federation
from fedproto.disk.files import Folder
from fedproto.engines.base import laid_over
from fedproto.engines.reference import ReferenceEngine
from fedproto.engines.setting import read_state, setting_of
from fedproto.errors import ConfigError, DataError, FedprotoError, TrainingError
from fedproto.flower import wire
from fedproto.models.base import build_model
from fedproto.options import load_plugins
from fedproto.rng import Indices
from fedproto.store.checkpoints import ClientMemoryOnDisk
from fedproto.strategies.base import PERSONAL
from fedproto.strategies.values import initial_tensors
from fedproto.types import ClientFailure, ServerState, part

app = ClientApp()


def answering(
    work: Callable[[RecordDict, Context], RecordDict],
) -> Callable[[Message, Context], Message]:
    """Sends the answer that a function gives, or a refusal with the error that it raises."""

    def answer(message: Message, context: Context) -> Message:
        try:
            load_plugins()
            content = work(message.content, context)
        except FedprotoError as error:
            content = wire.encode_refusal(str(error))
        return Message(content, reply_to=message)

    return answer


@app.query("hello")
@answering
def hello(content: RecordDict, context: Context) -> RecordDict:
    """Describes this client and its samples."""
    client, here = data_here(wire.decode_config(content), context)
    own = here.clients[client]
    return wire.encode(
        wire.Hello(
            *(client, len(own.train), len(own.test)),
            *(here.num_classes, here.input_shape, here.task),
            len(here.validation_of(client)),
            here.class_names,
        )
    )


@app.train()
@answering
def train(content: RecordDict, context: Context) -> RecordDict:
    """Runs a job."""
    config = wire.decode_config(content)
    client, here = data_here(config, context)
    engine = engine_for(config, here)
    layout = layout_of(engine, config)
    setting = setting_of(engine.workload, layout.params)
    job = wire.decode_job(content, config, layout, setting)
    own, number = here.clients[client], job.batches.num_examples
    if job.client != client:
        raise ConfigError(f"the job is for client {job.client}; this is client {client}")
    if number > len(own.train):
        raise ConfigError(f"the job is for {number} samples; {len(own.train)} are here")
    if number < len(own.train):
        own = replace(own, train=spread(own.train, number))
        engine = engine_for(config, replace(here, clients=(*here.clients[:-1], own)))
    folder = state_folder()
    memory = ClientMemoryOnDisk(Folder(folder), job.run)
    declared = config.method.client_memory(setting)
    kept = memory.recall(client, job.last_round, declared)
    state = job.state.to(config.engine.torch_device())
    own_memory = initial_tensors(declared) if kept is None else kept
    (result,) = engine.train([replace(job, state=state, memory=own_memory)])
    if isinstance(result, ClientFailure):
        raise TrainingError(result.reason)
    if result.memory:
        folder.mkdir(parents=True, exist_ok=True)
        memory.save(client, job.state.round, result.memory, keep_from=job.keep_from)
    return wire.encode_update(result, began_anew=kept is None)


@app.evaluate()
@answering
def evaluate(content: RecordDict, context: Context) -> RecordDict:
    """Tests a model on this client's test or validation part."""
    config = wire.decode_config(content)
    client, here = data_here(config, context)
    engine = engine_for(config, here)
    test, state = wire.decode_test(content, layout_of(engine, config))
    if test.client != client:
        raise ConfigError(f"the test is for client {test.client}; this is {client}")
    samples = here.validation_of(client) if test.validation else here.clients[client].test
    if not 0 < test.num_examples <= len(samples):
        raise DataError(f"the test is for {test.num_examples} samples; {len(samples)} are here")
    if test.run is not None:  # with the tensors that stay on this client in place of the sent ones
        declared = config.method.client_memory(setting_of(engine.workload, state.params))
        memory = ClientMemoryOnDisk(Folder(state_folder()), test.run)
        kept = memory.recall(client, test.last_round, declared)
        state = laid_over(state, part(PERSONAL, kept or {}))
    tally = engine.tally(state, spread(samples, test.num_examples))
    assert tally is not None  # noqa: S101 - there are samples
    return wire.encode_tally(tally)


def engine_for(config: RunConfig, here: Federation) -> ReferenceEngine:
    """Trains and tests with a job's architecture."""
    assert config.model is not None  # noqa: S101 - checked by the wire format
    model = build_model(config.model, here.input_shape, here.num_classes, seed=0)
    return ReferenceEngine(config.workload(here, model.to(config.engine.torch_dtype())))


def layout_of(engine: ReferenceEngine, config: RunConfig) -> ServerState:
    """A state with the layout of the sent tensors, not their values."""
    params, buffers = read_state(engine.workload.model)
    return ServerState(0, params, config.train.shared_buffers(engine.workload.model, buffers))


def spread(indices: Indices, number: int) -> Indices:
    """A number of evenly spaced samples, independent of their order."""
    return indices[np.arange(number) * len(indices) // number]


def state_folder() -> Path:
    """Where this client keeps its memory between rounds."""
    return Path(os.environ.get("FEDPROTO_STATE") or Path.home() / ".local" / "state" / "fedproto")


def data_here(config: RunConfig, context: Context) -> tuple[int, Federation]:
    """This client's id, and the data found here, with its share alone under that id."""
    threads = _number(context, "threads", 0)
    if threads:
        torch.set_num_threads(threads)
    client = _number(context, "partition-id", -1)
    if client < 0:
        raise ConfigError("the node has no id: start it with --node-config 'partition-id=…'")
    local = _number(context, "local-client", client)
    assert config.data is not None  # noqa: S101 - checked by the wire format
    federation = config.data.load(data_root())
    if local >= len(federation.clients):
        raise ConfigError(
            f"the data here has clients 0 to {len(federation.clients) - 1}, not {local};"
            " set partition-id or local-client in --node-config"
        )
    nothing = np.empty(0, dtype=np.int64)
    validation = federation.validation_of(local)
    return client, replace(
        federation,
        clients=(*([Client(nothing, nothing)] * client), federation.clients[local]),
        validation=validation,
        validation_owner=np.full(len(validation), client),
    )


def _number(context: Context, name: str, default: int) -> int:
    value = context.node_config.get(name, default)
    if type(value) is not int or (value < 0 and value != default):
        raise ConfigError(f"--node-config {name} must be an integer, not {value!r}")
    return value
