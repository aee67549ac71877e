"""Scores of one model by client and by class: whom it serves well, and what it knows.

A client's score is the task's headline on its own test part. A class's score is the accuracy among
its test samples, or its IoU over all test pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedproto.analysis.probe import Probe
from fedproto.types import ServerState


@dataclass(frozen=True)
class ClientScores:
    """One score per client that has test samples.

    Attributes:
        metric: Which score.
        client: The clients.
        examples: Their test samples.
        values: Their scores.
    """

    metric: str
    client: list[int]
    examples: list[int]
    values: list[float]


@dataclass(frozen=True)
class ClassScores:
    """One score per class that is in the test parts.

    Attributes:
        metric: Which score.
        names: What the classes are called.
        examples: Their test samples, or test pixels.
        values: Their scores.
    """

    metric: str
    names: list[str]
    examples: list[int]
    values: list[float]


def score_clients(probe: Probe, state: ServerState) -> ClientScores:
    """The task's main score on each client's own test part.

    Clients without test samples, or whose test part has no object for a mean IoU, are left out.
    """
    metric, federation = probe.task.headline, probe.federation
    found = ClientScores(metric, [], [], [])
    tested = [client.test for client in federation.clients]
    for client, tally in enumerate(probe.tallies(state, tested)):
        scores = {} if tally is None else probe.task.metrics(tally)
        if metric in scores:
            found.client.append(client)
            found.examples.append(len(tested[client]))
            found.values.append(scores[metric])
    return found


def score_classes(probe: Probe, state: ServerState) -> ClassScores:
    """Accuracy or IoU per class over the test parts of all clients."""
    federation, test = probe.federation, probe.federation.test_indices
    classes = federation.num_classes
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    for scores, targets in probe.scores(state, test):
        pair = targets * classes + scores.argmax(dim=1)
        valid = (targets >= 0) & (targets < classes)
        confusion += (torch.bincount(pair[valid].flatten().cpu(), minlength=classes**2)).reshape(
            classes, classes
        )
    true, correct = confusion.sum(dim=1), confusion.diagonal()
    total = true + confusion.sum(dim=0) - correct if probe.task.label_maps else true
    present = np.flatnonzero(true.numpy())
    return ClassScores(
        metric=probe.task.class_score,
        names=[federation.class_name(int(label)) for label in present],
        examples=true[present].tolist(),
        values=(correct.double() / total.clamp(min=1))[present].tolist(),
    )
