"""Caches of prepared data for tests."""

from __future__ import annotations

import pytest

from fedproto.data import data_root


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of prepared data."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDPROTO_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    """A cache for all tests on real files of this process, so that each is prepared once."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def real_root(shared_cache, monkeypatch):
    """The data root of the real files, with the shared cache."""
    monkeypatch.setenv("FEDPROTO_CACHE", str(shared_cache))
    return data_root()
