"""Old name of `fedproto.report.statistics`."""

from fedproto.report.statistics import (
    FEWEST_PAIRS,
    Difference,
    difference,
    holm,
    sample_deviation,
)

__all__ = ["FEWEST_PAIRS", "Difference", "difference", "holm", "sample_deviation"]
