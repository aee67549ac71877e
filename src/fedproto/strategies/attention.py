"""Attention beyond the paper: made sharper or reversed.

The paper's sigmoid of a sum of margins differs little from client to client, so its attention stays
close to uniform. `sharpened_attention` answers what happens when it does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sharpened_attention(margin_kc: Tensor, sharpness: float) -> Tensor:
    """Attention from margins brought to one scale: ``softmax_k(β · z_k)``.

    Here ``z_k`` is the client's sum of margins ``Σ_c μ_k[c]``, as in eq. (11), less the cohort's
    mean and in units of its standard deviation. Clients that are all alike get equal attention.

    Args:
        margin_kc: Margins ``[K, C]``.
        sharpness: β; 0 is uniform, and a negative one favours clients with small margins, whose
            prototypes moved further.

    Returns:
        Shares ``[K]`` that sum to one.
    """
    sum_k = margin_kc.sum(dim=-1)
    centred_k = sum_k - sum_k.mean()
    spread = centred_k.square().mean().sqrt()
    if spread <= torch.finfo(sum_k.dtype).eps * len(sum_k):
        return torch.full_like(sum_k, 1 / len(sum_k))
    return torch.softmax(sharpness * centred_k / spread, dim=-1)
