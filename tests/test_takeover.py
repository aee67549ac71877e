"""The table of attacks in the docs is that of the measurements, and so is what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import mean

from documents import ROOT

RESULTS = ROOT / "results/takeover.json"
BY_SIZE = "digits, two classes, cohorts of 3 by size"


def test_the_page_of_attacks_has_the_measured_figures():
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/takeover.py"), "--table", str(RESULTS)],
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs/appendix/hostile-clients.md").read_text(encoding="utf-8")
    tasks = json.loads(RESULTS.read_text())["accuracy"]
    assert done.stdout.count("\n") == 2 + sum(len(methods) for methods in tasks.values())
    assert done.stdout in page


def test_no_attack_on_steady_costs_ten_points_beyond_absence_and_the_defence_less_than_one():
    """What the page says of twelve seeds."""
    tasks = json.loads(RESULTS.read_text())["accuracy"]
    assert {"digits", "synthetic"} <= tasks.keys()
    for task, methods in tasks.items():
        rows = methods["Steady"]
        if task == BY_SIZE:  # which the page says does not hold
            assert mean(rows["10M samples, x -1"]["clip"].values()) < 20
            continue
        plain, honest = rows["none"]["none"], rows["none"]["clip"]
        assert len(honest) == 12
        assert mean(honest.values()) > mean(plain.values()) - 1, task
        for attack, scores in rows.items():
            beyond = [scores["clip"][seed] - rows["absent"]["clip"][seed] for seed in honest]
            assert mean(beyond) > -10, (task, attack)
