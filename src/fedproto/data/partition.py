"""Dividing samples among clients: pure functions of labels and a random stream.

Every function returns one index array per client, none of them empty. No sample is in two of them,
but for `by_first_samples`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedproto.errors import DataError
from fedproto.rng import Indices

_ATTEMPTS = 1000
_BITS = 24
_ADDED = 5
"""Number that FedProx's script for letters adds to every client's size."""


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
    clients first gets `minimum` samples, or fewer when the class is too small; the rest is shared
    out in proportions that are ``lognormal(0, sigma)``.
    """
    held = _neighbouring_classes(labels, clients, classes_per_client)
    proportions = rng.lognormal(0, sigma, size=held.shape)
    counts = np.unique(labels, return_counts=True)[1]
    shares = np.zeros((len(counts), clients), dtype=np.int64)
    for index, count in enumerate(counts):
        holders, slots = np.nonzero(held == index)
        if len(holders):
            shares[index, holders] = apportion(count, proportions[holders, slots], minimum)
    return _by_shares(shares, labels, rng)


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
    """A few neighbouring classes per client, log-normal sizes, equally many samples per class.

    Client u holds the classes ``u, u+1, …`` (modulo their number) and wants equally many of each.
    When a class runs short, its clients get fewer of it in proportion to their wish; nothing takes
    its place. Samples beyond these sizes are left over. Sizes are ``lognormal(μ, sigma)`` with μ
    from the mean.
    """
    held = _neighbouring_classes(labels, clients, classes_per_client)
    sizes = rng.lognormal(np.log(mean_size) - sigma**2 / 2, sigma, size=clients)
    wanted = np.maximum(np.rint(sizes / classes_per_client), minimum).astype(np.int64)
    counts = np.unique(labels, return_counts=True)[1]
    shares = np.zeros((len(counts), clients), dtype=np.int64)
    for index, count in enumerate(counts):
        holders = np.flatnonzero((held == index).any(axis=1))
        shares[index, holders] = wanted[holders]
        if wanted[holders].sum() > count:
            shares[index, holders] = apportion(count, wanted[holders].astype(float), minimum)
    return _by_shares(shares, labels, rng)


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
    """A few neighbouring classes per client, log-normal sizes, all from the first samples.

    The rule of the script that FedProx publishes for its letters. Client u holds the classes
    ``u, u+1, …`` (modulo their number) and equally many of each. A class's samples come in one
    random order; its position is set back to the beginning whenever the next share would fit behind
    it, which is nearly always: clients then share the **same first samples**, and what one
    of them is tested on others have trained on.

    Sizes are ``lognormal(μ, sigma) + 5`` with μ from the mean, before they are divided over the
    classes.
    """
    if not mean_size > _ADDED:
        raise DataError(f"mean_size must be above {_ADDED}, not {mean_size}")
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
    is the tail exponent of the Pareto law that the sizes follow. The concentration of a class is
    `alpha` times the number of classes times the class's share, so `alpha` itself where all classes
    are equally large.
    """
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
        drawn = zip(stock, left, taken, strict=True)
        parts.append(np.concatenate([pool[rest : rest + take] for pool, rest, take in drawn]))
    return _checked_parts(parts)


def by_dirichlet_of_equal_sizes(
    labels: Indices, rng: np.random.RandomState, *, clients: int, alpha: float
) -> list[Indices]:
    """Class mixes drawn from a Dirichlet distribution, clients of equal size.

    The rule of FedDyn's code. Every client draws its class mix from ``Dir(α, …, α)`` over the
    classes. Then clients take samples in random order of turns, each of a class drawn from its own
    mix; a class that is used up is drawn no more. Every sample is given to one client, and sizes
    differ by at most one.
    """
    _check_clients(clients, len(labels))
    classes, left = np.unique(labels, return_counts=True)
    mixes = _log_dirichlet(rng, np.full((clients, len(classes)), alpha))
    turns = rng.permutation(np.arange(len(labels)) % clients)
    drawn = np.empty(0, dtype=np.int64)
    while len(drawn) < len(turns):
        # All turns up to the one that asks for a class that is used up: there is one per class.
        some = _draw_classes(rng, np.where(left > 0, mixes, -np.inf), turns[len(drawn) :])
        over = [
            places[number]
            for index, number in enumerate(left)
            if len(places := np.flatnonzero(some == index)) > number
        ]
        some = some[: min(over, default=len(some))]
        left = left - np.bincount(some, minlength=len(left))
        drawn = np.concatenate([drawn, some])
    owner = np.empty(len(labels), dtype=np.int64)
    for index, label in enumerate(classes):
        owner[rng.permutation(np.flatnonzero(labels == label))] = turns[drawn == index]
    return by_key(owner)


def by_dirichlet_per_class(
    labels: Indices, rng: np.random.RandomState, *, clients: int, alpha: float, min_size: int = 10
) -> list[Indices]:
    """Every class is divided among the clients by Dirichlet proportions, so sizes differ too.

    The rule of NIID-Bench's code: for every class, proportions from ``Dir(α, …, α)`` over the
    clients, of which those that already have their even share of all samples get nothing. All of it
    is drawn again until every client has `min_size` samples.
    """
    _check_clients(clients, len(labels))
    shares = _redrawn(lambda: _class_shares(labels, rng, clients, alpha), min_size)
    return _by_shares(shares, labels, rng)


def _class_shares(
    labels: Indices, rng: np.random.RandomState, clients: int, alpha: float
) -> Indices:
    """How many samples of each class each client gets by NIID-Bench's rule, ``[C, K]``."""
    counts = np.unique(labels, return_counts=True)[1]
    shares = np.zeros((len(counts), clients), dtype=np.int64)
    for index, count in enumerate(counts):
        logs = _log_dirichlet(rng, np.full(clients, alpha))
        logs[shares.sum(axis=0) >= len(labels) / clients] = -np.inf
        proportions = np.exp(logs - logs.max())
        ends = np.cumsum(proportions / proportions.sum()) * count
        shares[index] = np.diff(np.floor(ends[:-1]).astype(np.int64), prepend=0, append=count)
    return shares


