"""Measures of aggregate models, taken every few rounds while they are trained."""

from fedproto.measures.base import MEASURES, Gauge, Measure, MeasureOptions, Taken

__all__ = ["MEASURES", "Gauge", "Measure", "MeasureOptions", "Taken"]
