"""MMD against closed forms and a naive double loop."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from documents import ROOT
from fedproto.measures import features as discrepancy
from fedproto.measures.features import median_bandwidth, mmd2


def normal(n, d, shift, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    return shift + scale * torch.randn(n, d, generator=generator)


def gaussian_mmd2(d, shift, one, other, bandwidth):
    """MMD² of N(0, one² I) and N(shift·1, other² I) under the Gaussian kernel, by integration."""

    def expected(variance, distance2):
        wide = bandwidth**2 + variance
        return (bandwidth**2 / wide) ** (d / 2) * math.exp(-distance2 / (2 * wide))

    return (
        expected(2 * one**2, 0)
        + expected(2 * other**2, 0)
        - 2 * expected(one**2 + other**2, d * shift**2)
    )


def naive(x, y, bandwidth, paired):
    def kernel(a, b):
        return math.exp(-float((a - b).square().sum()) / (2 * bandwidth**2))

    n, m = len(x), len(y)
    xx = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    yy = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    if paired:
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    else:
        pairs = [(i, j) for i in range(n) for j in range(m)]
    return xx + yy - 2 * sum(kernel(x[i], y[j]) for i, j in pairs) / len(pairs)


@pytest.mark.parametrize(("shift", "scale"), [(0.0, 1.0), (0.5, 1.0), (0.0, 1.6), (0.3, 0.7)])
def test_mmd_of_two_gaussians_is_the_closed_form(shift, scale):
    expected = gaussian_mmd2(4, shift, 1.0, scale, 2.0)
    estimates = [
        mmd2(normal(600, 4, 0.0, 1.0, seed), normal(500, 4, shift, scale, 1000 + seed), 2.0)
        for seed in range(20)
    ]
    error = np.std(estimates, ddof=1) / math.sqrt(len(estimates))
    assert error < 0.004
    assert abs(np.mean(estimates) - expected) < 4 * error


def test_the_estimate_is_unbiased_where_the_plain_mean_is_not():
    # Five vectors each: a mean over all pairs would be 2/5·(1 − E k) ≈ 0.2 too large.
    estimates = [
        mmd2(normal(5, 2, 0.0, 1.0, seed), normal(5, 2, 0.0, 1.0, 5000 + seed), 1.0)
        for seed in range(2000)
    ]
    assert abs(np.mean(estimates)) < 4 * np.std(estimates) / math.sqrt(2000)
    assert min(estimates) < 0


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("block", [3, 1024])
def test_blocks_give_what_a_double_loop_gives(monkeypatch, paired, block):
    monkeypatch.setattr(discrepancy, "BLOCK", block)
    x, y = normal(8, 3, 0.0, 1.0, 0).double(), normal(8, 3, 0.4, 1.2, 1).double()
    if not paired:
        y = y[:7]
    assert mmd2(x, y, 1.3, paired=paired) == pytest.approx(naive(x, y, 1.3, paired), abs=1e-12)


def test_paired_estimate_is_unbiased_for_features_of_the_same_samples():
    # y depends on x: leaving k(x_i, y_i) in would lower every estimate.
    expected = gaussian_mmd2(2, 0.5, 1.0, 1.0, 1.0)
    samples = [normal(6, 2, 0.0, 1.0, seed) for seed in range(3000)]
    found = [mmd2(x, x + 0.5, 1.0, paired=True) for x in samples]
    independent = [mmd2(x, x + 0.5, 1.0) for x in samples]
    error = np.std(found) / math.sqrt(len(found))
    assert abs(np.mean(found) - expected) < 4 * error
    assert np.mean(independent) < expected - 10 * error


def test_equal_features_are_at_distance_zero():
    x = normal(300, 5, 3.0, 1.0, 0)
    assert mmd2(x, x, 1.0, paired=True) == pytest.approx(0, abs=1e-6)


def test_large_offsets_cost_no_digits():
    x, y = normal(200, 8, 0.0, 1.0, 0), normal(200, 8, 0.5, 1.0, 1)
    far = mmd2(x + 1000, y + 1000, 3.0)
    assert far == pytest.approx(mmd2(x.double(), y.double(), 3.0), rel=1e-3)


def test_bandwidth_is_the_median_distance():
    assert median_bandwidth(torch.tensor([[0.0], [1.0], [3.0]])) == 2  # distances 1, 2, 3
    assert median_bandwidth(torch.tensor([[0.0], [1.0], [3.0], [100.0]]), max_samples=3) == 2
    assert median_bandwidth(torch.ones(5, 2)) == 1
    assert median_bandwidth(torch.ones(1, 2)) == 1


def test_ten_thousand_features_take_seconds_and_no_kernel_matrix():
    script = ROOT / "benchmarks/mmd.py"
    result = subprocess.run(
        [sys.executable, str(script), "--repeats=1"], capture_output=True, text=True, check=True
    )
    report = json.loads(result.stdout)
    assert (report["samples"], report["channels"]) == (10_000, 256)
    # Processor time, since others may be busy on the same cores: two seconds on two of them.
    assert report["quadratic_processor_s"] < 4
    assert report["memory_mb"] < report["kernel_matrix_mb"]
