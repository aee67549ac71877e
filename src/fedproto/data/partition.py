"""Sharing samples out among clients: pure functions of labels and a random stream.

Every function returns one index array per client, none of them empty. No sample is in two of them,
but for `by_first_samples`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedproto.errors import DataError
from fedproto.rng import Indices

_ADDED = 5
"""What FedProx's script for letters adds to every client's size."""


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

    The first few are `minimum`, or fewer when a class is too small to go round; the proportions are
    ``lognormal(0, sigma)``.
    """
    held = _neighbouring_classes(labels, clients, classes_per_client)
    proportions = rng.lognormal(0, sigma, size=held.shape)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for index, label in enumerate(np.unique(labels)):
        holders, slots = np.nonzero(held == index)
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


def by_classes_and_sizes(
    labels: Indices,
    rng: np.random.RandomState,
    *,
    clients: int,
    classes_per_client: int,
    mean_size: float,
    sigma: float,
    minimum: int = 1,
) -> list[Indices]:
    """A few neighbouring classes per client, log-normal sizes, the same number of each class.

    Client u holds the classes ``u, u+1, …`` (modulo their number) and wants equally many of each.
    When a class runs short, its clients get fewer of it in proportion to what they want; nothing
    takes its place. What nobody wants is left over.

    Sizes are ``lognormal(μ, sigma)`` with μ from the mean.
    """
    if not mean_size > 0:
        raise DataError(f"mean_size must be above 0, not {mean_size}")
    held = _neighbouring_classes(labels, clients, classes_per_client)
    sizes = rng.lognormal(np.log(mean_size) - sigma**2 / 2, sigma, size=clients)
    wanted = np.maximum(np.rint(sizes / classes_per_client), minimum).astype(np.int64)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for index, label in enumerate(np.unique(labels)):
        holders = np.flatnonzero((held == index).any(axis=1))
        if len(holders) == 0:
            continue
        samples = rng.permutation(np.flatnonzero(labels == label))
        shares = wanted[holders]
        if shares.sum() > len(samples):
            shares = apportion(len(samples), shares.astype(np.float64), minimum)
        ends = np.cumsum(shares)
        for client, end, share in zip(holders, ends, shares, strict=True):
            parts[client].append(samples[end - share : end])
    return _checked_parts([np.concatenate(part) for part in parts])


def by_first_samples(
    labels: Indices,
    rng: np.random.RandomState,
    *,
    clients: int,
    classes_per_client: int,
    mean_size: float,
    sigma: float,
    minimum: int = 2,
) -> list[Indices]:
    """A few neighbouring classes per client, log-normal sizes, everyone from a class's beginning.

    The rule of the script that FedProx publishes for its letters. Client u holds the classes
    ``u, u+1, …`` (modulo their number) and equally many of each. A class's samples come in one
    random order; its position is set back to the beginning whenever the next share would fit behind
    it, which is nearly always: clients then share the **same first samples**, and what one
    of them is tested on others have trained on.

    Sizes are ``lognormal(μ, sigma) + 5`` with μ from the mean, before they are divided over the
    classes.
    """
    if not mean_size > _ADDED:
        raise DataError(f"mean_size must be above {_ADDED} for this partition, not {mean_size}")
    held = _neighbouring_classes(labels, clients, classes_per_client)
    sizes = rng.lognormal(np.log(mean_size - _ADDED) - sigma**2 / 2, sigma, size=clients) + _ADDED
    wanted = np.maximum(sizes / classes_per_client, minimum).astype(np.int64)
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    position = [0] * len(pools)
    parts: list[list[Indices]] = [[] for _ in range(clients)]
    for client, share in enumerate(wanted):
        for label in held[client]:
            if position[label] + share < len(pools[label]):
                position[label] = 0
            parts[client].append(pools[label][position[label] : position[label] + share])
            position[label] += int(share)
    return _checked_parts([np.concatenate(part) for part in parts])


