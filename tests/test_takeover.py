"""The table of the threat model is that of its measurements."""

from __future__ import annotations

import subprocess
import sys

from documents import ROOT


def test_the_threat_model_has_the_measured_figures():
    script, results = ROOT / "benchmarks/takeover.py", ROOT / "results/takeover.json"
    done = subprocess.run(
        [sys.executable, str(script), "--table", str(results)],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs/explanation/threat-model.md").read_text(encoding="utf-8")
    assert done.stdout.count("\n") > 15
    assert done.stdout in page
