"""Measures of quality: scores per client and per class, training loss.

A client's score is the task's main metric on its own test part. A class's score is the accuracy
over its test samples, or its IoU over all test pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedproto.data.tasks import confusion
from fedproto.measures.base import MEASURES, Measure
from fedproto.measures.probe import Probe
from fedproto.types import POOLED, ServerState


def score_clients(probe: Probe, state: ServerState) -> dict[str, float]:
    """The task's main score on each client's own test part, by client.

    Clients without test samples, or whose test part has no object for a mean IoU, are left out.
    """
    metric, found = probe.task.headline, {}
    tested = [client.test for client in probe.federation.clients]
    for client, tally in enumerate(probe.tallies(state, tested)):
        scores = {} if tally is None else probe.task.metrics(tally)
        if metric in scores:
            found[str(client)] = scores[metric]
    return found


def score_classes(probe: Probe, state: ServerState) -> dict[str, float]:
    """Accuracy or IoU over the test parts of all clients, by class."""
    federation, test = probe.federation, probe.federation.test_indices
    found = torch.stack([confusion(*batch).cpu() for batch in probe.logits(state, test)]).sum(dim=0)
    true, correct = found.sum(dim=1), found.diagonal()
    total = true + found.sum(dim=0) - correct if probe.task.label_maps else true
    shares = (correct.double() / total.clamp(min=1)).tolist()
    present = np.flatnonzero(true.numpy())
    return {federation.class_name(int(label)): shares[label] for label in present}


PER_CLIENT, PER_CLASS = "client", "class"
DIGITS = 5
CLIENT_SCORES = {
    "mean_client_": "mean client",
    "worst_tenth_": "worst tenth",
    "at_zero_": "at zero",
}
"""Prefixes of the metrics on clients' scores with the served model, and their titles in tables."""

PERSONAL_SCORES = {
    "personal_": "personal",
    "worst_tenth_personal_": "personal worst tenth",
    "finetuned_": "fine-tuned",
}
"""The same for each client's own model, and for the served model fine-tuned on new clients."""


def summarize_clients(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean over clients, the mean of their worst tenth, and the share that scores zero."""
    scores = np.sort(np.asarray(values, dtype=np.float64))
    return float(scores.mean()), worst_tenth(values), float((scores == 0).mean())


def worst_tenth(values: Sequence[float]) -> float:
    """The mean over the tenth of clients with the lowest scores, rounded up."""
    return float(np.sort(values)[: -(-len(values) // 10)].mean())


@MEASURES.register("clients")
class ClientsMeasure(Measure):
    """The score of every client and class as tables, with mean, worst tenth and share at zero.

    Taken at the end of every run, and every few rounds where a run asks for it.
    """

    def take(self, state: ServerState) -> Mapping[str, float | Mapping[str, float]]:
        """Three metrics and two tables; empty if no client has test samples."""
        clients = score_clients(self.probe, state)
        if not clients:
            return {}
        summary = zip(CLIENT_SCORES, summarize_clients([*clients.values()]), strict=True)
        return {
            **{prefix + self.probe.task.headline: value for prefix, value in summary},
            PER_CLIENT: rounded(clients),
            PER_CLASS: rounded(score_classes(self.probe, state)),
        }


def rounded(scores: Mapping[str, float]) -> dict[str, float]:
    """A table of scores with five digits."""
    return {name: round(value, DIGITS) for name, value in scores.items()}


TRAINING_LOSS = "aggregate_train_loss"


@MEASURES.register("loss")
class TrainingLossMeasure(Measure):
    """Training loss of the aggregate model over all clients, as the paper's loss curves show it."""

    def take(self, state: ServerState) -> dict[str, float]:
        """The mean over all samples, which weighs clients by size; their own losses may differ."""
        train = self.probe.federation.train_indices(POOLED)
        (tally,) = self.probe.tallies(state, [train])
        return {} if tally is None else {TRAINING_LOSS: self.probe.task.metrics(tally)["loss"]}