def by_dirichlet(
    labels: Indices, rng: np.random.RandomState, *, clients: int, alpha: float, gamma: float = 3.0
) -> list[Indices]:
    """Class mixes drawn from a Dirichlet distribution, sizes from a power law.

    Clients draw their samples one client after another, from what is left: a class of which half
    is gone has half its chance, so that the last clients are not left with odd mixes. All samples
    are given away. The sizes are drawn first, so that they depend neither on the concentration nor
    on the classes.

    With `alpha` near 0 a client has one class, with a large one the mix of the whole data; `gamma`
    is the tail exponent of the Pareto law that the sizes follow.
    """
    if not alpha > 0:
        raise DataError(f"alpha must be above 0, not {alpha}")
    if not gamma > 0:
        raise DataError(f"gamma must be above 0, not {gamma}")
    _check_clients(clients, len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    sizes = apportion(len(labels), 1 + rng.pareto(gamma, size=clients), minimum=1)
    stock = [rng.permutation(np.flatnonzero(labels == label)) for label in classes]
    left = counts.copy()
    parts = []
    for size in sizes:
        log_mix = _log_dirichlet(rng, alpha * len(classes) * counts / counts.sum())
        with np.errstate(divide="ignore"):
            log_chances = log_mix + np.log(left / counts)
        taken = _draw_without_exceeding(rng, int(size), log_chances, left)
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


def by_key(keys: NDArray[np.generic], *, minimum: int = 1) -> list[Indices]:
    """One client per value of a natural key, such as the person shown or the writer.

    Clients come in the keys' sorted order; keys with fewer samples than the minimum make none.
    """
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    by_number = np.split(np.argsort(numbers.ravel(), kind="stable"), np.cumsum(counts)[:-1])
    parts = [part for part in by_number if len(part) >= max(1, minimum)]
    if not parts:
        raise DataError(f"no client would have {minimum} samples; lower the minimum")
    return _checked_parts(parts)


def iid(labels: Indices, rng: np.random.RandomState, *, clients: int) -> list[Indices]:
    """The same number of samples for everyone, at random."""
    _check_clients(clients, len(labels))
    return _checked_parts(np.array_split(rng.permutation(len(labels)), clients))


def sort_and_partition(
    labels: Indices, rng: np.random.RandomState, *, clients: int, shards_per_client: int = 1
) -> list[Indices]:
    """Samples sorted by class and cut into equal shards, which are dealt out at random."""
    _check_clients(clients, len(labels))
    shards = clients * shards_per_client
    if not clients <= shards <= len(labels):
        raise DataError(
            f"shards_per_client must be between 1 and {len(labels) // clients} for {clients}"
            f" clients and {len(labels)} samples, not {shards_per_client}"
        )
    shuffled = rng.permutation(len(labels))
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    cut = np.array_split(ordered, shards)
    dealt = rng.permutation(shards).reshape(clients, shards_per_client)
    return _checked_parts([np.concatenate([cut[shard] for shard in hand]) for hand in dealt])


def apportion(total: int, weights: NDArray[np.float64], minimum: int) -> Indices:
    """Shares a whole number out in proportion to weights, after a minimum for everyone."""
    base = min(minimum, total // len(weights))
    quota = (total - base * len(weights)) * weights / weights.sum()
    shares = np.floor(quota).astype(np.int64)
    short = total - base * len(weights) - int(shares.sum())
    # Whole shares leave a remainder: it goes to those who lost most by rounding down.
    shares[np.argsort(shares - quota, kind="stable")[:short]] += 1
    return np.asarray(shares + base, dtype=np.int64)


def _log_dirichlet(
    rng: np.random.RandomState, concentration: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Logarithms of Dirichlet proportions up to a constant.

    In logarithms, and by ``Gamma(a) = Gamma(a + 1) · U^(1/a)``, since for small concentrations the
    proportions themselves are below what floating point can tell from zero.
    """
    uniform = 1 - rng.uniform(size=len(concentration))
    return np.asarray(np.log(rng.gamma(concentration + 1)) + np.log(uniform) / concentration)


def _draw_without_exceeding(
    rng: np.random.RandomState, size: int, log_mix: NDArray[np.float64], left: Indices
) -> Indices:
    taken = np.zeros_like(left)
    while (missing := size - int(taken.sum())) > 0:
        available = np.flatnonzero(left > taken)
        chances = np.exp(log_mix[available] - log_mix[available].max())
        draw = rng.multinomial(missing, chances / chances.sum())
        taken[available] += np.minimum(draw, (left - taken)[available])
    return taken


def _neighbouring_classes(labels: Indices, clients: int, classes_per_client: int) -> Indices:
    """Which classes each client holds, as indices among the classes there are."""
    num_classes = len(np.unique(labels))
    if not 1 <= classes_per_client <= num_classes:
        raise DataError(
            f"classes_per_client must be between 1 and the {num_classes} classes,"
            f" not {classes_per_client}"
        )
    _check_clients(clients, len(labels))
    held = np.arange(clients)[:, None] + np.arange(classes_per_client)
    return np.asarray(held % num_classes, dtype=np.int64)


def _check_clients(clients: int, samples: int) -> None:
    if not 1 <= clients <= samples:
        raise DataError(f"clients must be between 1 and the {samples} samples, not {clients}")


def _checked_parts(parts: list[Indices]) -> list[Indices]:
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise DataError(f"client {client} would be left without samples; use fewer clients")
    return [np.sort(part).astype(np.int64) for part in parts]
