"""Noise on what a client tells of its features, chosen by its owner, and its worth as (ε, δ).

With ``clip`` and ``noise`` in a node's configuration, the feature of every sample is clipped to a
length of at most ``clip`` and rounded towards zero to a lattice of `STEPS` steps per ``clip``, so
that sums are exact integers of steps; discrete Gaussian noise is added to the sums and counts
per class before anything is computed from them. Replacing one sample by any other moves sums (in
units of ``clip``) and counts together by at most 2: by 2 within one class, by √2 and √2 between
two. So noise of standard deviation ``2 · noise`` on both has the Rényi divergences of a Gaussian
mechanism with multiplier ``noise``, or smaller ones.

What this covers: sums of features, counts, and whatever a strategy's payload computes from them.
What it does not: the trained weights, the training loss and the test sums, which the client sends
as they are. Strategies whose payload tells of anything else in the data are refused.
"""

from __future__ import annotations

import importlib.util
import math
import secrets
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from fedproto.engines.base import LocalJob, Workload
from fedproto.engines.reference import ReferenceEngine
from fedproto.errors import ConfigError, install
from fedproto.rng import Indices
from fedproto.strategies.values import Observation, Statistic
from fedproto.types import ClientUpdate, ServerState

SENSITIVITY = 2
STEPS = 2**16
"""Steps of the lattice per ``clip``: far below the noise, and sums of 2³⁷ samples stay exact."""

RELEASES_PER_ROUND = 2
"""A payload may be computed from what was looked up before and after training."""


class PrivateEngine(ReferenceEngine):
    """Trains like the reference engine, and tells of features with noise.

    Raises:
        ConfigError: If a sample gives more than one feature vector, which the sensitivity does
            not cover.
    """

    def __init__(self, workload: Workload, clip: float, noise: float) -> None:
        super().__init__(workload)
        if workload.task.label_maps:
            raise ConfigError("noise on features is for classification only")
        self._clip = clip
        self._noise = noise

    def train_client(self, job: LocalJob) -> ClientUpdate:
        """Refuses a job whose payload would tell what the noise does not cover."""
        needs = job.method.needs
        uncovered = needs.classes or (needs.before | needs.after) - {"features"}
        update = super().train_client(job)
        if update.payload and uncovered:
            raise ConfigError(
                f"{type(job.strategy).__name__} with its sections has clients report classes,"
                " losses or products of features, which this node's noise does not cover; take clip"
                " and noise out of --node-config, or leave this run"
            )
        return update

    def _bounded(self, features: Tensor) -> Tensor:
        return on_lattice(features, self._clip)

    def _observe(
        self, indices: Indices, state: ServerState, what: frozenset[Statistic]
    ) -> Observation | None:
        exact = super()._observe(indices, state, what)
        if exact is None or "features" not in what:
            return exact
        noisy = with_noise(exact, self._noise, len(indices))
        like = next(self.workload.model.parameters())
        sums = (noisy.sums * (self._clip / STEPS)).to(like.device, like.dtype)
        return replace(noisy, sums=sums, count=noisy.count.to(like.device))


def on_lattice(features: Tensor, longest: float) -> Tensor:
    """Feature vectors ``[N, D]`` in whole steps of the lattice, none longer than `STEPS`.

    A feature that is NaN counts as zero: it must not undo the noise of the others.
    """
    features = features.double()
    length: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
    # A hair shorter than allowed, which is more than the rounding of these lines can add.
    scale = STEPS * (1 - 2.0**-30) / length.clamp(min=longest)
    return (features * scale).nan_to_num(0, 0, 0).trunc()


def with_noise(exact: Observation, noise: float, num_examples: int) -> Observation:
    """Sums in steps of the lattice and counts with noise, brought back to what they can be.

    Bounding afterwards costs no privacy.
    """
    spread = (SENSITIVITY * Fraction(noise)) ** 2
    count = _noisy(exact.count, spread).clamp(min=0)
    if count.sum() > num_examples:
        count = count * num_examples // count.sum()
    sums = _noisy(exact.sums, spread * STEPS**2)
    return replace(exact, sums=torch.where(count.unsqueeze(-1) > 0, sums, 0), count=count)


def _noisy(exact: Tensor, variance: Fraction) -> Tensor:
    """Integers with noise."""
    noise = [discrete_gaussian(variance) for _ in range(exact.numel())]
    return exact.cpu().to(torch.int64) + torch.tensor(noise, dtype=torch.int64).view(exact.shape)


def epsilon(noise: float, rounds: int, delta: float) -> float:
    """The ε at a δ of all that a client tells of its features in some rounds.

    For data sets that differ in one sample, and without counting on the cohort being secret. By
    Rényi divergences, which for discrete Gaussian noise are never above those of the continuous.
    """
    if noise <= 0 or rounds < 1 or not 0 < delta < 1:
        raise ConfigError("noise and rounds must be positive and delta between 0 and 1")
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(f"the accountant is not installed; {install('privacy')}")
    from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    event = SelfComposedDpEvent(GaussianDpEvent(noise), RELEASES_PER_ROUND * rounds)
    return float(RdpAccountant().compose(event).get_epsilon(delta))


def discrete_gaussian(variance: Fraction) -> int:
    """One number with ``σ² = variance``.

    The variance is a fraction, so that it is exactly what is accounted for.
    """
    above, below = variance.numerator, variance.denominator
    scale = math.isqrt(above // below) + 1
    # (|x| − σ²/scale)² / 2σ² as integers: fractions would be reduced at every step.
    denominator = 2 * above * below * scale**2
    while True:
        found = _discrete_laplace(scale)
        if _happens_exp((abs(found) * below * scale - above) ** 2, denominator):
            return found


def _discrete_laplace(scale: int) -> int:
    """A number with ``P(x) ∝ exp(−|x| / scale)``."""
    while True:
        fine = secrets.randbelow(scale)
        if not _happens_exp(fine, scale):
            continue
        coarse = 0
        while _happens_exp(1, 1):
            coarse += 1
        size, negative = fine + scale * coarse, secrets.randbelow(2)
        if size or not negative:  # zero has no sign and must not count twice
            return -size if negative else size


def _happens_exp(above: int, below: int) -> bool:
    """True with a chance of ``exp(−above / below)``, for a quotient of at least 0."""
    while above > below:
        if not _happens_exp(1, 1):
            return False
        above -= below
    turn = 1
    # The chance to stop at an odd turn is the alternating series of the exponential.
    while secrets.randbelow(below * turn) < above:
        turn += 1
    return turn % 2 == 1
