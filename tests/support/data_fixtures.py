"""Caches of prepared data for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedproto.data import data_root


def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a test session, which all its processes share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of prepared data."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDPROTO_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    """A cache for all tests on real files and all processes: each is prepared once."""
    return session_folder(tmp_path_factory) / "prepared"


@pytest.fixture
def real_root(shared_cache, monkeypatch):
    """The data root of the real files, with the shared cache."""
    monkeypatch.setenv("FEDPROTO_CACHE", str(shared_cache))
    return data_root()
