"""How a federation over Flower deals with clients that are slow, absent or wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedproto.options import Options, option


@dataclass(frozen=True)
class FlowerOptions(Options):
    """The server's patience with real clients; a simulation has no use for it."""

    deadline: float = option(600.0, "seconds a client has to answer a job", above=0)
    wait: float = option(
        120.0, "seconds to wait for clients that are not connected; once per client", at_least=0
    )
    min_clients: int = option(
        1, "clients needed for a round: connected, then answering", at_least=1
    )
    too_few: Literal["skip", "stop"] = option(
        "skip", "with fewer clients than that: skip the round, or stop the run (to be resumed)"
    )
    suspend_after: int = option(
        2, "failures in a row after which a client is left out for a while; 0 for never", at_least=0
    )
    suspend_rounds: int = option(
        5, "rounds that it is left out; twice as many every time after", at_least=1
    )
    defence: Literal["none", "clip", "median", "trimmed-mean", "multi-krum", "geometric-median"] = (
        option(
            "clip",
            "what bears hostile clients, unless [aggregate] is given: see docs/threat-model.md",
        )
    )
    evaluate_on: Literal["clients", "server"] = option(
        "clients", "who tests the model: every client on its test part, or the server"
    )
    clients: int | None = option(
        None, "number of clients, for data that the server does not have", at_least=1
    )
    max_examples: int = option(
        10_000_000, "more samples than this no client is believed to have", at_least=1
    )
