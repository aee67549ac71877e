"""Where metrics go besides the run directory: one file per service."""

from fedproto.store.sinks.base import SINKS, Sink, check_sinks, logging_to

__all__ = ["SINKS", "Sink", "check_sinks", "logging_to"]
