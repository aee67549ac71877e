"""A federation whose data stays with its clients: the server knows sizes and shapes only.

Cohorts are drawn by size, so all sizes are needed before the first round. They are kept in the
run directory; when a run goes on, a client may be absent, but not come back with other numbers.

Sizes are claims. They decide how often a client is drawn, its weight, the counts that it may report
and its part in the test, so none is believed beyond a multiple of the federation's median: a client
that claims more is asked to train and to test on that many of its samples.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedproto.config import RunConfig, digest_of
from fedproto.data.clients import Client
from fedproto.data.federation import Federation
from fedproto.data.samples import Samples
from fedproto.data.tasks import task_named
from fedproto.disk.files import explained, is_there, write_atomically
from fedproto.disk.integrity import DamagedError, read_json, sealed, unsealed
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.flower.nodes import Nodes
from fedproto.flower.wire import Hello
from fedproto.rng import Indices

CLAIMS = {"num_train": "training", "num_test": "test", "num_validation": "validation"}
"""What a client tells of its size, and what each is called."""


class RemoteSamples(Samples):
    """Samples that the server does not have."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """There are none here."""
        del indices
        raise DataError("the samples are with the clients; the server has none of them")

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        """Nothing to move."""
        del device, dtype
        return self


def enrol(config: RunConfig, nodes: Nodes, folder: Path) -> Federation:
    """The federation of the clients that are connected, or of those enrolled before."""
    path = folder / "clients.json"
    data = digest_of({"data": config.to_dict()["data"]})
    enrolled = _read(path, data)
    if data in enrolled:
        return federation_of(config, _capped(enrolled[data], config, nodes))
    number = config.flower.clients or getattr(config.data, "clients", None)
    if not isinstance(number, int):
        raise ConfigError(
            "flower.clients is missing: say how many clients there are, or test on the server"
            " (flower.evaluate_on = 'server') where it has the data"
        )
    ready = nodes.wait_for(range(number), config.flower.wait)
    missing = sorted(set(range(number)) - ready)
    if missing:
        raise DataError(
            f"clients {', '.join(map(str, missing))} did not connect within"
            f" {config.flower.wait:g} s; the first round needs the sizes of all {number}: start"
            " them, or wait longer (flower.wait)"
        )
    hellos = [nodes.hello_of(client) for client in range(number)]
    federation = federation_of(config, _capped(hellos, config, nodes))
    enrolled[data] = hellos
    with explained(path):
        tables = {name: [asdict(one) for one in each] for name, each in enrolled.items()}
        write_atomically(path, sealed(tables))
    return federation


def _capped(hellos: list[Hello], config: RunConfig, nodes: Nodes) -> list[Hello]:
    """The claims, each cut to `flower.max_claim` times the median of those that claim any."""
    times = config.flower.max_claim
    if not times:
        return hellos
    caps = {}
    for name in CLAIMS:
        claims = [claim for hello in hellos if (claim := getattr(hello, name))]
        # The lower of two in the middle: one of two clients alone does not raise it.
        caps[name] = max(1, int(times * median_low(claims))) if claims else 0
    believed = []
    for hello in hellos:
        cut: dict[str, Any] = {
            name: cap for name, cap in caps.items() if getattr(hello, name) > cap
        }
        believed.append(replace(hello, **cut))
        for name, cap in cut.items():
            nodes.note(
                f"client {hello.client} claims {getattr(hello, name):,} {CLAIMS[name]} samples and"
                f" uses {cap:,}: flower.max_claim is {times:g} times the median"
            )
    return believed


def federation_of(config: RunConfig, hellos: list[Hello]) -> Federation:
    """A federation known by what its clients told of themselves, by client id."""
    first = hellos[0]
    for hello in hellos:
        same = (hello.num_classes, hello.input_shape, hello.task, hello.class_names)
        if same != (first.num_classes, first.input_shape, first.task, first.class_names):
            raise DataError(
                f"client {hello.client} has {hello.num_classes} classes of inputs"
                f" {hello.input_shape} ({hello.task}), client {first.client} has"
                f" {first.num_classes} of {first.input_shape} ({first.task}); all clients must"
                " agree"
            )
    task_named(first.task)
    clients, held, end = [], [], 0
    for hello in hellos:
        start, middle = end, end + hello.num_train
        tested = middle + hello.num_test
        end = tested + hello.num_validation
        clients.append(Client(np.arange(start, middle), np.arange(middle, tested)))
        held.append(np.arange(tested, end))
    return Federation(
        name=str(getattr(config.data, "folder", "") or "data of the clients"),
        samples=RemoteSamples(end),
        clients=tuple(clients),
        num_classes=first.num_classes,
        input_shape=first.input_shape,
        task=first.task,
        validation=np.concatenate(held),
        validation_owner=np.repeat(np.arange(len(held)), [len(part) for part in held]),
        class_names=first.class_names,
    )


def _read(path: Path, data: str) -> dict[str, list[Hello]]:
    """Who enrolled, by the digest of the data they were asked for.

    A file from before there were fingerprints holds the clients of `data`.
    """
    if not is_there(path):
        return {}
    try:
        with explained(path):
            content = path.read_bytes()
        tables = {data: read_json(content)} if content[:1] == b"[" else unsealed(content)[0]
        return {
            name: [
                Hello(
                    **{
                        **one,
                        "input_shape": tuple(one["input_shape"]),
                        "class_names": tuple(one.get("class_names", ())),
                    }
                )
                for one in hellos
            ]
            for name, hellos in tables.items()
        }
    except (DamagedError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {error}; restore it from a copy") from None
