"""Entropy of predictions and of features, against values known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedproto.measures.uncertainty import (
    feature_entropy,
    shannon_entropy,
    softmax_entropy,
    upsampled,
)


def test_certain_uniform_and_half_and_half():
    p = torch.tensor([[1, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])
    expected = [0, math.log(4), math.log(2)]
    assert shannon_entropy(p).tolist() == pytest.approx(expected)


def test_softmax_entropy_is_that_of_the_probabilities():
    p = torch.tensor([[0.7, 0.2, 0.1], [1 / 3] * 3])
    expected = [-(0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1)), math.log(3)]
    # Scores may be shifted by any constant.
    assert softmax_entropy(p.log() + 5).tolist() == pytest.approx(expected)
    assert float(softmax_entropy(torch.tensor([[1000.0, 0.0]]))) == 0


def test_feature_entropy_normalises_over_the_channels_of_each_position():
    features = torch.tensor([[[[2.0, 0.0, 5.0]], [[2.0, 0.0, 0.0]], [[0.0, 0.0, -3.0]]]])
    assert feature_entropy(features).shape == (1, 1, 3)
    assert feature_entropy(features).flatten().tolist() == pytest.approx([math.log(2), 0, 0])
    assert torch.allclose(feature_entropy(7 * features), feature_entropy(features))


def test_upsampling_keeps_a_constant_map():
    assert torch.equal(upsampled(torch.full((1, 2, 3), 0.5), (7, 8)), torch.full((1, 7, 8), 0.5))
