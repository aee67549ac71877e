"""The paper, equation by equation, in its order and with its symbols.

Michieli & Ozay, "Prototype Guided Federated Learning of Visual Feature Representations", 2021.
Everything here is a pure function of tensors. Where the paper leaves something open, the docstring
says what is taken and why; docs/appendix/paper-map.md lists function and test per equation.

Shape legend, used as suffixes of the names:

    N  feature vectors        D  channels of a feature vector
    C  classes                K  clients of the cohort

``seen_i_c`` says where ``n_i[c] > 0``. Any number of leading dimensions ("...") is allowed, so
that all clients, or all clients of all runs of a sweep, are computed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedproto.types import Prototypes


def sample_shares(n_k: Tensor) -> Tensor:
    """FedAvg's weights, eq. (3), also ``a^0`` of eq. (13): ``n_k / Σ_j n_j``.

    Returns:
        The shares ``[..., K]``, in float64.
    """
    n_k = n_k.double()
    return n_k / n_k.sum(dim=-1, keepdim=True)


def class_prototypes(e_nd: Tensor, y_n: Tensor, num_classes: int) -> Prototypes:
    """Local prototypes, eq. (4): the mean feature of every class, ``p_k[c] = Σ e / n_k[c]``.

    A label outside ``0 … C-1`` (void) is left out.

    Returns:
        Sums ``[..., C, D]`` and counts ``[..., C]``; their quotient is ``p_k``.
    """
    return Prototypes(*class_sums(e_nd, y_n, num_classes))


def class_sums(e_nd: Tensor | None, y_n: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The sums and counts behind eq. (4): ``Σ e`` and ``n_k[c]``.

    No features: counts alone, and sums without channels. Void is left out.
    """
    member_nc = y_n.unsqueeze(-1) == torch.arange(num_classes, device=y_n.device)
    count_c = member_nc.sum(dim=-2)
    if e_nd is None:
        return torch.empty((*count_c.shape, 0), device=y_n.device), count_c
    # A product with the membership matrix, not a scatter: its order of summation is fixed.
    return member_nc.to(e_nd.dtype).transpose(-1, -2) @ e_nd, count_c


def minmax_normalize(p_d: Tensor) -> Tensor:
    """Min-max normalisation over the channels, the hat in ``p̂`` (text below eq. (4)).

    A prototype whose channels are all equal becomes the zero vector. Normalising twice changes
    nothing.
    """
    low = p_d.amin(dim=-1, keepdim=True)
    span = p_d.amax(dim=-1, keepdim=True) - low
    return torch.where(span > 0, (p_d - low) / torch.where(span > 0, span, 1), 0)


def same_class_distance(
    p_i_cd: Tensor, p_j_cd: Tensor, seen_i_c: Tensor, seen_j_c: Tensor
) -> Tensor:
    """``d^+`` of eq. (5): the distance between prototypes of the same class.

    Returns:
        Euclidean distances ``[..., C]``; 0 outside the shared classes ``C'``.
    """
    distance_c = torch.linalg.vector_norm(p_i_cd - p_j_cd, dim=-1)
    return torch.where(seen_i_c & seen_j_c, distance_c, 0)


def other_class_distance(
    p_i_cd: Tensor, p_j_cd: Tensor, seen_i_c: Tensor, seen_j_c: Tensor
) -> Tensor:
    """``d^-`` of eq. (6): the mean distance of ``p_i[c]`` to the other shared classes of ``p_j``.

    Returns:
        Mean Euclidean distances ``[..., C]``; 0 outside ``C'`` and where ``C'`` has one class only.
    """
    shared_c = seen_i_c & seen_j_c
    itself_cc = torch.eye(p_i_cd.shape[-2], dtype=torch.bool, device=p_i_cd.device)
    pair_cc = shared_c.unsqueeze(-1) & shared_c.unsqueeze(-2) & ~itself_cc
    # The matrix-product shortcut of cdist loses digits on prototypes that lie close together.
    distance_cc = torch.cdist(p_i_cd, p_j_cd, compute_mode="donot_use_mm_for_euclid_dist")
    others_c = pair_cc.sum(dim=-1).clamp(min=1)
    return torch.where(pair_cc, distance_cc, 0).sum(dim=-1) / others_c


def semantic_margin(p_i_cd: Tensor, p_j_cd: Tensor, seen_i_c: Tensor, seen_j_c: Tensor) -> Tensor:
    """Semantic prototype margin, SPM, eq. (7): ``μ = (d^- − d^+) / (d^- + d^+)``.

    The paper leaves three cases open: a class not shared, a class without any other shared one
    (``d^-`` is then a mean over nothing) and 0/0. All are taken as 0, the neutral margin.

    Returns:
        Margins in [−1, 1], ``[..., C]``.
    """
    same_c = same_class_distance(p_i_cd, p_j_cd, seen_i_c, seen_j_c)
    other_c = other_class_distance(p_i_cd, p_j_cd, seen_i_c, seen_j_c)
    shared_c = seen_i_c & seen_j_c
    total_c = other_c + same_c
    defined_c = shared_c & (shared_c.sum(dim=-1, keepdim=True) > 1) & (total_c > 0)
    return torch.where(defined_c, (other_c - same_c) / torch.where(defined_c, total_c, 1), 0)


