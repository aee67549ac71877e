"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings

from fedproto.data.federation import Federation
from fedproto.models.base import build_model
from fedproto.models.small import MLPOptions

# Shared machines stall now and then; a slow example is no failure.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    # Whatever a run writes is synced, for which a disk makes tests wait.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined


SLOW = (
    *("flower/test_flower_deployment", "flower/test_flower_up", "paper/"),
    *("report/test_report_archives", "store/test_kill_and_resume", "docs/test_demo"),
    "engines/test_stacking_kernels",
    *("test_results", "rounds/test_segmentation_run", "data/test_paper_data", "cli/test_choosing"),
    *("docs/test_tutorials", "flower/test_own_strategy", "flower/test_flower_strategy"),
    *("flower/test_flower_parity", "flower/test_flower_engine", "store/test_fuzz_directories"),
    *("report/test_report_browser", "engines/test_engine_parity", "models/test_any_module"),
    *("strategies/test_new_methods", "test_project"),
)
"""Deployments, reproduction, kills at every write, archives, parity of everything with everything:
`make test-slow`. What takes longest begins first, so that no processor is idle at the end."""

TOGETHER = (
    *("flower/test_flower_deployment", "paper/test_reproduce.py", "report/test_report_archives"),
    *("rounds/test_segmentation_run", "data/test_paper_data", "report/test_report_browser"),
    "store/test_kill_and_resume",
)
"""Slow modules that share what takes longer than a test: one process runs all of each."""


def place_of(path: Path) -> int:
    """A module's place in `SLOW`; beyond it for others."""
    name = path.relative_to(Path(__file__).parent).as_posix()
    return next((at for at, start in enumerate(SLOW) if name.startswith(start)), len(SLOW))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A module without a test of the kind asked for is not even imported."""
    if collection_path.suffix != ".py":
        return None
    slow = place_of(collection_path) < len(SLOW)
    match config.option.markexpr:
        case "not slow" if slow:
            return True
        case "slow" if not slow:
            return "pytest.mark.slow" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of slow modules, and puts them in order."""
    items.sort(key=lambda item: place_of(item.path))
    for item in items:
        if place_of(item.path) < len(SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Hands out slow tests one by one, and the modules of `TOGETHER` whole."""
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return module if module.removeprefix("tests/").startswith(TOGETHER) else nodeid

    config.option.loadscopereorder = False
    return InOrder(config, log) if config.option.markexpr == "slow" else None


@pytest.fixture(autouse=True, scope="session")
def own_caches(tmp_path_factory):
    """Nothing is read from or written to a user's own caches, but the data of `FEDPROTO_DATA`."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("caches")
        for name in ("XDG_CACHE_HOME", "MPLCONFIGDIR", "FLWR_HOME"):
            patch.setenv(name, str(home / name.lower()))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nodes_remember_elsewhere(tmp_path, monkeypatch):
    """What clients over Flower remember is kept out of the user's own folders."""
    monkeypatch.setenv("FEDPROTO_STATE", str(tmp_path / "remembered"))


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """The option --data-root sets a variable for the whole process."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def small_federation() -> Federation:
    """Six clients of unequal size; the last one holds a single class."""
    rng = np.random.RandomState(0)
    centers = rng.normal(0, 2, (4, 5))
    clients = []
    for client, size in enumerate((7, 12, 25, 9, 31, 10)):
        labels = rng.randint(0, 4, size) if client < 5 else np.full(size, 2)
        clients.append((centers[labels] + rng.normal(size=(size, 5)), labels))
    return Federation.from_clients(clients, num_classes=4)


@pytest.fixture
def small_model() -> torch.nn.Module:
    return build_model(MLPOptions(hidden=8, features=6), (5,), 4, seed=3)
