"""Searches how the stack's convolutions are best cut into programs on the device at hand.

    python benchmarks/cuts.py --models cnn --jobs 120 --batch 10
    python benchmarks/cuts.py --models lenet resnet18 --jobs 20 --batch 50 --half

For every convolution of a model and every kernel, the cut in `fedproto.engines.stacking.launching`
is compared with cuts that differ in one respect, then the best of these with its neighbours, until
none is faster. What is faster by more than `--least` per cent is printed for that table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench_cudagraph
from workloads import CLASSES, MODELS, SHAPES

from fedproto.engines.stacking import launching
from fedproto.engines.stacking.launching import ANY, CUTS, Cut
from fedproto.engines.stacking.layers import Conv
from fedproto.engines.stacking.network import stacked_network
from fedproto.models.base import build_model

AXES: dict[str, tuple[Any, ...]] = {
    "rows": (32, 64, 128, 256),
    "columns": (32, 64, 128),
    "depth": (16, 32, 64, 128),
    "warps": (2, 4, 8),
    "stages": (1, 2, 3, 4),
    "products": ("tf32", "bf16x3"),
}


def main() -> None:
    """Searches for every model asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["cnn"], choices=sorted(MODELS))
    parser.add_argument("--jobs", type=int, default=120)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--half", action="store_true", help="activations in bfloat16")
    parser.add_argument("--least", type=float, default=3.0, help="gain to print, in per cent")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    found = []
    for model in given.models:
        for layer in _convolutions(model):
            for kernel, work in _kernels(layer, given.jobs, given.batch, half=given.half):
                known, tried = _search(layer, kernel, work, half=given.half)
                best = min(tried, key=lambda cut: tried[cut])
                gain = 100 * (1 - tried[best] / tried[known])
                row = {"model": model, "layer": layer.name, "kernel": kernel}
                row |= {"now": known, "us": 1e3 * tried[known], "best": best}
                row |= {"best_us": 1e3 * tried[best], "tried": len(tried)}
                found.append(row)
                better = f"{gain:.0f} % faster: {best}" if gain > given.least else "is best"
                print(f"{model} {layer.name} {kernel}: {row['us']:.0f} us, {known} {better}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n")


def _convolutions(model: str) -> list[Conv]:
    """The convolutions of a model's stack, each shape once."""
    net = build_model(MODELS[model], SHAPES[model], CLASSES, seed=0)
    network = stacked_network(net, torch.zeros(1, *SHAPES[model]), kernels=True)
    assert network is not None
    layers = [layer for layer in network.layers if isinstance(layer, Conv) and layer.kernels]
    alike = {(one.channels, one.image, one.taps, one.stride, one.pool): one for one in layers}
    return list(alike.values())


def _kernels(
    layer: Conv, jobs: int, batch: int, *, half: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """A layer's kernels on random inputs."""
    (ins, outs), kind = layer.channels, torch.bfloat16 if half else torch.float32
    x = torch.randn(jobs, batch, *layer.image, ins, device="cuda", dtype=kind)
    weight = layer.pack(torch.randn(jobs, outs, ins, *layer.taps, device="cuda")).contiguous()
    bias = torch.randn(jobs, outs, device="cuda") if layer.bias else None
    y, code = launching.conv_forward(layer, x, weight, bias)
    dy = torch.randn_like(y)
    dz = torch.randn(jobs, batch, *layer.sides, outs, device="cuda", dtype=kind)
    yield "forward", lambda: launching.conv_forward(layer, x, weight, bias)
    if ins > 3:  # nothing before the first layer has a gradient
        yield "input", lambda: launching.conv_input_gradient(layer, x, dz, weight)
    yield "weight", lambda: launching.conv_weight_gradient(layer, x, dy, code)


def _search(
    layer: Conv, kernel: str, work: Callable[[], object], *, half: bool
) -> tuple[Cut, dict[Cut, float]]:
    """The cut of now, and the milliseconds of all cuts that were tried."""
    kind = "bf16" if half else "tf32"
    read = layer.channels[kernel == "input"]
    table = CUTS[kernel]
    known = next(cut for most, cut in table[kind].items() if read <= most)
    tried: dict[Cut, float] = {}

    def milliseconds(cut: Cut) -> float:
        if cut not in tried:
            launching.CUTS = CUTS | {kernel: table | {kind: {ANY: cut}}}
            try:
                # As in the engine: launched one by one, work of few jobs would wait for the host.
                tried[cut] = do_bench_cudagraph(work, return_mode="median")
            except Exception as error:  # noqa: BLE001 - what does not fit fails in many ways
                print(f"  {cut}: {str(error).splitlines()[0][:80]}")
                tried[cut] = float("inf")
            finally:
                launching.CUTS = CUTS
        return tried[cut]

    best = known
    while True:
        near = [best._replace(**{axis: one}) for axis, values in AXES.items() for one in values]
        fastest = min(near, key=milliseconds)
        if milliseconds(fastest) >= 0.99 * milliseconds(best):
            return known, tried
        best = fastest


if __name__ == "__main__":
    main()
