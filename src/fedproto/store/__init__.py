"""Storage of runs: run and sweep directories, and their integrity."""

from fedproto.store.run import RunStore, is_run, read_description
from fedproto.store.sweeps import open_or_create

__all__ = ["RunStore", "is_run", "open_or_create", "read_description"]
