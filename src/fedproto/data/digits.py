"""Digits: the 1,797 real handwritten digits that come with scikit-learn, 8×8 pixels."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedproto.data.base import DATASETS, DataSource
from fedproto.data.federation import Federation, split_clients
from fedproto.data.partition import by_classes, by_dirichlet
from fedproto.data.samples import TensorSamples
from fedproto.errors import DataError
from fedproto.options import option
from fedproto.rng import Purpose, stream

MISSING = "needs scikit-learn: pip install 'fedproto[digits]'"


@DATASETS.register("digits")
@dataclass(frozen=True)
class Digits(DataSource):
    """Handwritten digits, a few classes per client or mixed by a Dirichlet distribution."""

    clients: int = option(50, "number of clients", at_least=1)
    partition: Literal["classes", "dirichlet"] = option(
        "classes", "a few classes per client with log-normal sizes, or Dirichlet with a power law"
    )
    classes_per_client: int = option(2, "for 'classes': classes that a client holds", at_least=1)
    sigma: float = option(1.0, "for 'classes': spread of the log-normal sizes", at_least=0)
    minimum: int = option(3, "for 'classes': samples of each class a client gets first", at_least=1)
    alpha: float = option(0.1, "for 'dirichlet': concentration of the class mix", above=0)
    gamma: float = option(3.0, "for 'dirichlet': tail exponent of the sizes", above=0)

    def load(self, root: Path) -> Federation:
        """Reads the digits and shares them out."""
        del root
        if importlib.util.find_spec("sklearn") is None:
            raise DataError(f"data set 'digits' {MISSING}")
        from sklearn.datasets import load_digits

        digits = load_digits()
        labels = np.asarray(digits.target, dtype=np.int64)
        rng = stream(self.seed, Purpose.PARTITION)
        if self.partition == "classes":
            parts = by_classes(
                labels,
                rng,
                clients=self.clients,
                classes_per_client=self.classes_per_client,
                sigma=self.sigma,
                minimum=self.minimum,
            )
        else:
            parts = by_dirichlet(
                labels, rng, clients=self.clients, alpha=self.alpha, gamma=self.gamma
            )
        return Federation(
            name="digits",
            samples=TensorSamples(
                torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(labels)
            ),
            clients=split_clients(parts, self.seed),
            num_classes=10,
            input_shape=(1, 8, 8),
        )

    @classmethod
    def status(cls, root: Path) -> str:
        """Ready where scikit-learn is installed."""
        found = importlib.util.find_spec("sklearn") is not None
        return super().status(root) if found else MISSING
