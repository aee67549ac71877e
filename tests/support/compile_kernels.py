"""Compiles every kernel that a step of some stacked networks starts, for a GPU that is not there.

Run as a script, without Triton's interpreter; prints what was compiled.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compiled_for

from fedproto.engines.stacking import launching
from fedproto.engines.stacking.formulas import unfused
from fedproto.engines.stacking.layers import Pending
from fedproto.engines.stacking.network import StepBatch, stacked_network
from fedproto.models.small import CNNOptions, MLPOptions

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int64: "i64"}


class Compiled:
    """In place of a kernel: compiles it for the arguments of each launch, and starts nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        signature, fixed, aligned = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            value, name = given[parameter.name], parameter.name
            if isinstance(value, Tensor):
                signature[name] = f"*{TYPES[value.dtype]}"
            elif parameter.is_constexpr or value == 1:
                signature[name], fixed[(place,)] = "constexpr", value
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, Tensor) or (signature[name] == "i32" and value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, aligned)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        made = compiled_for(source, target=TARGET, options=options)
        assert made.asm["cubin"]
        sys.stdout.write(f"{self.kernel.__name__} {constants.get('PRECISION')}\n")


class Compiling:
    """In place of the module with the kernels."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.module, name)
        return Compiled(found) if hasattr(found, "arg_names") else found


class Normalised(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.one, self.two = nn.GroupNorm(2, 64), nn.GroupNorm(2, 64)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(self.stem(x)).relu()
        x = (self.two(self.conv(x)) + x).relu()
        return self.out(x.mean((2, 3)))


def step(model: nn.Module, shape: tuple[int, ...], *, half: bool) -> None:
    """Launches of a step of two models."""
    network = stacked_network(model, torch.zeros(2, *shape), kernels=True)
    assert network is not None
    params = {name: torch.stack([one.detach()] * 2) for name, one in model.named_parameters()}
    packed = network.pack(params)
    x = network.lay_out(torch.zeros(20, *shape)).unflatten(0, (2, 10))
    targets, weight = torch.zeros(2, 10, dtype=torch.int64), torch.full((2, 10), 0.1)
    masks = targets[:, 0], targets[0, 0]
    given = x.bfloat16() if half else x
    batch = StepBatch(given, targets, weight, (), None, masks, frozen=False)
    _, gradients = network.gradients(packed, batch, unfused)
    for name, gradient in gradients.items():
        if isinstance(gradient, Pending):
            gradient.subtract_from(packed[name])
    whole = network.whole_step(10)
    if whole is not None:
        rows = torch.zeros(2, 64)
        starts = dict.fromkeys(packed, 0)
        tensors = [x, targets, targets, rows, rows, *[targets] * 3, *[rows] * 2, targets, rows]
        whole(2, tensors, starts, proximal=True)


if __name__ == "__main__":
    launching.kernels = Compiling(launching.kernels)  # type: ignore[assignment]
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        step(CNNOptions().build((1, 28, 28), 10), (1, 28, 28), half=False)
        step(Normalised(), (3, 8, 8), half=False)
        step(MLPOptions().build((60,), 10), (60,), half=False)
    step(CNNOptions().build((1, 28, 28), 10), (1, 28, 28), half=True)
    step(Normalised(), (3, 8, 8), half=True)
