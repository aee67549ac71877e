"""Sharing samples out among clients: pure functions of labels and a random stream.

Every function returns one index array per client; no sample is in two of them and none is empty.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedproto.errors import DataError
from fedproto.rng import Indices


def by_classes(
    labels: Indices,
    rng: np.random.RandomState,
    *,
    clients: int,
    classes_per_client: int,
    sigma: float = 2.0,
    minimum: int = 5,
) -> list[Indices]:
    """A few neighbouring classes per client, log-normal numbers of samples.

    Client u holds the classes ``u, u+1, …`` (modulo their number). Of every class each of its
    clients first gets a few samples; the rest is shared out in log-normal proportions.

    Args:
        labels: The class of every sample.
        rng: The random stream.
        clients: Number of clients.
        classes_per_client: Classes that each client holds.
        sigma: Spread of the proportions: ``lognormal(0, sigma)``.
        minimum: Samples of each of its classes that a client gets first; fewer when a class is
            too small to go round.

    Raises:
        DataError: If the numbers cannot work out.
    """
    classes = np.unique(labels)
    if not 1 <= classes_per_client <= len(classes):
        raise DataError(
            f"classes_per_client must be between 1 and the {len(classes)} classes,"
            f" not {classes_per_client}"
        )
    _check_clients(clients, len(labels))
    held = (np.arange(clients)[:, None] + np.arange(classes_per_client)) % len(classes)
    proportions = rng.lognormal(0, sigma, size=held.shape)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for place, label in enumerate(classes):
        holders, slots = np.nonzero(held == place)
        if len(holders) == 0:
            continue
        samples = rng.permutation(np.flatnonzero(labels == label))
        if len(samples) < len(holders) and classes_per_client == 1:
            raise DataError(
                f"class {label} has {len(samples)} samples for {len(holders)} clients;"
                " use fewer clients"
            )
        shares = apportion(len(samples), proportions[holders, slots], minimum)
        for client, share in zip(holders, np.split(samples, np.cumsum(shares)[:-1]), strict=True):
            parts[client].append(share)
    return _checked_parts([np.concatenate(part) for part in parts])


def by_dirichlet(
    labels: Indices,
    rng: np.random.RandomState,
    *,
    clients: int,
    alpha: float,
    gamma: float = 3.0,
) -> list[Indices]:
    """Class mixes drawn from a Dirichlet distribution, sizes from a power law.

    Clients draw their samples one client after another; a class that has run out is left to the
    others in proportion. All samples are given away.

    Args:
        labels: The class of every sample.
        rng: The random stream.
        clients: Number of clients.
        alpha: Concentration: near 0 one class per client, large the mix of the whole data.
        gamma: Tail exponent of the Pareto law that the sizes follow.

    Raises:
        DataError: If the numbers cannot work out.
    """
    if not alpha > 0:
        raise DataError(f"alpha must be above 0, not {alpha}")
    if not gamma > 0:
        raise DataError(f"gamma must be above 0, not {gamma}")
    _check_clients(clients, len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    stock = [rng.permutation(np.flatnonzero(labels == label)) for label in classes]
    left = counts.copy()
    sizes = apportion(len(labels), 1 + rng.pareto(gamma, size=clients), minimum=1)
    parts = []
    for size in sizes:
        mix = rng.dirichlet(alpha * len(classes) * counts / counts.sum())
        taken = _draw_without_exceeding(rng, int(size), mix, left)
        left -= taken
        parts.append(
            np.concatenate(
                [
                    pool[rest : rest + take]
                    for pool, rest, take in zip(stock, left, taken, strict=True)
                ]
            )
        )
    return _checked_parts(parts)


def apportion(total: int, weights: NDArray[np.float64], minimum: int) -> Indices:
    """Shares a whole number out in proportion to weights, after a minimum for everyone.

    Args:
        total: The number to share out; all of it is given away.
        weights: Positive weights.
        minimum: What everyone gets first; less where the total does not suffice.
    """
    base = min(minimum, total // len(weights))
    quota = (total - base * len(weights)) * weights / weights.sum()
    shares = np.floor(quota).astype(np.int64)
    short = total - base * len(weights) - int(shares.sum())
    # Whole shares leave a remainder: it goes to those who lost most by rounding down.
    shares[np.argsort(shares - quota, kind="stable")[:short]] += 1
    return np.asarray(shares + base, dtype=np.int64)


def _draw_without_exceeding(
    rng: np.random.RandomState, size: int, mix: NDArray[np.float64], left: Indices
) -> Indices:
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        available = left > taken
        chances = np.where(available, mix, 0.0)
        if chances.sum() < 1e-12:
            chances = np.where(available, (left - taken).astype(np.float64), 0.0)
        draw = rng.multinomial(missing, chances / chances.sum())
        taken += np.minimum(draw, left - taken)
    return taken


def _check_clients(clients: int, samples: int) -> None:
    if not 1 <= clients <= samples:
        raise DataError(f"clients must be between 1 and the {samples} samples, not {clients}")


def _checked_parts(parts: list[Indices]) -> list[Indices]:
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(f"client {client} would be left without samples; use fewer clients")
    return [np.sort(part).astype(np.int64) for part in parts]
