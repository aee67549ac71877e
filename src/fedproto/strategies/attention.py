"""Attention beyond the paper: made sharper or reversed, balanced over classes, class by class.

The paper's sigmoid of a sum of margins differs little from client to client, so its attention stays
close to uniform. `sharpened_attention` answers what happens when it does not. The other rules use
what prototypes tell besides: which classes a client holds. docs/guidance.md has them with what they
gain.

Shapes: K clients of the cohort, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB
_FRACTION = 2**53 - 1


def sharpened_attention(margin_kc: Tensor, sharpness: float) -> Tensor:
    """Attention from margins brought to one scale: ``softmax_k(β · z_k)``.

    Here ``z_k`` is the client's sum of margins ``Σ_c μ_k[c]``, as in eq. (11), less the cohort's
    mean and in units of its standard deviation. Clients that are all alike get equal attention.

    β = 0 is uniform, and a negative one favours clients with small margins, whose prototypes moved
    further.
    """
    sum_k = margin_kc.sum(dim=-1)
    centred_k = sum_k - sum_k.mean()
    spread = centred_k.square().mean().sqrt()
    if spread <= torch.finfo(sum_k.dtype).eps * len(sum_k):
        return torch.full_like(sum_k, 1 / len(sum_k))
    return torch.softmax(sharpness * centred_k / spread, dim=-1)


def class_attention(score_kc: Tensor, holds_kc: Tensor, others: float = 0.0) -> Tensor:
    """Attention class by class, among those who hold it: ``A[k, c] = s_k[c] / Σ_j s_j[c]``.

    The sum goes over the clients j that hold class c; the others count too if they are given a
    part ρ of their score, so that ρ = 1 tells no classes apart. With ``s_k[c] = a[k]`` holders
    count by their weights, with ``n_k[c]`` by their samples of the class, with ``σ(μ_k[c])`` by
    their margins. Holders of whom none has a score count alike.

    Returns:
        Shares ``[K, C]``, of which a column sums to one; to zero for a class that nobody holds.
    """
    score_kc = score_kc.double()
    rest_kc = others * score_kc * holds_kc.any(dim=0) if others else 0
    score_kc = torch.where(holds_kc, score_kc, rest_kc)
    total_c = score_kc.sum(dim=0)
    alike_kc = holds_kc.double() / holds_kc.sum(dim=0).clamp(min=1)
    return torch.where(total_c > 0, score_kc / torch.where(total_c > 0, total_c, 1), alike_kc)


def randomised_response(holds_c: Tensor, secret: int | Tensor, chance: float) -> Tensor:
    """What a client says of the classes it holds if it turns each answer with some chance.

    Each answer alone is then ``ln((1 − p) / p)``-differentially private (Warner 1965). The draws
    are a hash of secret and class (Steele et al. 2014, "SplitMix"), alike on every engine.
    """
    bits = torch.as_tensor(secret, device=holds_c.device) + _GOLDEN * (
        1 + torch.arange(holds_c.shape[-1], device=holds_c.device)
    )
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        bits = (bits ^ ((bits >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return holds_c ^ ((bits & _FRACTION).double() < chance * (_FRACTION + 1))


def balanced_attention(count_kc: Tensor, strength: float) -> Tensor:
    """The attention under which the cohort's classes are as balanced as can be.

    ``a = argmin ½‖Σ_k a_k q_k − u‖² + λ/2 ‖a − 1/K‖²`` over the simplex, where ``q_k`` are the
    client's shares of the classes and ``u`` is uniform over the classes that the cohort holds. With
    a large λ it is uniform.

    Solved exactly, by an active set: for λ > 0 the function is strictly convex, so every pass that
    sets a weight free lowers it, and there are finitely many sets. (The passes are limited all the
    same, because counts come from clients; the weights are shares after every one of them.)
    """
    count_kc = count_kc.double()
    q_kc = count_kc / count_kc.sum(dim=1, keepdim=True).clamp(min=1)
    present_c = (count_kc.sum(dim=0) > 0).double()
    u_c = present_c / present_c.sum().clamp(min=1)
    number = len(q_kc)
    hessian_kk = q_kc @ q_kc.t() + strength * torch.eye(number, dtype=torch.float64)
    pull_k = q_kc @ u_c + strength / number
    a_k = torch.full((number,), 1 / number, dtype=torch.float64)
    free_k = torch.ones(number, dtype=torch.bool)
    for _ in range(20 * number):
        best_k, price = _on_the_plane(hessian_kk, pull_k, free_k)
        if bool((best_k < 0).any()):
            # As far as the first weight that would turn negative; it is held at 0 from there.
            part_k = torch.where(best_k < 0, a_k / (a_k - best_k), torch.inf)
            first = int(part_k.argmin())
            a_k = (a_k + part_k[first] * (best_k - a_k)).clamp(min=0)
            a_k[first], free_k[first] = 0, False
            continue
        a_k = best_k
        slope_k = torch.where(free_k, 0, hessian_kk @ a_k - pull_k + price)
        if bool((slope_k >= -1e-12).all()):
            break
        free_k[int(slope_k.argmin())] = True
    return a_k / a_k.sum()


def _on_the_plane(hessian_kk: Tensor, pull_k: Tensor, free_k: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum of ``½aᵀHa − bᵀa`` with ``Σ a = 1`` over the free weights, and its multiplier."""
    free = free_k.nonzero().flatten()
    size = len(free)
    system = torch.ones(size + 1, size + 1, dtype=torch.float64)
    system[:size, :size] = hessian_kk[free][:, free]
    system[size, size] = 0
    solution = torch.linalg.solve(system, torch.cat([pull_k[free], torch.ones(1).double()]))
    return torch.zeros_like(pull_k).index_put((free,), solution[:size]), solution[size]
