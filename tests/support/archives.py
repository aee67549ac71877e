"""The runs that were published, unpacked."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from documents import ROOT

ARCHIVES = ROOT / "results/runs"


def unpacked(folder: Path, *names: str) -> Path:
    """The named archives, or all that lie there, each in a folder of its name below `folder`."""
    if not ARCHIVES.is_dir():
        pytest.skip("the archives of results/runs are not part of this copy")
    for archive in sorted(ARCHIVES.glob("*.tar.*")):
        name = archive.name.partition(".")[0]
        if not names or name in names:
            with tarfile.open(archive) as file:
                file.extractall(folder / name, filter="data")
    return folder
