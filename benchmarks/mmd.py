"""Time and memory of MMD on 2 × 10,000 features of 256 channels, beside the bare matrix products.

    python benchmarks/mmd.py [--samples 10000] [--channels 256] [--threads 2]

The estimate needs two full matrix products' worth of kernel values (two half ones within, one full
one across); the ratio of processor time to these products alone says what the rest costs, whatever
the machine does besides.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable

import torch

from fedproto.measures.features import BLOCK, median_bandwidth, mmd2


def best(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Smallest wall-clock and processor seconds of some repeats."""
    walls, processors = [], []
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return min(walls), min(processors)


def peak_megabytes() -> float:
    """The most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(given.samples, given.channels, generator=generator)
    y = torch.randn(given.samples, given.channels, generator=generator) + 0.1
    sigma = median_bandwidth(y)

    def products() -> None:
        right = y.T.contiguous()
        for _ in range(2):
            for rows in x.split(BLOCK):
                torch.mm(rows, right)

    before = peak_megabytes()
    whole, processor = best(lambda: mmd2(x, y, sigma), given.repeats)
    grown = peak_megabytes() - before
    floor, floor_processor = best(products, given.repeats)
    report = {
        "samples": given.samples,
        "channels": given.channels,
        "threads": given.threads,
        "quadratic_s": round(whole, 3),
        "quadratic_processor_s": round(processor, 3),
        "products_alone_s": round(floor, 3),
        "products_alone_processor_s": round(floor_processor, 3),
        "ratio_of_processor_s": round(processor / floor_processor, 2),
        "memory_mb": round(grown, 1),
        "kernel_matrix_mb": round(given.samples**2 * 4 / 2**20, 1),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
