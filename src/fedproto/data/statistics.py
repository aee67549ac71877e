"""Statistics of a federation: the columns of the paper's Table 1, and class counts."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedproto.data.federation import Federation
from fedproto.data.samples import MappedSamples, TensorSamples
from fedproto.errors import DataError
from fedproto.rng import Indices


def statistics(federation: Federation) -> dict[str, Any]:
    """Counts of a federation by name; the background is not counted as a class.

    `test_overlap` is the share of test samples that are also training samples.
    """
    counts = class_counts(federation)
    sizes, classes = counts.sum(axis=1), (counts > 0).sum(axis=1)
    return {
        "classes": counts.shape[1],
        "clients": len(sizes),
        "samples": int(sizes.sum()),
        "mean": float(sizes.mean()),
        "std": float(sizes.std()),
        "smallest": int(sizes.min()),
        "largest": int(sizes.max()),
        "fewest_classes": int(classes.min()),
        "mean_classes": float(classes.mean()),
        "most_classes": int(classes.max()),
        "train": int(federation.train_sizes.sum()),
        "test": len(federation.test_indices),
        "validation": len(federation.validation),
        "test_set": federation.test_set,
        "test_overlap": federation.test_overlap,
    }


def class_counts(federation: Federation) -> Indices:
    """Number of a client's own samples per class, ``[K, C]``.

    These are its training samples and those split off for the test, not a common test set. For
    segmentation the background is no class.
    """
    labels = sample_labels(federation)
    num_classes = federation.num_classes - federation.has_label_maps
    own_test = federation.test_set == "split"
    parts = [
        np.concatenate([client.train, client.test]) if own_test else client.train
        for client in federation.clients
    ]
    return np.array([np.bincount(labels[part], minlength=num_classes) for part in parts])


def sample_labels(federation: Federation) -> Indices:
    """The class of every sample."""
    if federation.labels is not None:
        return federation.labels
    if federation.has_label_maps:
        raise DataError(f"{federation.name} has no label per image")
    samples = federation.samples
    if not isinstance(samples, TensorSamples | MappedSamples):
        raise DataError(f"the labels of {federation.name} are with the clients")
    return samples.targets.cpu().numpy().astype(np.int64)
