"""Tables and progress at the widths of terminals: nothing is cut, runs are told apart."""

from __future__ import annotations

import io
import itertools
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from fedproto import FedAvg, FedProto, FedProx
from fedproto.api.progress import Shown
from fedproto.cli import comparing, main, terminal
from helpers import config_of
from report_runs import make_record, write_run

WIDTHS = (80, 100, 120)
METHODS = {
    "Fairness + toleration": FedAvg(weights="uniform"),
    "FedAvg": FedAvg(),
    "FedProto, local margins": FedProto(margins="local"),
    "FedProto, aggregate margins": FedProto(margins="aggregate"),
    "FedProx": FedProx(),
}


class Terminal(Console):
    """A console that says it is a terminal of some width and keeps what it shows."""

    width_of_tests = 80

    def __init__(self, **options):
        kept = {"file": io.StringIO(), "force_terminal": True, "color_system": None}
        super().__init__(**kept, width=options.get("width", self.width_of_tests), height=50)
        Terminal.last = self


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    places = itertools.product(METHODS.items(), (0.5, 0.9), range(3))
    for number, ((label, strategy), delta, seed) in enumerate(places):
        write_run(
            folder / str(number),
            label=label,
            strategy=strategy,
            seed=seed,
            delta=delta,
            rounds=12,
            level=0.5 + 0.01 * (number * 7 % 30),
        )
    return folder


def table_at(width, monkeypatch, *arguments) -> list[str]:
    monkeypatch.setattr(Terminal, "width_of_tests", width)
    monkeypatch.setattr(terminal, "Console", Terminal)
    assert main(["compare", *map(str, arguments)]) == 0
    return Terminal.last.file.getvalue().splitlines()


def cells_of(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows; what is folded into the next line is joined."""
    rows: list[list[str]] = []
    for line in lines:
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if rows and not any(cells[1:]):
                rows[-1][0] += " " + cells[0]
            else:
                rows.append(cells)
    return rows


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("each", [False, True])
def test_every_run_is_told_apart_and_no_number_is_cut(runs, width, each, monkeypatch):
    lines = table_at(width, monkeypatch, runs, *(["--each"] if each else []))
    assert max(map(len, lines)) <= width
    rows = cells_of(lines)
    expected = {
        f"{label} · δ {delta}" + (f" · seed {seed}" if each else "")
        for label in METHODS
        for delta in (0.5, 0.9)
        for seed in (range(3) if each else range(1))
    }
    assert {row[0] for row in rows} == expected
    assert len(rows) == len(expected)
    assert "…" not in "".join(lines)
    number = re.compile(r"[+-]?\d+(\.\d+)?( ± \d+\.\d+)?( (better|worse|equivalent|unclear))?")
    span = re.compile(r"[+-]\d+\.\d+ to [+-]\d+\.\d+")
    for row in rows:
        assert re.fullmatch(r"\d+\.\d( ± \d+\.\d)?", row[1])
        for cell in row[1:]:
            assert cell in ("–", "< 0.001") or number.fullmatch(cell) or span.fullmatch(cell), row


def test_what_has_no_room_is_named(runs, monkeypatch):
    narrow, wide = (table_at(width, monkeypatch, runs) for width in (80, 200))
    assert "hidden at this width" in " ".join("".join(narrow).split())
    assert "hidden at this width" not in "".join(wide)
    assert "wall s" in "".join(wide)


def test_the_table_after_training_is_the_same(runs, monkeypatch):
    compared = table_at(100, monkeypatch, runs)
    comparing.print_comparison([runs])
    assert Terminal.last.file.getvalue().splitlines() == compared


@pytest.mark.parametrize("width", WIDTHS)
def test_progress_shows_its_times_and_whose_score_it_is(width):
    Terminal.width_of_tests = width
    console = Terminal()
    config = replace(config_of(FedAvg(), rounds=200, seed=2), label="A long name for a method")
    watcher = Shown(console, total=1200, done=30, live=True)
    watcher.on_pass(10)
    watcher.on_job()
    watcher.on_round(config, make_record(40))
    watcher.on_pass(10)
    watcher.on_job()
    shown = Terminal(width=width)
    shown.print(watcher.bars)
    text = shown.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "31/1200" in text
    assert re.search(r"\d:\d\d:\d\d about \d+ s left", text)
    assert re.search(r"accuracy \d\d\.\d %", text)
    assert "round 41 of 200: A long name for a method, δ" in " ".join(text.split())
    assert "seed 2" in text


def test_the_time_left_does_not_count_what_is_done_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=100)
    watcher = Shown(console, total=21, done=0, live=False)
    config = config_of(FedAvg(), rounds=21)
    for seconds in (60.0, 40.0, *[2.0] * 19):  # setting up, a first round that warms up, others
        now[0] += seconds
        watcher.on_pass(3)
        watcher.on_round(config, make_record(0))
    said = re.findall(r"round (\d+) of 21, about (.*?) left", console.file.getvalue())
    assert said == [("1", "13 min"), ("16", "10 s")]
