"""Attention beyond the paper: numbers worked by hand, and what must hold for any margins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedproto.strategies import FedProto
from fedproto.strategies.attention import sharpened_attention
from fedproto.strategies.fedproto import COUNT, MARGIN, SUM
from fedproto.types import ClientUpdate, ServerState

MARGIN_KC = torch.tensor([[0.5, 0.5], [1.0, -1.0], [-0.5, -0.5]], dtype=torch.float64)


def test_sharpened_attention_by_hand() -> None:
    # Sums 1, 0 and -1: mean 0, standard deviation sqrt(2/3).
    shares = [math.exp(step * 2 / math.sqrt(2 / 3)) for step in (1, 0, -1)]
    expected = torch.tensor([share / sum(shares) for share in shares], dtype=torch.float64)
    torch.testing.assert_close(sharpened_attention(MARGIN_KC, 2.0), expected)
    torch.testing.assert_close(sharpened_attention(MARGIN_KC, -2.0), expected.flip(0))


def test_no_sharpness_or_no_difference_is_uniform() -> None:
    uniform = torch.full((3,), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(sharpened_attention(MARGIN_KC, 0.0), uniform)
    alike = torch.full((3, 4), 0.1, dtype=torch.float64)
    torch.testing.assert_close(sharpened_attention(alike, 50.0), uniform)


@given(
    margins=st.lists(st.lists(st.floats(-1, 1), min_size=3, max_size=3), min_size=1, max_size=8),
    sharpness=st.floats(-20, 20),
)
def test_shares_are_shares_and_follow_the_order(
    margins: list[list[float]], sharpness: float
) -> None:
    margin_kc = torch.tensor(margins, dtype=torch.float64)
    share_k = sharpened_attention(margin_kc, sharpness)
    assert bool((share_k >= 0).all())
    assert float(share_k.sum()) == pytest.approx(1)
    sums = margin_kc.sum(dim=-1) * math.copysign(1, sharpness)
    by_margin = share_k[sums.argsort()]
    assert bool((by_margin.diff() >= -1e-12).all())


def _update(client: int, shift: float) -> ClientUpdate:
    mean_cd = torch.tensor([[0.0, 1.0], [1.0, 0.0]]) + shift * torch.tensor([[1.0, 0], [0, 0]])
    count_c = torch.tensor([5, 5])
    return ClientUpdate(
        client=client,
        num_examples=10,
        params={"w": torch.zeros(1)},
        buffers={},
        train_loss=None,
        payload={
            SUM: mean_cd * 5,
            COUNT: count_c,
            MARGIN: torch.tensor([1.0 - shift, 1.0 - shift]),
        },
        epochs_done=1,
        steps=1,
        lr=0.1,
    )


def test_strategy_favours_moved_clients_when_reversed() -> None:
    updates = [_update(0, 0.0), _update(1, 0.4)]
    known = {SUM: torch.tensor([[0.0, 1.0], [1.0, 0.0]]), COUNT: torch.tensor([1, 1])}
    state = ServerState(1, {"w": torch.zeros(1)}, {}, known)
    for margins in ("both", "local"):
        forward = FedProto(sharpness=1.0, margins=margins).weigh(state, updates).client
        reverse = FedProto(sharpness=-1.0, margins=margins).weigh(state, updates).client
        assert forward[0] > forward[1]
        torch.testing.assert_close(reverse, forward.flip(0))
    none = FedProto(sharpness=0.0).weigh(state, updates).client
    torch.testing.assert_close(none, torch.full((2,), 0.5, dtype=torch.float64))
