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
from fedproto.engines.stacking import choice, formulas, network
from fedproto.engines.stacking.blocks import Conv
from fedproto.engines.stacking.kernel_blocks import KernelConv, KernelDense
from fedproto.engines.stacking.launching import CUTS, ConvKernels, Cuts, DenseKernels
from fedproto.engines.stacking.lockstep import Lockstep
from fedproto.engines.stacking.whole import MlpStep
from fedproto.engines.training import TrainOptions
from fedproto.models.small import CNNOptions, MLPOptions
from fedproto.strategies import FedProto, FedProx

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("neither CUDA nor TRITON_INTERPRET=1", allow_module_level=True)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
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
def test_a_convolution_is_that_of_pytorch(monkeypatch, channels, image, taps, pooled, few):
    monkeypatch.setattr(
        "fedproto.engines.stacking.launching.CUTS",
        {name: Cuts(*3 * [cuts.few if few else cuts.exact]) for name, cuts in CUTS.items()},
    )
    jobs, batch = 2, 3
    block = Conv("conv", channels, image, taps)
    kernels = ConvKernels(channels, image, taps, block.patch if block.full else 0)
    assert kernels.usable
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
    packed = block.pack(weight).contiguous()
    found, code = kernels.forward(x, packed, bias, pooled=pooled)
    assert error(found.movedim(-1, 2), truth.detach()) < 1e-6
    dy = random(*found.shape)
    dx, dw = torch.autograd.grad(truth, own, dy.double().movedim(-1, 2))
    assert error(block.unpack(kernels.weight_gradient(x, dy, code)), dw) < 1e-6
    changed = packed.clone()
    kernels.weight_gradient(x, dy, code, subtract_from=changed)
    assert error(block.unpack(packed - changed), dw) < 1e-5
    if not block.full:
        dz = dy if code is None else formulas.unpool(dy, code, image)
        assert error(kernels.input_gradient(dz, packed).movedim(-1, 2), dx) < 1e-6


def test_a_dense_layer_is_that_of_pytorch():
    kernels = DenseKernels(70, 40)
    x, dz, weight, bias = random(2, 5, 70), random(2, 5, 40), random(2, 40, 70), random(2, 40)
    truth = (x.double() @ weight.double().mT + bias.double().unsqueeze(1)).relu()
    assert error(kernels.forward(x, weight, bias), truth) < 1e-6
    assert error(kernels.input_gradient(dz, weight), dz.double() @ weight.double()) < 1e-6
    expected = weight.double() - dz.double().mT @ x.double()
    kernels.descend(dz, x, weight)
    assert error(weight, expected) < 1e-6


def test_whole_steps_are_those_of_the_reference(monkeypatch):
    made = []
    monkeypatch.setattr(
        choice, "block_network", lambda *args, **_: network.block_network(*args, kernels=True)
    )
    step = MlpStep.__call__
    monkeypatch.setattr(MlpStep, "__call__", lambda *args: (made.append(args[1]), step(*args)))
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
    check_same(found, sweep("reference", model, **options), 1e-4)


def test_training_with_kernels_is_that_of_the_reference(monkeypatch):
    blocks = []

    def with_kernels(*args, **_):
        found = network.block_network(*args, kernels=True)
        blocks.extend(type(block) for block in found.blocks)
        return found

    monkeypatch.setattr(choice, "block_network", with_kernels)
    monkeypatch.setattr(DenseKernels, "usable", True)
    model = CNNOptions(channels1=16, channels2=16, features=8)
    options = {
        "strategies": [FedProx(mu=1.0), FedProto()],
        "federation": small_federation(shape=(1, 9, 8), sizes=(4, 6, 3)),
        "train": TrainOptions(epochs=1, batch_size=5, lr=0.05),
        "dtype": "float32",
        "device": DEVICE,
    }
    found = sweep("stacked", model, **options)
    assert blocks == [KernelConv, KernelConv, KernelDense]
    check_same(found, sweep("reference", model, **options), 1e-4)


@pytest.mark.parametrize("case", ["right", "wrong", "cramped"])
def test_the_first_step_finds_kernels_that_are_wrong(monkeypatch, case):
    wrong = case == "wrong"
    monkeypatch.setattr(
        choice, "block_network", lambda *args, **_: network.block_network(*args, kernels=True)
    )
    step, first, kernel = Lockstep._step, Lockstep._first_step, MlpStep.__call__
    tried = []

    def checked(self, size):
        tried.append(size)
        first(self, size)
        assert (self._whole is None) == wrong

    def begin(self, size):
        # Without graphs nothing is checked by itself.
        (step if tried or self._graphs is not None else checked)(self, size)

    def bad(self, jobs, state, starts):
        kernel(self, jobs, state, starts)
        state.rows.mul_(1.1)

    def no_room(*_):
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(Lockstep, "_step", begin)
    monkeypatch.setattr(Lockstep, "_first_step", checked)
    if case == "cramped":
        monkeypatch.setattr(network.BlockNetwork, "gradients", no_room)
    if wrong:
        monkeypatch.setattr(MlpStep, "__call__", bad)
    options = {
        "strategies": [FedProx(mu=1.0)],
        "federation": small_federation(shape=(6,), sizes=(4, 6, 3)),
        "train": TrainOptions(epochs=1, batch_size=5, lr=0.05),
        "dtype": "float32",
        "device": DEVICE,
        "max_stack": 100,
    }
    model = MLPOptions(hidden=20, features=40)
    with pytest.warns(UserWarning, match="kernels disagree") if wrong else nullcontext():
        found = sweep("stacked", model, **options)
    assert tried
    check_same(found, sweep("reference", model, **options), 1e-4)
