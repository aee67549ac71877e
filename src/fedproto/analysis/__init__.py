"""Measures of trained models as functions of tensors, and the probe that applies them to runs."""
