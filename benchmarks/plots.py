"""Draws how cost grows, from the figures of `gpu.py growth`.

python benchmarks/plots.py results/gpu-growth.json docs/images/growth.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main() -> None:
    """Reads figures and writes a picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    growth = json.loads(arguments.figures.read_text())["growth"]
    _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    steps, seconds = zip(*growth["steps"], strict=True)
    left.plot(steps, seconds, "o-", label="measured")
    left.plot(steps, [seconds[-1] * step / steps[-1] for step in steps], "--", label="linear")
    left.set(xlabel="local steps of each of 40 clients", ylabel="seconds", ylim=0, xlim=0)
    left.legend()
    runs, seconds = zip(*growth["runs"], strict=True)
    right.plot(runs, seconds, "o-", label="one sweep")
    right.plot(runs, [seconds[0] * run for run in runs], "--", label="run after run")
    right.set(xlabel="runs of 10 clients, 200 steps", ylabel="seconds", ylim=0, xlim=0)
    right.legend()
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    pyplot.savefig(arguments.picture, dpi=150)
    print(f"wrote {arguments.picture}")


if __name__ == "__main__":
    main()
