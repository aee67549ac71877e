"""Noise on prototypes: its size, what comes out of it, and its (ε, δ)."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from scipy.stats import chi2, norm

from fedproto.cli import main
from fedproto.data.federation import Federation
from fedproto.data.tasks import task_named
from fedproto.engines.base import EngineOptions, Workload
from fedproto.engines.reference import read_state
from fedproto.errors import ConfigError
from fedproto.flower.privacy import (
    STEPS,
    PrivateEngine,
    discrete_gaussian,
    epsilon,
    on_lattice,
    with_noise,
)
from fedproto.models.adapter import with_features
from fedproto.strategies.values import Observation
from fedproto.types import ServerState
from flower_grid import LocalGrid
from flower_runs import CLIENTS, everyone, over_flower, simulated


def exact(sums, count) -> Observation:
    sums = torch.as_tensor(sums, dtype=torch.float64)
    return Observation(sums, torch.as_tensor(count), torch.zeros(()))


def test_long_features_are_shortened_and_short_ones_left():
    features = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
    shortened = on_lattice(features, 1.0)
    assert torch.equal(shortened, shortened.round())
    torch.testing.assert_close(
        shortened / STEPS,
        torch.tensor([[0.6, 0.8], [0.3, 0.4], [0, 0], [0, 0], [0, 0]], dtype=torch.float64),
        atol=2 / STEPS,
        rtol=0,
    )


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.floats(1e-3, 1e3),
)
def test_no_feature_is_longer_than_the_sensitivity_allows(feature, clip):
    steps = [int(step) for step in on_lattice(torch.tensor([feature]), clip)[0].tolist()]
    assert sum(step**2 for step in steps) <= STEPS**2


def test_the_noise_has_the_size_that_the_sensitivity_asks_for():
    big = exact(torch.zeros(800, 5), torch.full((800,), 10**6))
    noisy = with_noise(big, noise=0.5, num_examples=10**10)
    assert float(noisy.sums.double().std()) == pytest.approx(2 * 0.5 * STEPS, rel=0.1)
    assert float((noisy.count - 10**6).double().std()) == pytest.approx(2 * 0.5, rel=0.15)


@pytest.mark.parametrize("variance", [Fraction(1, 3), Fraction(2), Fraction(37, 5)], ids=str)
def test_noise_is_distributed_as_it_should_be(variance):
    draws = 20_000
    seen = Counter(discrete_gaussian(variance) for _ in range(draws))
    chance = {x: math.exp(-(x**2) / (2 * variance)) for x in range(-40, 41)}
    total = sum(chance.values())
    expected = {x: draws * p / total for x, p in chance.items() if draws * p / total > 10}
    statistic = sum((seen[x] - wanted) ** 2 / wanted for x, wanted in expected.items())
    assert chi2.sf(statistic, len(expected)) > 1e-6


def test_noise_differs_every_time():
    one = exact(torch.zeros(3, 4), torch.full((3,), 50))
    first, second = (with_noise(one, 1.0, 200) for _ in range(2))
    assert not torch.equal(first.sums, second.sums)


def release(sums: torch.Tensor, noise: float) -> torch.Tensor:
    """What a client with one class would send, clipped to 1, as its sums."""
    workload = Workload(
        Federation.from_clients([(sums, torch.zeros(len(sums), dtype=torch.int64))], num_classes=1),
        with_features(nn.Sequential(nn.Identity(), nn.Linear(sums.shape[1], 1))),
        task_named("classification"),
        EngineOptions(),
    )
    engine = PrivateEngine(workload, 1.0, noise)
    state = ServerState(0, *read_state(workload.model))
    own = workload.federation.clients[0].train
    return engine._observe(own, state, frozenset({"features"})).sums


def test_the_attack_that_searched_the_generator_finds_nothing(monkeypatch):
    """A seeded generator of PyTorch keeps 32 bits of its seed: all its streams can be searched.

    The search takes minutes, so the attacker here is told every seed that is ever used, and tries
    the first thousand besides. Before, the noise could be taken away to the last bit.
    """
    seeds = []
    plain = torch.Generator.manual_seed

    class Spied(torch.Generator):
        def manual_seed(self, seed):
            seeds.append(seed % 2**32)
            return plain(self, seed)

    monkeypatch.setattr(torch, "Generator", Spied)
    true = torch.full((400, 16), 0.125)
    released = release(true, noise=2.0).double()
    monkeypatch.undo()
    kept = true[: round(len(true) * 0.8)].sum(dim=0).double()
    for seed in [*seeds, *range(1000)]:
        generator = torch.Generator().manual_seed(seed)
        guess = released - torch.randn(1, 16, generator=generator, dtype=torch.float64) * 4
        assert not torch.allclose(guess, kept, atol=1e-3)
    assert not torch.allclose(released, kept, atol=0.5)


def test_the_last_bits_of_a_release_tell_nothing():
    """Floating-point noise gives values that only one of two neighbouring data sets can give."""
    for value in (0.1, 0.3, 1e-7):
        steps = release(torch.full((400, 32), value), noise=2.0).double() * STEPS
        assert torch.equal(steps, steps.round())


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
def test_epsilon_is_just_above_the_closed_form(noise, rounds):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    found = epsilon(noise, rounds, 1e-5)
    # Several Gaussian mechanisms are one with less noise.
    together = noise / math.sqrt(2 * rounds)
    assert gaussian_delta(found, together) <= 1e-5
    assert gaussian_delta(found * 0.9, together) > 1e-5


def test_epsilon_is_printed_with_what_it_does_not_cover(capsys):
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    assert main(["flower", "privacy", "--noise", "8", "--rounds", "10"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"ε = {epsilon(8, 10, 1e-5):.3g}" in output
    assert "weights" in output


def test_impossible_numbers_are_refused():
    with pytest.raises(ConfigError):
        epsilon(0, 1, 1e-5)


@pytest.mark.parametrize(
    ("strategy", "refused"), [("qfedavg", True), ("feddisco", True), ("fedrs", False)]
)
def test_a_payload_that_the_noise_does_not_cover_is_refused(tmp_path, strategy, refused):
    class Private(LocalGrid):
        node_config = {"clip": 1.0, "noise": 4.0}  # noqa: RUF012 - read only

    store = over_flower(
        tmp_path / "flower", Private(range(CLIENTS)), strategy={"name": strategy}, **everyone()
    )
    reasons = [reason for record in store.records() for reason in record.failures.values()]
    assert bool(reasons) == refused
    assert all("noise does not cover" in reason for reason in reasons)
