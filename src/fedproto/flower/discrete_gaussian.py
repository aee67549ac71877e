"""Whole numbers from the discrete Gaussian distribution, exactly, from cryptographic randomness.

``P(x) ∝ exp(−x² / 2σ²)`` over the whole numbers, drawn by the rejection method of Canonne, Kamath
and Steinke (2020). Only whole numbers are computed with and every coin is fair to the last bit, so
no rounding of a floating-point number can tell what the noise was added to. Every bit comes from
the operating system: there is no state that could be searched.

Rejection takes a random time, and how long is not hidden.
"""

from __future__ import annotations

import math
import secrets
from fractions import Fraction


def discrete_gaussian(variance: Fraction) -> int:
    """One number with ``σ² = variance``.

    The variance is a fraction, so that it is exactly what is accounted for.
    """
    above, below = variance.numerator, variance.denominator
    scale = math.isqrt(above // below) + 1
    # (|x| − σ²/scale)² / 2σ² as whole numbers: fractions would be reduced at every step.
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
