"""Looking into trained models: measures as functions of tensors, and what applies them to runs."""

from fedproto.analysis.discrepancy import (
    feature_discrepancy,
    grouped_mmd2,
    median_bandwidth,
    mmd2,
    mmd2_linear,
)
from fedproto.analysis.dissimilarity import (
    Dissimilarity,
    gradient_dissimilarity,
    summarize_distances,
)
from fedproto.analysis.embedding import embed
from fedproto.analysis.runs import Correlation, attention_matrix, attention_spread, pearson
from fedproto.analysis.uncertainty import (
    calibration_error,
    feature_entropy,
    reliability,
    shannon_entropy,
    softmax_entropy,
    tally_confidence,
)

__all__ = [
    "Correlation",
    "Dissimilarity",
    "attention_matrix",
    "attention_spread",
    "calibration_error",
    "embed",
    "feature_discrepancy",
    "feature_entropy",
    "gradient_dissimilarity",
    "grouped_mmd2",
    "median_bandwidth",
    "mmd2",
    "mmd2_linear",
    "pearson",
    "reliability",
    "shannon_entropy",
    "softmax_entropy",
    "summarize_distances",
    "tally_confidence",
]
