"""The centrally trained model that features are compared with: another run's last state."""

from __future__ import annotations

from pathlib import Path

from fedproto.config import RunConfig
from fedproto.errors import ConfigError
from fedproto.store import RunStore, is_run
from fedproto.types import ServerState


def reference_state(directory: str) -> ServerState:
    """The last state of a run."""
    state = RunStore.open(Path(directory)).load_checkpoint()
    if state is None:
        raise ConfigError(
            f"measure.reference {directory} has no checkpoint; train it with"
            " store.checkpoint_every above 0"
        )
    return state.served


def check_reference(config: RunConfig) -> str | None:
    """Checks that a run's reference, where it needs one, is a model to compare with.

    Raises:
        ConfigError: If it is missing, unfinished, not centrally trained, or of other data or model.
    """
    if not config.measure.takes("mmd"):
        return None
    directory = config.measure.reference
    wanted = "a finished run of strategy 'centralized' with the same [data] and [model]"
    if directory is None:
        raise ConfigError(f"measure 'mmd' needs measure.reference, the directory of {wanted}")
    if not is_run(Path(directory)):
        raise ConfigError(
            f"measure.reference {directory} is no run directory; name that of {wanted}"
        )
    store = RunStore.open(Path(directory))
    if not store.config.strategy.pooled:
        raise ConfigError(
            f"measure.reference {directory} is a run of '{store.config.title}', not centrally"
            f" trained; name {wanted}"
        )
    for section in ("data", "model"):
        if getattr(store.config, section) != getattr(config, section):
            raise ConfigError(
                f"measure.reference {directory} has another [{section}] than this run; name"
                f" {wanted}"
            )
    if not store.finished:
        raise ConfigError(
            f"measure.reference {directory} is not finished; first 'fedproto resume {directory}'"
        )
    if store.config.seed != config.seed:
        return (
            f"measure.reference {directory} began from the initial weights of seed"
            f" {store.config.seed}, this run from those of seed {config.seed}: their features"
            " differ whatever they learn"
        )
    return None
