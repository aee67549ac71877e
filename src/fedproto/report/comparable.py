"""Old name of a part of `fedproto.report.results`."""

from fedproto.report.results import comparable

__all__ = ["comparable"]
