"""Mistakes that used to pass in silence, or ended in something other than a sentence."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedproto
from documents import ROOT
from fedproto import FedAvg
from fedproto.cli.app import main
from fedproto.cli.running import fresh_directory
from fedproto.data.digits import Digits
from fedproto.errors import ConfigError, install
from fedproto.options import load_plugin
from fedproto.strategies import STRATEGIES

TINY = ["--set=schedule.rounds=2", "--set=schedule.cohort=2", "--set=data.clients=4",
        "--set=train.epochs=1", "--set=engine.name=reference"]  # fmt: skip
DIGITS = {"name": "digits", "clients": 4}
SMALL = {"name": "mlp", "hidden": 4, "features": 4}
KEYWORDS = {"rounds": 2, "cohort": 2, "epochs": 1}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_measures_without_a_rhythm_are_refused(here, capsys):
    assert main(["run", "quickstart", *TINY, '--set=measure.what=["margin"]']) == 2
    assert "no effect without measure.every" in capsys.readouterr().err
    assert not (here / "runs").exists()
    for measure in ({"what": ["margin"]}, fedproto.MeasureOptions(what=("margin",))):
        with pytest.raises(ConfigError, match=r"no effect without measure\.every"):
            fedproto.run(DIGITS, SMALL, "fedavg", measure=measure, **KEYWORDS)


def test_a_misspelt_score_to_stop_by_is_found_in_the_first_test(here, capsys):
    assert main(["run", "quickstart", *TINY, "--set=stop.metric=acuracy", "--out=run"]) == 2
    assert "stop.metric: unknown metric 'acuracy'; did you mean 'accuracy'" in (
        capsys.readouterr().err
    )
    rare = [*TINY, "--set=evaluate.every=2", "--set=schedule.rounds=5"]
    assert main(["run", "quickstart", *rare, "--set=stop.metric=acuracy", "--out=rare"]) == 2
    assert "did you mean 'accuracy'" in capsys.readouterr().err
    assert (here / "rare/rounds.jsonl").read_text().count("\n") == 1
    measured = {"stop": {"metric": "dissimilarity", "patience": 9}, "measure": {"every": 2}}
    for sections in ({"stop": {"metric": "loss"}}, measured):
        result = fedproto.run(DIGITS, SMALL, "fedavg", **KEYWORDS, **sections)
        assert len(result.records) == 2


def test_a_score_to_stop_by_may_be_on_validation_data_alone(capsys):
    settings = ["--set=stop.metric=accuracy", "--set=evaluate.test=false"]
    named = ["--set=data.name=digits", "--set=data.validation=0.3", "--set=data.clients=4"]
    assert main(["run", "quickstart", *TINY, *settings, *named, "--out=run"]) == 0
    told = capsys.readouterr()
    assert "validation_accuracy %" in told.out
    assert re.search(r"validation_accuracy \d+\.\d % in round 1 of 2", told.err)
    assert "next: fedproto report run" in told.err


def test_a_graph_engine_on_a_cpu_says_so(capsys):
    command = ["run", "quickstart", *TINY[:-1], "--set=engine.name=captured"]
    assert main([*command, "--set=engine.device=cpu"]) == 0
    said = capsys.readouterr().err
    assert "'captured' cannot run some jobs (training on a CPU); engine 'reference'" in said


def test_two_runs_at_once_have_folders_of_their_own(here):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        commands = [["run", "quickstart", *TINY, "--quiet"]] * 2
        assert pool.map(main, commands, chunksize=1) == [0, 0]
    assert sorted(each.name for each in (here / "runs").iterdir()) == ["quickstart", "quickstart-2"]


def test_a_folder_that_another_process_made_this_moment_is_left_to_it(here, monkeypatch):
    plain = Path.mkdir

    def beaten(self, *arguments, **keywords):
        if self.name == "mine":
            plain(self)
        plain(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "mkdir", beaten)
    assert fresh_directory("mine") == Path("runs/mine-2")
    assert sorted(each.name for each in (here / "runs").iterdir()) == ["mine", "mine-2"]


def test_pooled_training_that_diverged_blames_no_straggler(capsys):
    settings = ["--set=strategy.name=centralized", "--set=train.lr=1e30", "--quiet"]
    assert main(["run", "quickstart", *TINY, *settings]) == 1
    said = capsys.readouterr().err
    assert "2 of 2 updates were not used" in said
    assert "learning rate too high?" in said
    assert "straggler" not in said
    notes = [record.note or "" for record in fedproto.load("runs/quickstart").records]
    assert not any("straggler" in note for note in notes)


def test_what_a_data_set_says_is_printed_as_it_is(monkeypatch, capsys):
    remedy = "needs pip install 'fedproto[digits]' [/]"
    monkeypatch.setattr(Digits, "status", staticmethod(lambda _: remedy))
    assert main(["info"]) == 0
    assert remedy in " ".join(capsys.readouterr().out.split())


def _inside(_: int) -> str:
    keywords = {**KEYWORDS, "engine": {"name": "processes", "device": "cpu"}}
    return str(len(fedproto.run(DIGITS, SMALL, "fedavg", **keywords).records))


def test_a_worker_of_a_pool_can_train():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_inside, [0]) == ["2"]


def test_what_is_not_a_run_is_said(here, capsys):
    (here / "empty").mkdir()
    keywords = {**KEYWORDS, "seeds": 2, "out": here / "swept"}
    fedproto.sweep(DIGITS, SMALL, ["fedavg"], **keywords)
    for name, message in (
        ("nowhere", "nowhere does not exist"),
        ("empty", "empty is not a run directory: it has no run.json"),
        ("swept", "holds several; name one: swept/fedavg-seed0, swept/fedavg-seed1"),
    ):
        assert main(["predict", name, __file__]) == 2
        assert message in capsys.readouterr().err


def test_a_plugin_cannot_take_the_name_of_a_method(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from fedproto import STRATEGIES, Strategy\n"
        "@STRATEGIES.register('fedavg')\n"
        "@dataclass(frozen=True)\n"
        "class FedAvg(Strategy):\n"
        "    '''Not the one.'''\n"
    )
    with pytest.raises(ConfigError, match="'fedavg' is one of fedproto's own; register FedAvg"):
        load_plugin(str(plugin))
    with pytest.raises(ConfigError, match=r"register strategy under a name: @….register\('mine'\)"):
        STRATEGIES.register(FedAvg)
    assert STRATEGIES.get("fedavg") is FedAvg


def test_checks_say_ok_and_a_narrow_table_keeps_the_interval(here, capsys, monkeypatch):
    fedproto.sweep(DIGITS, SMALL, ["fedavg", "fedproto"], seeds=3, out=here / "runs", **KEYWORDS)
    assert main(["check", "runs"]) == 0
    assert capsys.readouterr().out.count("OK (") == 7
    monkeypatch.setattr("fedproto.cli.terminal.WIDEST", 80)
    assert main(["compare", "runs"]) == 0
    assert "95 % interval │" in capsys.readouterr().out.replace("┃", "│")
    plots = ["--plots", "figures", "--plot-format=pdf"]
    assert main(["compare", "runs", "--latex", *plots]) == 0
    table = capsys.readouterr().out
    assert table.startswith("\\begin{tabular}{lrrr")
    assert "95 \\% interval &" in table
    figures = list((here / "figures").iterdir())
    assert figures
    assert all(figure.read_bytes().startswith(b"%PDF") for figure in figures)
    assert main(["compare", "runs", "--plots", "figures", "--plot-format=txt"]) == 2
    assert "'txt' is not one of 'pdf', 'svg', 'png'" in capsys.readouterr().err


def test_runs_of_a_plugin_are_compared_without_it(here):
    plugin = here / "own.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from fedproto import STRATEGIES, Strategy\n"
        "from fedproto.options import option\n"
        "@STRATEGIES.register('mine')\n"
        "@dataclass(frozen=True)\n"
        "class Mine(Strategy):\n"
        "    '''Plain averaging.'''\n"
        "    strength: float = option(0.5, 'how much')\n"
    )
    made = ["--plugin", str(plugin), "run", "quickstart", *TINY, "--set=strategy.name=mine"]
    commands = [[*made, f"--set=strategy.strength={one}", "--quiet"] for one in (0.1, 0.9)]
    assert in_a_process(here, *commands)[0] == [0, 0]
    commands = [["compare", "runs"], ["resume", "runs/quickstart", "--rounds=3"]]
    statuses, shown, said = in_a_process(here, *commands)
    assert statuses == [0, 2]
    assert "mine (strength=0.1)" in shown
    assert "mine (strength=0.9)" in shown
    assert "--plugin" in said


def in_a_process(folder: Path, *commands: list[str]) -> tuple[list[int], str, str]:
    """Commands one after another in a process of their own: their statuses, and what they print."""
    program = (
        "import json, sys; from fedproto.cli import main\n"
        "statuses = [main(each) for each in json.loads(sys.argv[1])]\n"
        "print(json.dumps(statuses))"
    )
    command = [sys.executable, "-c", program, json.dumps(commands)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    *shown, statuses = done.stdout.splitlines()
    return json.loads(statuses), "\n".join(shown), done.stderr


def test_remedies_name_packages_that_can_be_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra in project["optional-dependencies"].keys() - {"all", "dev", "docs", "paper"}:
        command = install(extra)
        for need in project["optional-dependencies"][extra]:
            assert re.match(r"[\w-]+", need).group() in command
        assert "fedproto[" not in command
    for path in (ROOT / "src/fedproto").rglob("*.py"):
        assert "pip install 'fedproto[" not in path.read_text(encoding="utf-8"), path
