"""What is kept of runs: run and sweep directories, and whether they are whole."""

from fedproto.store.run import RunStore, is_run, read_description
from fedproto.store.sweeps import open_or_create

__all__ = ["RunStore", "is_run", "open_or_create", "read_description"]
