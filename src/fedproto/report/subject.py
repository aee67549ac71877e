"""A run's newest model, ready to be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from fedproto.analysis.probe import Probe
from fedproto.config import RunConfig
from fedproto.data.federation import Federation
from fedproto.errors import ConfigError, StoreError
from fedproto.simulate import model_for
from fedproto.simulate.identity import check_same, data_identity
from fedproto.store import RunStore
from fedproto.types import ServerState


@dataclass
class Subject:
    """A run's newest model, ready to be looked at."""

    path: Path
    config: RunConfig
    state: ServerState
    probe: Probe
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.path / "analysis"


def open_subject(path: Path, federation: Federation, model: nn.Module | None = None) -> Subject:
    """Makes a run's newest model ready.

    Raises:
        StoreError: If it is no run, has no checkpoint, or was trained on other data.
        ConfigError: If its model was given in Python, and not here.
    """
    store = RunStore.open(path)
    config = store.config
    if model is None:
        if config.model is None:
            raise ConfigError(
                f"{path} was started from Python with an own module; look into it from there:"
                " fedproto.analyse(fedproto.load(run, model=..., data=...))"
            )
        model = model_for(replace(config, model=config.model.untrained()), federation)
    check_same(store.identity(), data_identity(federation), path)
    state = store.load_checkpoint()
    if state is None:
        raise StoreError(f"{path} has no checkpoint yet; nothing to look into")
    # The machine that looks need not be the one that trained.
    anywhere = replace(config.engine, name="reference", device="auto")
    probe = Probe(replace(config, engine=anywhere).workload(federation, model))
    return Subject(path, config, state.served.to(probe.device), probe)