def local_margin(before: Prototypes, after: Prototypes) -> Tensor:
    """Local prototype margin, LPM, eq. (8): ``μ_loc[c] = μ(p̂_k^{t-1}[c], p̂_k^t)``.

    The paper does not say what ``p_k^{t-1}`` is for a client that was not asked in the round
    before. Taken: the prototypes of the client's data under the received model, before training.

    Both are normalised here.
    """
    return semantic_margin(
        minmax_normalize(before.mean), minmax_normalize(after.mean), before.seen, after.seen
    )


def aggregate_margin(local: Prototypes, aggregate: Prototypes) -> Tensor:
    """Aggregate prototype margin, APM, eq. (9): ``μ_agg[c] = μ(p̂_k^t[c], p̂_agg^{t-1})``.

    The clients' are normalised here. What `aggregate_prototypes` gave in the round before is not
    normalised again: eq. (10) puts the hat on the terms.
    """
    return semantic_margin(minmax_normalize(local.mean), aggregate.mean, local.seen, aggregate.seen)


def aggregate_prototypes(cohort: Prototypes | Sequence[Prototypes]) -> Prototypes:
    """Aggregate prototypes, eq. (10): ``p̂_agg[c] = Σ_k n_k[c] / n_agg[c] · p̂_k[c]``.

    The clients' prototypes come stacked ``[..., K, C, D]`` or one by one, and are normalised here.

    Returns:
        Prototypes whose mean is ``p̂_agg`` and whose count is ``n_agg``; a class that no client
        holds has count 0 and so is in no ``C'``.
    """
    stacked = cohort if isinstance(cohort, Prototypes) else Prototypes.stack(cohort)
    normalized_kcd = minmax_normalize(stacked.mean)
    return Prototypes(normalized_kcd * stacked.count.unsqueeze(-1), stacked.count).merged()


def client_deviation(margin_kc: Tensor) -> Tensor:
    """Client deviations, eq. (11): ``v[k] = σ(Σ_c μ_k[c])``.

    Returns:
        Deviations ``[..., K]`` in (0, 1).
    """
    return torch.sigmoid(margin_kc.sum(dim=-1))


def normalize_attention(v_k: Tensor) -> Tensor:
    """Local or aggregate attention, eq. (12): ``a[k] = v[k] / Σ_j v[j]``.

    Deviations that all underflow to 0 are equal ones and give equal attention.
    """
    total = v_k.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, v_k / torch.where(total > 0, total, 1), 1 / v_k.shape[-1])


def federated_attention(a_agg_k: Tensor, a_loc_k: Tensor) -> Tensor:
    """Federated attention, eq. (13) for t > 0: ``a[k] = (a_agg[k] + a_loc[k]) / 2``.

    At t = 0 no aggregate prototypes exist and the equation takes `sample_shares` instead.
    """
    return (a_agg_k + a_loc_k) / 2


def weighted_average(w_k: Sequence[Tensor], a_k: Tensor) -> Tensor:
    """Aggregate weights, eq. (14), and eq. (3) with `sample_shares`: ``W = Σ_k a[k] W_k``.

    Summed client by client, in the given order, so that the result has the same bits wherever the
    updates came from.
    """
    total = w_k[0] * float(a_k[0])
    for w, a in zip(w_k[1:], a_k[1:].tolist(), strict=True):
        total.add_(w, alpha=a)
    return total


def aggregate_mean_margin(aggregate: Prototypes) -> Tensor:
    """Aggregate mean margin, AMM, after eq. (15).

    As printed, eq. (15) compares the aggregate prototypes with themselves, so ``d^+ = 0`` and the
    ratio of eq. (7) is 1 for every model, whereas the paper reports values from 0.34 to 8.68. Taken
    instead: ``d^- − d^+`` (here ``= d^-``) of the prototypes *before* min-max normalisation,
    averaged over the classes that were seen.

    Args:
        aggregate: The cohort's prototypes merged, not normalised, ``[..., C, D]``.

    Returns:
        The margin ``[...]``; 0 when fewer than two classes were seen.
    """
    p_cd, seen_c = aggregate.mean, aggregate.seen
    other_c = other_class_distance(p_cd, p_cd, seen_c, seen_c)
    return other_c.sum(dim=-1) / seen_c.sum(dim=-1).clamp(min=1)
