"""Noise on prototypes, chosen by a client's owner, and what it is worth as (ε, δ).

With ``clip`` and ``noise`` in a node's configuration, the feature of every sample is clipped to a
length of at most ``clip``, and Gaussian noise is added to the sums and counts per class before
anything is computed from them. Replacing one sample by any other moves sums (in units of ``clip``)
and counts together by at most 2: by 2 within one class, by √2 and √2 between two. So noise of
standard deviation ``2 · noise`` on both is the Gaussian mechanism with multiplier ``noise``.

What this covers: prototypes, counts and the margins computed from them. What it does not: the
trained weights, the training loss and the test sums, which the client sends as they are.
"""

from __future__ import annotations

import importlib.util
import secrets
from dataclasses import replace

import torch
from torch import Tensor

from fedproto.engines.base import Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.errors import ConfigError
from fedproto.rng import Indices
from fedproto.strategies.contract import Look, Observation
from fedproto.types import Prototypes, ServerState

SENSITIVITY = 2.0
RELEASES_PER_ROUND = 2
"""Margins compare the prototypes before training with those after it: both are used."""


class PrivateEngine(ReferenceEngine):
    """Trains like the reference engine, with noisy prototypes.

    Args:
        workload: What all jobs share.
        clip: Longest feature vector.
        noise: Noise multiplier.

    Raises:
        ConfigError: If a sample gives more than one feature vector, which the sensitivity does
            not cover.
    """

    def __init__(self, workload: Workload, clip: float, noise: float) -> None:
        super().__init__(workload)
        if workload.federation.task != "classification":
            raise ConfigError("noise on prototypes is for classification only")
        self._clip = clip
        self._noise = noise

    def _bounded(self, features: Tensor) -> Tensor:
        return clipped(features, self._clip)

    def _observe(
        self, indices: Indices, state: ServerState, what: frozenset[Look]
    ) -> Observation | None:
        exact = super()._observe(indices, state, what)
        if exact is None or "features" not in what:
            return exact
        noisy = with_noise(
            Prototypes(exact.sums, exact.count), self._clip, self._noise, len(indices)
        )
        return replace(exact, sums=noisy.sum, count=noisy.count)


def clipped(features: Tensor, longest: float) -> Tensor:
    """Feature vectors ``[N, D]`` shortened to a length where they are longer."""
    length: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    return features * (length.clamp(min=longest).reciprocal() * longest)


def with_noise(prototypes: Prototypes, clip: float, noise: float, num_examples: int) -> Prototypes:
    """Sums and counts with Gaussian noise, brought back to what prototypes can be.

    The noise comes from the operating system's randomness: whoever knew a seed could take it away
    again. Rounding and bounding afterwards cost no privacy.
    """
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    sums, count = prototypes.sum.double().cpu(), prototypes.count.double().cpu()
    spread = SENSITIVITY * noise
    sums = sums + torch.randn(sums.shape, generator=generator, dtype=torch.float64) * spread * clip
    count = count + torch.randn(count.shape, generator=generator, dtype=torch.float64) * spread
    count = count.round().clamp(min=0)
    if count.sum() > num_examples:
        count = (count * (num_examples / count.sum())).floor()
    sums = torch.where(count.unsqueeze(-1) > 0, sums, 0)
    return Prototypes(
        sums.to(prototypes.sum.device, prototypes.sum.dtype),
        count.to(prototypes.count.device, prototypes.count.dtype),
    )


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """The ε at a δ of all that a client's prototypes tell in some rounds.

    For data sets that differ in one sample, and without counting on the cohort being secret.

    Args:
        noise: Noise multiplier.
        rounds: Rounds that the client takes part in.
        delta: The δ.

    Raises:
        ConfigError: If the accountant is not installed, or a number is out of range.
    """
    if noise <= 0 or rounds < 1 or not 0 < delta < 1:
        raise ConfigError("noise and rounds must be positive and delta between 0 and 1")
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError("the accountant is not installed; pip install 'fedproto[privacy]'")
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = SelfComposedDpEvent(GaussianDpEvent(noise), RELEASES_PER_ROUND * rounds)
    return float(PLDAccountant().compose(event).get_epsilon(delta))
