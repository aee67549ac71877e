"""Tasks: the loss, which features belong to which class, and the scores of a model.

A model's scores are computed from a tally, a vector of sums over samples: adding the tallies of
batches, clients or machines gives that of all of them.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.errors import ConfigError, unknown_name


class Task(abc.ABC):
    """What is learned."""

    @abc.abstractmethod
    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over a batch."""

    @abc.abstractmethod
    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Feature vectors ``[N, D]`` and their labels ``[N]``."""

    @abc.abstractmethod
    def tally(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Sums over a batch from which `metrics` are computed, in float64."""

    @abc.abstractmethod
    def metrics(self, tally: Tensor) -> dict[str, float]:
        """The scores from the summed tallies of all batches."""

    def feature_shape(self, features: Tensor) -> tuple[int, int]:
        """Channels of a feature vector, and vectors per sample, of a batch ``[B, D, ...]``."""
        return features.shape[1], features[0, 0].numel()

    def reason_to_refuse_tally(self, tally: Tensor, num_examples: int) -> str | None:
        """Why a tally that a client sent cannot be one of so many samples; None when it can."""
        del num_examples
        if tally.ndim != 1 or not bool((torch.isfinite(tally) & (tally >= 0)).all()):
            return "its test sums are not a list of finite, non-negative numbers"
        return None


class Classification(Task):
    """One label per sample."""

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(scores, targets)

    def labelled_features(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """One feature vector per sample."""
        return features.flatten(1), targets

    def tally(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Samples, correct ones and summed loss."""
        samples = torch.tensor(len(targets), dtype=torch.float64, device=scores.device)
        correct = (scores.argmax(dim=1) == targets).sum().double()
        loss = F.cross_entropy(scores.double(), targets, reduction="sum")
        return torch.stack([samples, correct, loss])

    def metrics(self, tally: Tensor) -> dict[str, float]:
        """Accuracy and mean loss."""
        samples, correct, loss = tally.tolist()
        return {"accuracy": correct / samples, "loss": loss / samples}

    def feature_shape(self, features: Tensor) -> tuple[int, int]:
        """One vector per sample, whatever the shape of the features."""
        return features.flatten(1).shape[1], 1

    def reason_to_refuse_tally(self, tally: Tensor, num_examples: int) -> str | None:
        """Also checks the number of samples and of correct ones."""
        if tally.shape != (3,):
            return f"its test sums have shape {tuple(tally.shape)}, not (3,)"
        samples, correct, _ = tally.tolist()
        if samples != num_examples or correct > samples:
            return f"it claims {correct:g} of {samples:g} test samples; it has {num_examples}"
        return super().reason_to_refuse_tally(tally, num_examples)


TASKS: dict[str, Task] = {"classification": Classification()}


def lower_is_better(metric: str) -> bool:
    """Whether small values of a metric are good: those of losses are, of scores not."""
    return metric.endswith("loss")


def task_named(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: If there is none.
    """
    if name not in TASKS:
        raise ConfigError(unknown_name("task", name, TASKS))
    return TASKS[name]
