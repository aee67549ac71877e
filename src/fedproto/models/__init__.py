"""Models that give features, one architecture per file, and an adapter for a user's own."""

from fedproto.models.adapter import with_features
from fedproto.models.base import MODELS, FeatureModel, ModelOptions, build_model, features_of

__all__ = ["MODELS", "FeatureModel", "ModelOptions", "build_model", "features_of", "with_features"]
