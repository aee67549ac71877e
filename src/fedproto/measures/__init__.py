"""Measures of aggregate models, taken every few rounds while they are trained."""

from fedproto.measures.base import MEASURES, Measure, MeasureOptions, Meter, Taken

__all__ = ["MEASURES", "Measure", "MeasureOptions", "Meter", "Taken"]