def by_quantity(
    labels: Indices, rng: np.random.RandomState, *, clients: int, alpha: float, min_size: int = 10
) -> list[Indices]:
    """Sizes from a Dirichlet distribution, samples at random: quantity skew as in NIID-Bench.

    The sizes are proportional to ``Dir(α, …, α)`` over the clients, drawn again until every client
    has `min_size` samples.
    """
    _check_clients(clients, len(labels))

    def draw() -> Indices:
        logs = _log_dirichlet(rng, np.full(clients, alpha))
        return apportion(len(labels), np.exp(logs - logs.max()), minimum=0)[None]

    (sizes,) = _redrawn(draw, min_size)
    return _checked_parts(np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1]))


def within_groups(groups: Indices, rng: np.random.RandomState, *, clients: int) -> list[Indices]:
    """Natural groups, each divided evenly at random among its clients.

    Client u belongs to group u (modulo their number), so as many clients as groups are one each.
    """
    names = np.unique(groups)
    if clients < len(names):
        raise DataError(
            f"clients must be at least {len(names)}, one per natural group, not {clients}"
        )
    parts: list[Indices] = [np.empty(0, dtype=np.int64)] * clients
    for index, name in enumerate(names):
        members = range(index, clients, len(names))
        samples = rng.permutation(np.flatnonzero(groups == name))
        for client, part in zip(members, np.array_split(samples, len(members)), strict=True):
            parts[client] = part
    return _checked_parts(parts)


def by_key(keys: NDArray[np.generic], *, minimum: int = 1) -> list[Indices]:
    """One client per value of a natural key, such as the person shown or the writer.

    Clients come in the keys' sorted order; keys with fewer samples than the minimum make none.
    """
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    by_number = np.split(np.argsort(numbers.ravel(), kind="stable"), np.cumsum(counts)[:-1])
    parts = [part for part in by_number if len(part) >= minimum]
    if not parts:
        raise DataError(f"no client would have {minimum} samples; lower the minimum")
    return parts


def iid(labels: Indices, rng: np.random.RandomState, *, clients: int) -> list[Indices]:
    """The same number of samples for every client, at random."""
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
    """Divides an integer in proportion to weights, after a minimum for each."""
    base = min(minimum, total // len(weights))
    with np.errstate(invalid="ignore"):
        quota = (total - base * len(weights)) * weights / weights.sum()
    if not np.isfinite(quota).all():
        raise DataError("sizes that differ so much cannot be drawn; lower sigma or raise gamma")
    shares = np.floor(quota).astype(np.int64)
    short = total - base * len(weights) - int(shares.sum())
    # Whole shares leave a remainder: it goes to those who lost most by rounding down.
    shares[np.argsort(shares - quota, kind="stable")[:short]] += 1
    return np.asarray(shares + base, dtype=np.int64)


def _by_shares(shares: Indices, labels: Indices, rng: np.random.RandomState) -> list[Indices]:
    """The parts where it is known how many samples of each class each client gets, ``[C, K]``."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    for label, share in zip(np.unique(labels), shares, strict=True):
        if share.any():
            samples = rng.permutation(np.flatnonzero(labels == label))
            owner[samples[: share.sum()]] = np.repeat(np.arange(len(share)), share)
    given, ends = np.flatnonzero(owner >= 0), np.cumsum(shares.sum(axis=0))
    return _checked_parts(np.split(given[np.argsort(owner[given], kind="stable")], ends[:-1]))


def _redrawn(draw: Callable[[], Indices], min_size: int) -> Indices:
    """Shares ``[C, K]``, drawn again until every client has that number of samples."""
    for _ in range(_ATTEMPTS):
        shares = draw()
        if shares.sum(axis=0).min() >= min_size:
            return shares
    raise DataError(
        f"some client had fewer than {min_size} samples in each of {_ATTEMPTS} draws; raise alpha,"
        " or lower clients or min_size"
    )


def _log_dirichlet(
    rng: np.random.RandomState, concentration: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Logarithms of Dirichlet proportions up to a constant.

    In logarithms, and by ``Gamma(a) = Gamma(a + 1) · U^(1/a)``, since for small concentrations the
    proportions themselves are below what floating point can tell from zero.
    """
    uniform = 1 - rng.uniform(size=concentration.shape)
    return np.asarray(np.log(rng.gamma(concentration + 1)) + np.log(uniform) / concentration)


def _draw_classes(
    rng: np.random.RandomState, log_mixes: NDArray[np.float64], clients: Indices
) -> Indices:
    """A class for each of some turns, drawn from the mix of the client whose turn it is."""
    chances = np.exp(log_mixes - log_mixes.max(axis=1, keepdims=True))
    ends = np.cumsum(chances, axis=1)
    ends /= ends[:, -1:]
    # One sorted list for all clients, client u's from u to u + 1. Few enough bits keep the sums
    # of client and draw exact, so that none reaches the next client's.
    draws = np.floor(rng.random_sample(len(clients)) * 2**_BITS) / 2**_BITS
    flat = (np.arange(len(ends))[:, None] + ends).ravel()
    places = np.searchsorted(flat, clients + draws, side="right")
    return np.asarray(places - clients * ends.shape[1], dtype=np.int64)


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
            raise DataError(f"client {client} would have no samples; use fewer clients")
    return [np.sort(part).astype(np.int64) for part in parts]
