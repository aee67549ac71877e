"""Flower's simulation engine gives the bits of ours; where Ray is installed (make test-ray)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from helpers import same_tensors

pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedproto[ray]'")

RECIPE = """
seed = 3
data = { name = "synthetic", clients = 3, seed = 5 }
model = { name = "mlp", hidden = 6, features = 5 }
strategy = { name = "fedproto" }
train = { epochs = 2, batch_size = 20, lr = 0.05 }
schedule = { rounds = 3, cohort = 2, delta = 0.4 }
engine = { name = "reference", device = "cpu" }
flower = { defence = "none" }
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["fedproto", "scaffold"])
def test_the_same_bits_on_ray(tmp_path, strategy):
    (tmp_path / "recipe.toml").write_text(RECIPE.replace("fedproto", strategy))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    for out, command in {"ray": ["flower", "simulate"], "here": ["run"]}.items():
        done = subprocess.run(
            [sys.executable, "-m", "fedproto", *command, "recipe.toml", "--out", out, "-q"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    ours, theirs = (
        load_file(tmp_path / out / "checkpoints" / "round-000003.safetensors")
        for out in ("here", "ray")
    )
    assert same_tensors(ours, theirs)
