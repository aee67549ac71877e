"""Expected calibration error on constructed cases."""

from __future__ import annotations

import pytest
import torch

from fedproto.analysis.uncertainty import calibration_error, reliability, tally_confidence


def scores_of(*confidences):
    """Scores whose softmax gives the first of two classes these probabilities."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([p, 1 - p], dim=1).log()


def test_error_of_a_constructed_case():
    # Ten predictions at 0.95, six of them right; ten at 0.65, nine of them right.
    scores = scores_of(*[0.95] * 10, *[0.65] * 10)
    targets = torch.tensor([0] * 6 + [1] * 4 + [0] * 9 + [1])
    tally = tally_confidence(scores, targets, bins=10)
    assert calibration_error(tally) == pytest.approx(0.5 * 0.35 + 0.5 * 0.25)
    assert reliability(tally) == {
        "bin count": {"0.7": 10, "1": 10},
        "bin accuracy": {"0.7": pytest.approx(0.9), "1": pytest.approx(0.6)},
        "bin confidence": {"0.7": pytest.approx(0.65), "1": pytest.approx(0.95)},
    }


def test_a_calibrated_model_has_no_error():
    tally = tally_confidence(scores_of(*[0.75] * 4), torch.tensor([0, 0, 0, 1]))
    assert calibration_error(tally) == pytest.approx(0)


def test_certain_predictions_are_in_the_last_bin():
    tally = tally_confidence(torch.tensor([[1000.0, 0.0], [0.0, 1000.0]]), torch.tensor([0, 0]))
    assert tally[0].tolist() == [0] * 14 + [2]
    assert calibration_error(tally) == pytest.approx(0.5)


def test_tallies_of_parts_add_up():
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(100, 5, generator=generator), torch.arange(100) % 5
    parts = [tally_confidence(scores[part], targets[part]) for part in torch.arange(100).chunk(7)]
    assert torch.allclose(sum(parts), tally_confidence(scores, targets))


def test_label_maps_count_pixels_and_no_void():
    scores = scores_of(0.9, 0.9, 0.8, 0.8).T.reshape(1, 2, 2, 2)
    targets = torch.tensor([[[0, 255], [0, 1]]])
    tally = tally_confidence(scores, targets, bins=10)
    assert tally[0].sum() == 3
    assert calibration_error(tally) == pytest.approx((0.1 * 1 + abs(0.5 - 0.8) * 2) / 3)


def test_a_class_may_have_the_number_that_is_void_in_label_maps():
    scores = torch.zeros(1, 300)
    scores[0, 255] = 10
    assert tally_confidence(scores, torch.tensor([255]))[0].sum() == 1


def test_no_samples_have_no_error():
    assert calibration_error(torch.zeros(3, 15)) == 0
    assert not any(reliability(torch.zeros(3, 15)).values())
