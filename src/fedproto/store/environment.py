"""What a result was computed with: versions, hardware and the code's commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from fedproto.options.registry import loaded_plugins

PACKAGES = (
    "fedproto",
    "torch",
    "numpy",
    "safetensors",
    "typer",
    "flwr",
    "rich",
    "matplotlib",
    "pillow",
    "pyarrow",
    "scikit-learn",
)


def package_versions() -> dict[str, str | None]:
    """Version per package; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def devices() -> list[str]:
    """The devices that PyTorch can use, in words."""
    found = [f"cpu: {_processor()}, {os.cpu_count()} cores"]
    found += [
        f"cuda:{index}: {torch.cuda.get_device_name(index)}"
        for index in range(torch.cuda.device_count())
    ]
    return found


def describe_environment() -> dict[str, Any]:
    """Versions, hardware and commit, for the run directory."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name, found in package_versions().items() if found},
        "devices": devices(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "plugins": list(loaded_plugins()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source tree the package runs from; None for an installed package."""
    tree = Path(__file__).resolve().parents[3]
    if not (tree / ".git").exists():
        return None
    try:
        shown = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return shown.stdout.strip() or None
