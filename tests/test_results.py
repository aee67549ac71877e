"""Published results: what lies in the tree is what was published, and no more than that."""

from __future__ import annotations

import hashlib
import json

from documents import ROOT

ARCHIVES = ROOT / "results/runs"
ROOM = 10_000_000
"""Bytes; every refresh of an archive stays in everybody's clone for good."""


def test_archives_are_those_that_were_published():
    published = json.loads((ARCHIVES / "published.json").read_text())
    there = sorted(ARCHIVES.glob("*.tar.*"))
    assert there
    for path in there:
        assert published[path.name][-1]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_archives_do_not_grow_the_history():
    assert sum(path.stat().st_size for path in ARCHIVES.iterdir()) < ROOM
