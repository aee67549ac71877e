"""Measures: what is taken of aggregate models every few rounds, one file each."""

from fedproto.measures.options import MEASURES, MeasureOptions

__all__ = ["MEASURES", "MeasureOptions"]
