"""The Triton kernels of the stacked engine against PyTorch's own layers and the reference engine.

They run on a CUDA device, and elsewhere in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from engine_cases import CLASSES, check_same, conv_step, dense_step, small_federation, sweep
from fedproto import FedProto, FedProx
from fedproto.engines.stacking import launching, network
from fedproto.engines.stacking.launching import CUTS, MlpStep
from fedproto.engines.stacking.layers import Norm, Pass, computed
from fedproto.engines.stacking.lockstep import Lockstep
from fedproto.engines.training import TrainOptions
from fedproto.models import with_features
from fedproto.models.resnet import ResNet20Options
from fedproto.models.small import CNN4Options, CNNOptions, MLPOptions

pytest.importorskip("triton", reason="Triton exists for Linux alone")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.fixture
def with_kernels(monkeypatch):
    """Networks use kernels, on whatever device; collects the networks."""
    made, build = [], network.stacked_network

    def built(*args, **_):
        made.append(build(*args, kernels=True))
        return made[-1]

    monkeypatch.setattr(network, "stacked_network", built)
    return made


SHAPES = {
    "one channel": conv_step((1, 16), (8, 9), 5, kernels=True),
    "strips": conv_step((3, 16), (7, 6), 5, kernels=True),
    "strips without padding": conv_step((3, 16), (9, 8), 5, padding=(0, 0), kernels=True),
    "by taps": conv_step((32, 40), (6, 6), 3, kernels=True),
    "uneven": conv_step((20, 24), (7, 9), 3, kernels=True),
    "strided": conv_step((16, 32), (7, 8), 3, stride=(2, 2), pool="", kernels=True),
    "one tap": conv_step((16, 32), (8, 8), 1, stride=(2, 2), pool="", relu=False, kernels=True),
    "without bias": conv_step((16, 16), (6, 5), 3, bias=False, pool="", relu=False, kernels=True),
}


@pytest.mark.parametrize("cut", ["tf32", "tf32x3", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_is_that_of_pytorch(monkeypatch, shape, cut):
    """With the cuts of every precision, in full precision; bfloat16 as it is where there is any."""
    half = cut == "bf16" and DEVICE == "cuda"
    cuts = {
        name: {
            "tf32x3": {
                most: one._replace(products="tf32x3") for most, one in of.get(cut, {}).items()
            }
        }
        for name, of in CUTS.items()
    }
    if not half:
        monkeypatch.setattr(launching, "CUTS", cuts)
    # In bfloat16 a maximum may be another pixel.
    most, most_backward = (1e-2, 0.1) if half else (1e-6, 1e-6)
    layer, jobs, batch = SHAPES[shape], 2, 3
    (ins, outs), image, taps = layer.channels, layer.image, layer.taps
    x, bias = random(jobs, batch, *image, ins), random(jobs, outs)
    weight = random(jobs, outs, ins, *taps)
    own = [one.double().requires_grad_() for one in (x.movedim(-1, 2), weight, bias)]
    truth = torch.stack(
        [
            F.conv2d(x, w, b if layer.bias else None, layer.stride, layer.padding)
            for x, w, b in zip(*own, strict=True)
        ]
    )
    if layer.relu:
        truth = truth.relu()
    if layer.pool:
        truth = torch.stack([F.max_pool2d(one, 2) for one in truth])
    packed = layer.pack(weight).contiguous()
    params = {"conv.weight": packed, "conv.bias": bias}
    live = torch.ones(jobs, batch, dtype=torch.bool, device=DEVICE)
    given = x.bfloat16() if half else x
    found, saved = layer.forward(Pass(params, live), [given])
    assert error(found.movedim(-1, 2), truth.detach()) < most
    dy = random(*found.shape)
    dx, dw, *db = torch.autograd.grad(truth, own, dy.double().movedim(-1, 2), allow_unused=True)
    on, slope = Pass(params, live), dy.to(given.dtype)
    (found,), gradients = layer.backward(on, saved, slope, first=False)
    assert error(found.movedim(-1, 2), dx) < most_backward
    gradient = gradients["conv.weight"]
    assert error(layer.unpack(computed(gradient)), dw) < most_backward
    if layer.bias:
        assert error(gradients["conv.bias"], db[0]) < most_backward
    gradient.subtract_from(packed)
    assert error(layer.pack(weight) - packed, layer.pack(dw)) < max(1e-5, most_backward)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter cannot multiply bfloat16")
def test_activations_may_be_bfloat16():
    layer = SHAPES["strips without padding"]
    x, weight, bias = random(2, 3, 9, 8, 3), random(2, 16, 3, 5, 5), random(2, 16)
    params = {"conv.weight": layer.pack(weight).contiguous(), "conv.bias": bias}
    live = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    exact, kept = layer.forward(Pass(params, live), [x])
    y, saved = layer.forward(Pass(params, live), [x.bfloat16()])
    assert y.dtype == torch.bfloat16
    assert error(y, exact.double()) < 1e-2
    dy = random(*y.shape)
    _, truth = layer.backward(Pass(params, live), kept, dy, first=True)
    _, found = layer.backward(Pass(params, live), saved, dy.bfloat16(), first=True)
    gradient = computed(found["conv.weight"])
    assert gradient.dtype == torch.float32
    # A maximum may be another pixel after rounding.
    assert error(gradient, computed(truth["conv.weight"]).double()) < 0.1


@pytest.mark.parametrize("relu", [True, False])
def test_a_dense_layer_is_that_of_pytorch(relu):
    layer = dense_step(70, 40, relu=relu, kernels=True)
    x, dy, weight, bias = random(2, 5, 70), random(2, 5, 40), random(2, 40, 70), random(2, 40)
    params = {"dense.weight": weight, "dense.bias": bias}
    live = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
    h, saved = layer.forward(Pass(params, live), [x])
    truth = x.double() @ weight.double().mT + bias.double().unsqueeze(1)
    truth = truth.relu() if relu else truth
    assert error(h, truth) < 1e-6
    (dx,), gradients = layer.backward(Pass(params, live), saved, dy, first=False)
    dz = torch.where(truth > 0, dy.double(), 0) if relu else dy.double()
    assert error(dx, dz @ weight.double()) < 1e-6
    dw = dz.mT @ x.double()
    assert error(computed(gradients["dense.weight"]), dw) < 1e-6
    expected = weight.double() - dw
    gradients["dense.weight"].subtract_from(weight)
    assert error(weight, expected) < 1e-6


NORMS = {
    "odd groups": ((12, 3), (5, 3), {"relu": True}),
    "with a residual": ((8, 2), (9, 8), {"relu": True, "inputs": (0, 1)}),
    "one channel a group": ((16, 16), (5, 5), {"inputs": (0, 1)}),
    "one group, no image": ((6, 1), (), {}),
}


@pytest.mark.parametrize("shape", NORMS)
def test_group_normalisation_is_that_of_the_formulas(shape):
    (channels, groups), image, more = NORMS[shape]
    given = {"inputs": (0,), "output": 2, "name": "norm", "eps": 1e-5} | more
    plain = Norm(channels=channels, groups=groups, **given)
    x = [random(2, 3, *image, channels) * scale + 1 for scale in (2, 0.5)][: len(plain.inputs)]
    # Another sample's numbers: a slope along the output itself has no gradient of the input.
    dy = random(2, 3, *image, channels).flip(1)
    params = {"norm.weight": random(2, channels), "norm.bias": random(2, channels) + 1}
    live = torch.ones(2, 3, dtype=torch.bool, device=DEVICE)
    found = []
    for layer in (plain, replace(plain, kernels=True)):
        y, saved = layer.forward(Pass(params, live), x)
        dx, gradients = layer.backward(Pass(params, live), saved, dy, first=False)
        found.append([y, *dx, *gradients.values()])
    for truth, own in zip(*found, strict=True):
        assert error(own, truth.double()) < 1e-5


def test_whole_steps_are_those_of_the_reference(monkeypatch, with_kernels):
    made = []
    step = MlpStep.__call__
    monkeypatch.setattr(MlpStep, "__call__", lambda *args, **more: made.append(step(*args, **more)))
    options = {
        "strategies": [FedProx(mu=1.0), FedProto()],
        "federation": small_federation(shape=(6,), sizes=(4, 6, 3)),
        "train": TrainOptions(epochs=2, batch_size=5, lr=0.05),
        "dtype": "float32",
        "device": DEVICE,
    }
    model = MLPOptions(hidden=20, features=40)
    found = sweep("stacked", model, **options)
    assert made
    assert with_kernels
    check_same(found, sweep("reference", model, **options), 1e-4)


class Residual(nn.Module):
    """A block of a residual network, as small as it can be."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 4), nn.GroupNorm(2, 4)])
        self.out = nn.Linear(4 * 16, CLASSES)

    def forward(self, x):
        x = self.norms[0](self.first(x)).relu()
        return self.out((self.norms[1](self.second(x)) + x).relu().flatten(1))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (CNNOptions(channels1=16, channels2=16, features=8), (1, 9, 8)),
        (CNN4Options(channels=16, batch_norm=True), (3, 16, 17)),
        (with_features(Residual(), head="out"), (3, 4, 4)),
        pytest.param(
            *(ResNet20Options(), (3, 8, 8)),
            marks=pytest.mark.skipif(DEVICE == "cpu", reason="minutes in the interpreter"),
        ),
    ],
    ids=["cnn", "batch norm", "residual", "resnet"],
)
def test_training_with_kernels_is_that_of_the_reference(with_kernels, model, shape):
    options = {
        "strategies": [FedProx(mu=1.0), FedProto()],
        "federation": small_federation(shape=shape, sizes=(4, 6, 3)),
        "train": TrainOptions(epochs=1, batch_size=5, lr=0.05, weight_decay=0.1),
        "dtype": "float32",
        "device": DEVICE,
    }
    found = sweep("stacked", model, **options)
    assert all(one.convolves for one in with_kernels)
    check_same(found, sweep("reference", model, **options), 1e-4)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_whole_step_that_is_wrong_is_found(monkeypatch, with_kernels, wrong):
    step, kernel = Lockstep._step, MlpStep.__call__

    def checked(self, size):
        if not self._checked:
            self._check_kernels(size)
            assert (self._whole is None) == wrong
        step(self, size)

    def bad(self, jobs, tensors, starts, **more):
        kernel(self, jobs, tensors, starts, **more)
        tensors[3].mul_(1.1)

    monkeypatch.setattr(Lockstep, "_step", checked)
    if wrong:
        monkeypatch.setattr(MlpStep, "__call__", bad)
    options = {
        "strategies": [FedProx(mu=1.0)],
        "federation": small_federation(shape=(6,), sizes=(4, 6, 3)),
        "train": TrainOptions(epochs=1, batch_size=5, lr=0.05),
        "dtype": "float32",
        "device": DEVICE,
    }
    model = MLPOptions(hidden=20, features=40)
    with pytest.warns(UserWarning, match="wrong gradients") if wrong else nullcontext():
        found = sweep("stacked", model, **options)
    assert with_kernels
    check_same(found, sweep("reference", model, **options), 1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="a device's own compiler is used above")
@pytest.mark.timeout(900)
def test_kernels_compile_for_a_gpu(tmp_path):
    """The interpreter runs what a compiler refuses, and has no products by parts in bfloat16."""
    script = Path(__file__).parents[1] / "support/compile_kernels.py"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    made = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert {precision for _, precision in made} == {"tf32", "tf32x3", "bf16x3", "None"}
    everywhere = {"convolve", "weight_gradient", "dense", "group_norm", "group_norm_backward"}
    assert {name for name, _ in made} == everywhere | {"mlp_step"}
