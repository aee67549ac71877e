"""Scores of one model by client and by class: whom it serves well, and what it knows.

A client's score is the task's headline on its own test part. A class's score is the accuracy among
its test samples, or its IoU over all test pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedproto.analysis.probe import Probe
from fedproto.types import ServerState


@dataclass(frozen=True)
class Scores:
    """One score per client, or per class, that has test samples.

    Attributes:
        of: The clients by number, or the classes by name.
        examples: Their test samples, or test pixels.
    """

    metric: str
    of: list[int] | list[str]
    examples: list[int]
    values: list[float]

    def table(self, kind: str) -> dict[str, Any]:
        """As columns, whose first is called after what the scores are of."""
        return {kind: self.of, "examples": self.examples, self.metric: self.values}

    def rounded(self, digits: int) -> dict[str, float]:
        """The scores by what they are of, in text."""
        return {
            str(one): round(value, digits) for one, value in zip(self.of, self.values, strict=True)
        }


def score_clients(probe: Probe, state: ServerState) -> Scores:
    """The task's main score on each client's own test part.

    Clients without test samples, or whose test part has no object for a mean IoU, are left out.
    """
    metric, federation = probe.task.headline, probe.federation
    clients, examples, values = [], [], []
    tested = [client.test for client in federation.clients]
    for client, tally in enumerate(probe.tallies(state, tested)):
        scores = {} if tally is None else probe.task.metrics(tally)
        if metric in scores:
            clients.append(client)
            examples.append(len(tested[client]))
            values.append(scores[metric])
    return Scores(metric, clients, examples, values)


def score_classes(probe: Probe, state: ServerState) -> Scores:
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
    return Scores(
        metric=probe.task.class_score,
        of=[federation.class_name(int(label)) for label in present],
        examples=true[present].tolist(),
        values=(correct.double() / total.clamp(min=1))[present].tolist(),
    )
