"""Classification: one label per sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from fedproto.data.tasks.base import Task


@dataclass(frozen=True)
class Classification(Task):
    """One label per sample."""

    headline = "accuracy"
    one_label = True

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(scores, targets)

    def loss_terms(self, targets: Tensor) -> Tensor:
        """The samples."""
        return torch.tensor(len(targets), device=targets.device)

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

    def tally_counts(self, num_classes: int, input_shape: tuple[int, ...]) -> tuple[int, int]:
        """Samples and correct ones."""
        del num_classes, input_shape
        return 2, 2

    def reason_to_refuse_tally(
        self, tally: Tensor, num_examples: int, num_classes: int, input_shape: tuple[int, ...]
    ) -> str | None:
        """Also checks the number of samples and of correct ones."""
        if tally.shape == (3,):
            samples, correct, _ = tally.tolist()
            if samples != num_examples or correct > samples:
                return f"it claims {correct:g} of {samples:g} test samples; it has {num_examples}"
        return super().reason_to_refuse_tally(tally, num_examples, num_classes, input_shape)
