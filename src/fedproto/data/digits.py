"""Digits: the 1,797 real handwritten digits that come with scikit-learn, 8×8 pixels."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedproto.data.base import DATASETS
from fedproto.data.federation import Federation
from fedproto.data.samples import TensorSamples
from fedproto.data.sharing import Partition, SharedOut
from fedproto.errors import DataError, install


def _missing() -> str:
    return f"needs scikit-learn: {install('digits')}"


@DATASETS.register("digits")
@dataclass(frozen=True)
class Digits(SharedOut):
    """Handwritten digits, a few classes per client unless another partition is asked for."""

    clients: int = 50
    partition: Partition = "classes"
    sigma: float = 1.0
    minimum: int = 3

    def load(self, root: Path) -> Federation:
        """Reads the digits and shares them out."""
        if importlib.util.find_spec("sklearn") is None:
            raise DataError(f"data set 'digits' {_missing()}")
        from sklearn.datasets import load_digits

        digits = load_digits()
        labels = np.asarray(digits.target, dtype=np.int64)
        return self.federation(
            "digits",
            TensorSamples(
                torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(labels)
            ),
            self.share(labels),
            num_classes=10,
        )

    @classmethod
    def status(cls, root: Path) -> str:
        """Ready where scikit-learn is installed."""
        found = importlib.util.find_spec("sklearn") is not None
        return super().status(root) if found else _missing()
