"""A run in progress, and why it is over once it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fedproto.config import RunConfig, StopOptions
from fedproto.data.tasks import headline, lower_is_better
from fedproto.rounds.client_memory import ClientMemory, MemoryInRAM
from fedproto.types import RoundRecord, ServerState


@dataclass
class Run:
    """A run in progress.

    Attributes:
        memory: What its clients keep between their rounds.
        last_round: The last round in which a client's update was accepted, by client.
        began_as: The configuration's digest when the run began; None for the present one.
    """

    config: RunConfig
    state: ServerState
    records: list[RoundRecord] = field(default_factory=list)
    memory: ClientMemory = field(default_factory=MemoryInRAM)
    last_round: dict[int, int] = field(init=False, default_factory=dict)
    began_as: str | None = None

    def __post_init__(self) -> None:
        for record in self.records:
            self.last_round |= dict.fromkeys(record.attention, record.round)

    @cached_property
    def digest(self) -> str:
        """Tells it from other runs, and stays as it is when the run is given more rounds."""
        return self.began_as or self.config.digest()

    def advance(self, state: ServerState, record: RoundRecord) -> None:
        """Takes a finished round over."""
        self.state = state
        self.records.append(record)
        self.last_round |= dict.fromkeys(record.attention, record.round)

    @property
    def stop_reason(self) -> str | None:
        """Why the run is over; None while it is not."""
        return reason_to_end(self.config, self.records)


def reason_to_end(config: RunConfig, records: Sequence[RoundRecord]) -> str | None:
    """Why a run with these records is over; None while it is not."""
    rounds = config.schedule.rounds
    if len(records) >= rounds:
        return f"all {rounds} rounds done"
    return stop_reason(config.stop, records)


def stop_reason(options: StopOptions, records: Sequence[RoundRecord]) -> str | None:
    """Why to stop after these rounds, by target or patience; None to go on."""
    if options.target is None and options.patience is None:
        return None
    name = options.metric or headline(metric for record in records for metric in record.metrics)
    if any(f"validation_{name}" in record.metrics for record in records):
        name = f"validation_{name}"
    values = [record.metrics[name] for record in records if name in record.metrics]
    if not values:
        return None
    lower = lower_is_better(name)
    best = min(values) if lower else max(values)
    reached = options.target is not None and (
        best <= options.target if lower else best >= options.target
    )
    if reached:
        return f"{name} reached the target {options.target:g}"
    if options.patience is not None and len(values) - 1 - values.index(best) >= options.patience:
        return f"no better {name} in {options.patience} tests"
    return None
