"""The Triton kernels of the stacked engine against PyTorch's own layers and the reference engine.

They run on a CUDA device, or anywhere in Triton's interpreter: `TRITON_INTERPRET=1 pytest …`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name everyone uses

from engine_cases import check_same, small_federation, sweep
from fedproto import FedProto, FedProx
from fedproto.engines.stacking import formulas, functional, launching, network
from fedproto.engines.stacking.launching import CUTS, MlpStep
from fedproto.engines.stacking.layers import Conv, Dense, computed
from fedproto.engines.stacking.lockstep import Lockstep
from fedproto.engines.training import TrainOptions
from fedproto.models.small import CNN4Options, CNNOptions, MLPOptions

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither CUDA nor TRITON_INTERPRET=1", allow_module_level=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.fixture
def with_kernels(monkeypatch):
    """Networks use kernels, on whatever device; collects the networks."""
    made, build = [], network.layer_network

    def built(*args, **_):
        made.append(build(*args, kernels=True))
        return made[-1]

    monkeypatch.setattr(functional, "layer_network", built)
    return made


@pytest.mark.parametrize("cut", ["tf32", "tf32x3", "few"])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("channels", "image", "taps"),
    [
        ((1, 16), (8, 9), 5),
        ((3, 16), (7, 6), 3),
        ((16, 32), (7, 9), 5),
        ((16, 16), (6, 5), 3),
        ((32, 64), (6, 6), 5),
    ],
)
def test_a_convolution_is_that_of_pytorch(monkeypatch, channels, image, taps, pooled, cut):
    """With the cuts of every precision, all in full precision."""
    cuts = {name: dict.fromkeys(one, one[cut]) for name, one in CUTS.items()}
    monkeypatch.setattr(launching, "CUTS", cuts)
    jobs, batch = 2, 3
    layer = Conv("conv", channels, image, taps, kernels=True)
    assert launching.conv_suits(layer, first=channels[0] < 16)
    x, bias = random(jobs, batch, *image, channels[0]), random(jobs, channels[1])
    weight = random(jobs, channels[1], channels[0], taps, taps)
    own = [one.double().requires_grad_() for one in (x.movedim(-1, 2), weight)]
    truth = torch.stack(
        [
            F.conv2d(*one, shift, padding=taps // 2)
            for *one, shift in zip(*own, bias.double(), strict=True)
        ]
    )
    if pooled:
        truth = torch.stack([F.max_pool2d(one, 2).relu() for one in truth])
    packed = layer.pack(weight).contiguous()
    found, code = launching.conv_forward(layer, x, packed, bias, pooled=pooled)
    assert error(found.movedim(-1, 2), truth.detach()) < 1e-6
    dy = random(*found.shape)
    dx, dw = torch.autograd.grad(truth, own, dy.double().movedim(-1, 2))
    gradient = layer.weight_gradient(x, dy, code)
    assert error(layer.unpack(gradient.compute()), dw) < 1e-6
    changed = packed.clone()
    gradient.subtract_from(changed)
    assert error(layer.unpack(packed - changed), dw) < 1e-5
    if channels[0] >= 16:
        dz = dy if code is None else formulas.unpool(dy, code, image)
        assert error(layer.input_gradient({"conv.weight": packed}, dz).movedim(-1, 2), dx) < 1e-6


def test_a_dense_layer_is_that_of_pytorch():
    layer = Dense("dense", 70, 40, kernels=True)
    x, dy, weight, bias = random(2, 5, 70), random(2, 5, 40), random(2, 40, 70), random(2, 40)
    params = {"dense.weight": weight, "dense.bias": bias}
    live = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
    h, saved = layer.forward(params, x, formulas.unfused, live)
    truth = (x.double() @ weight.double().mT + bias.double().unsqueeze(1)).relu()
    assert error(h, truth) < 1e-6
    dx, gradients = layer.backward(params, saved, dy, formulas.unfused, first=False)
    dz = torch.where(truth > 0, dy.double(), 0)
    assert error(dx, dz @ weight.double()) < 1e-6
    dw = dz.mT @ x.double()
    assert error(computed(gradients["dense.weight"]), dw) < 1e-6
    expected = weight.double() - dw
    gradients["dense.weight"].subtract_from(weight)
    assert error(weight, expected) < 1e-6


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


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (CNNOptions(channels1=16, channels2=16, features=8), (1, 9, 8)),
        (CNN4Options(channels=16, batch_norm=True), (3, 16, 17)),
    ],
    ids=["cnn", "batch norm"],
)
def test_training_with_kernels_is_that_of_the_reference(monkeypatch, with_kernels, model, shape):
    monkeypatch.setattr(launching, "dense_suits", lambda _: True)
    options = {
        "strategies": [FedProx(mu=1.0), FedProto()],
        "federation": small_federation(shape=shape, sizes=(4, 6, 3)),
        "train": TrainOptions(epochs=1, batch_size=5, lr=0.05),
        "dtype": "float32",
        "device": DEVICE,
    }
    found = sweep("stacked", model, **options)
    assert all(layer.kernels for one in with_kernels for layer in one.layers)
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
