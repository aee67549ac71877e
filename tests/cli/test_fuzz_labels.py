"""Labels of strangers' runs are shown as they are: they steer no terminal and no spreadsheet."""

from __future__ import annotations

import csv
import io
import re
import shutil
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from fedproto import FedAvg
from fedproto.api.progress import Shown
from fedproto.api.table import csv_cell
from fedproto.cli import main, terminal
from fedproto.config.recipe import expand, recipe_text
from fedproto.errors import printable
from fuzzing import fuzzed
from helpers import config_of
from report_runs import append_records, make_record, write_run

PIECES = [
    "[/]", "[red]", "[/red]", "[link=x]", "\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "\r", "\n", "=1+1",
    "@x", "$", r"\frac{", "`", "# ", "<b>", "|", "\u202e", "\\", "&", "-",
]  # fmt: skip
LABELS = st.one_of(
    st.text(min_size=1, max_size=30),
    st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join),
)
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(*arguments):
    """What a command prints."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main(list(map(str, arguments)))
    assert code in (0, 2)
    assert not STEERING.search(output.getvalue() + errors.getvalue())
    return output.getvalue() + errors.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("labels")


@fuzzed
@given(label=LABELS, metric=LABELS)
@example(label="[/]", metric="[bold]x")
@example(label="\x1b[2J\x1b]0;pwned\x07", metric="\x1b[31m")
@example(label='=HYPERLINK("http://evil.example","x")', metric="@SUM(A1)")
@example(label="$\\frac{", metric="$x$")
@example(label="a\nerror: b", metric="loss\n")
@example(label="000", metric="method")
@example(label=" ", metric="0")
@example(label="\x7f\x9b31m\u202e\u200d", metric="loss")
def test_labels_are_shown_as_they_are(folder, label, metric):
    shutil.rmtree(folder / "run", ignore_errors=True)
    config = write_run(folder / "run", label=label, rounds=0, planned=2)
    record = make_record(0, clients=12, cohort=5, level=0.8)
    append_records(folder / "run", [replace(record, metrics={**record.metrics, metric: 0.5})])
    table = shown("compare", folder / "run", f"--metric={metric}")
    if not set(config.title) & set("\n \u2003"):
        assert printable(config.title)[:8] in table
    rows = list(csv.reader(io.StringIO(shown("compare", folder / "run", "--csv"))))
    for cell in (cell for row in rows for cell in row if cell.strip()):
        assert cell.lstrip()[0] not in "=+@" or cell == "@"
    shown("check", folder / "run")
    shown("report", folder / "run")
    shown("best", folder / "run", f"--by={metric}")
    assert expand(tomllib.loads(recipe_text(config.to_recipe()))).popitem()[1].label == label
    shown("compare", folder / f"nowhere{label.replace(chr(0), '')}")


@pytest.mark.parametrize("label", ["$\\frac{", "[/]", "a$b$c", "\x07"])
def test_figures_have_any_label(tmp_path, label):
    write_run(tmp_path / "run", label=label, rounds=2)
    assert main(["compare", str(tmp_path / "run"), "--plots", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "figures" / "accuracy.png").exists()


def test_figures_that_cannot_be_written_are_an_error(tmp_path, capsys):
    write_run(tmp_path / "run", rounds=2)
    (tmp_path / "file").touch()
    assert main(["compare", str(tmp_path / "run"), "--plots", str(tmp_path / "file" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_progress_shows_labels_as_they_are():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system=None, width=200)
    config = replace(config_of(FedAvg()), label="[bold]x[/] \x1b]0;pwned\x07")
    live = Shown(console, 1, 0, live=True)
    with Live(live.bars, console=console):
        live.on_round(config, make_record(0, clients=12, cohort=5, level=0.8))
        live.on_notice("client 3: \x1b[2J[/]")
    assert r"[bold]x[/] \x1b]0;pwned\x07" in output.getvalue()
    assert r"client 3: \x1b[2J[/]" in output.getvalue()
    assert "\x1b]0" not in output.getvalue()


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        (" @x", "' @x"),
        ("\t=x", r"\t=x"),
        ("-1", "'-1"),
        (-1.5, -1.5),
        ("fedavg", "fedavg"),
        (None, None),
    ],
)
def test_cells_of_csv_are_no_formulas(value, cell):
    assert csv_cell(value) == cell


def test_a_markdown_table_shows_labels_as_they_are(tmp_path):
    write_run(tmp_path / "run", label="[a](b) <img src=x> `c` | d *e*", rounds=2)
    (row,) = (line for line in shown("compare", tmp_path / "run", "--markdown").splitlines()[2:3])
    assert r"\[a\](b) \<img src=x\> \`c\` \| d \*e\*" in row


def test_joiners_and_other_scripts_stay():
    assert printable("実験 Ünder 👩\u200d🔬 α") == "実験 Ünder 👩\u200d🔬 α"
    assert terminal.plain("[red]x").plain == "[red]x"
