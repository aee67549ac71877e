"""Noise on prototypes: its size, what comes out of it, and its (ε, δ)."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from scipy.stats import norm

from fedproto.cli import main
from fedproto.errors import ConfigError
from fedproto.flower.privacy import clipped, epsilon, with_noise
from fedproto.types import Prototypes
from flower_grid import LocalGrid
from test_flower_engine import CLIENTS, everyone, over_flower, simulated


def test_long_features_are_shortened_and_short_ones_left():
    features = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(
        clipped(features, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])
    )


def test_the_noise_has_the_size_that_the_sensitivity_asks_for():
    big = Prototypes(torch.zeros(4000, 5), torch.full((4000,), 10**6))
    noisy = with_noise(big, clip=3.0, noise=0.5, num_examples=10**10)
    assert float(noisy.sum.std()) == pytest.approx(2 * 0.5 * 3.0, rel=0.05)
    spread = (noisy.count - 10**6).double().std()
    assert float(spread) == pytest.approx(math.sqrt((2 * 0.5) ** 2 + 1 / 12), rel=0.05)


def test_noise_differs_every_time():
    one = Prototypes(torch.zeros(3, 4), torch.full((3,), 50))
    first, second = (with_noise(one, 1.0, 1.0, 200) for _ in range(2))
    assert not torch.equal(first.sum, second.sum)


def test_noisy_prototypes_pass_the_guard(tmp_path):
    class Private(LocalGrid):
        node_config = {"clip": 1.0, "noise": 4.0}  # noqa: RUF012 - read only

    store = over_flower(tmp_path / "flower", Private(range(CLIENTS)), **everyone())
    plain = simulated(tmp_path / "here", **everyone())
    assert all(record.failures == {} for record in store.records())
    one, other = store.load_checkpoint().memory, plain.load_checkpoint().memory
    assert not torch.allclose(one["prototypes/sum"], other["prototypes/sum"])


@pytest.mark.parametrize("config", [{"clip": 1.0}, {"noise": 1.0}, {"clip": 0.0, "noise": 1.0}])
def test_half_a_setting_is_refused(tmp_path, config):
    class Private(LocalGrid):
        node_config = config

    store = over_flower(tmp_path / "flower", Private(range(CLIENTS)), **everyone())
    assert "clip and noise must both be given" in store.records()[0].note


def gaussian_delta(eps: float, noise: float) -> float:
    """The exact δ of one Gaussian mechanism (Balle & Wang 2018)."""
    return norm.cdf(0.5 / noise - eps * noise) - math.exp(eps) * norm.cdf(
        -0.5 / noise - eps * noise
    )


@pytest.mark.parametrize(("noise", "rounds"), [(2.0, 1), (8.0, 10), (20.0, 100)])
def test_epsilon_agrees_with_the_closed_form(noise, rounds):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    found = epsilon(noise, rounds, 1e-5)
    # Several Gaussian mechanisms are one with less noise.
    together = noise / math.sqrt(2 * rounds)
    assert gaussian_delta(found, together) <= 1e-5
    assert gaussian_delta(found * 0.98, together) > 1e-5


def test_epsilon_is_printed_with_what_it_does_not_cover(capsys):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    assert main(["flower", "privacy", "--noise", "8", "--rounds", "10"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"ε = {epsilon(8, 10, 1e-5):.3g}" in output
    assert "weights" in output


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError):
        epsilon(0, 1, 1e-5)
