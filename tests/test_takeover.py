"""The table of attacks in the docs is that of the measurements."""

from __future__ import annotations

import subprocess
import sys

from documents import ROOT


def test_the_page_of_attacks_has_the_measured_figures():
    script, results = ROOT / "benchmarks/takeover.py", ROOT / "results/takeover.json"
    done = subprocess.run(
        [sys.executable, str(script), "--table", str(results)],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs/appendix/hostile-clients.md").read_text(encoding="utf-8")
    assert done.stdout.count("\n") > 15
    assert done.stdout in page
