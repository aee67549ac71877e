"""The command line as a person or a program uses it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedproto
from fedproto.cli import main
from fedproto.cli.app import COMMANDS, command, summary
from fedproto.cli.inspecting import entries
from fedproto.store.run import devices

TINY = [
    "--set=data.name=digits",
    "--set=data.clients=12",
    "--set=model.hidden=8",
    "--set=model.features=8",
    "--set=train.epochs=1",
    "--set=schedule.rounds=3",
    "--set=schedule.cohort=4",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def swept(here, capsys):
    assert main(["sweep", "quickstart", *TINY, "--set=sweep.seed=[0, 1]", "--out=both"]) == 0
    capsys.readouterr()
    return here / "both"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fedproto {fedproto.__version__}\n"


def every_command():
    """Those of groups too; none is the program itself."""
    inner = {name: getattr(command(name), "commands", {}) for name in COMMANDS}
    return [
        [],
        *([name] for name in inner),
        *([name, one] for name in inner for one in inner[name]),
    ]


@pytest.mark.parametrize("arguments", every_command(), ids=" ".join)
def test_every_command_has_help(arguments, capsys):
    assert main([*arguments, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


def test_run_makes_a_directory_of_its_own_and_shows_the_result(here, capsys):
    assert main(["run", "quickstart", *TINY]) == 0
    shown = capsys.readouterr()
    assert "fedproto" in shown.out
    assert "accuracy" in shown.out
    assert "1 run in runs/quickstart" in shown.err
    assert (here / "runs/quickstart/run.json").exists()
    assert main(["run", "quickstart", *TINY, "--quiet"]) == 0
    assert (here / "runs/quickstart-2/run.json").exists()


def test_only_some_runs_of_a_sweep(here, capsys):
    wanted = ["--only=FedAvg", "--only=FedProto", "--out=some", "--quiet"]
    small = ["--set=sweep.seed=[0]", "--set=schedule.rounds=2", "--set=model.features=8"]
    assert main(["sweep", "demo", *small, *wanted]) == 0
    assert sorted(path.parent.name for path in (here / "some").glob("*/run.json")) == [
        "fedavg-seed0",
        "fedproto-seed0",
    ]
    assert main(["sweep", "demo", "--only=FedAvgg"]) == 2
    assert "did you mean 'FedAvg'?" in capsys.readouterr().err


def test_run_refuses_a_sweep(capsys):
    assert main(["run", "demo"]) == 2
    assert "start them with 'fedproto sweep'" in capsys.readouterr().err


def test_resume_of_what_is_finished_does_nothing(swept):
    before = (swept / "fedproto-seed0" / "rounds.jsonl").read_bytes()
    assert main(["resume", str(swept), "--quiet"]) == 0
    assert main(["resume", str(swept / "fedproto-seed0"), "--quiet"]) == 0
    assert (swept / "fedproto-seed0" / "rounds.jsonl").read_bytes() == before


def test_compare_groups_seeds_and_lists_each_when_asked(swept, capsys):
    assert main(["compare", str(swept), "--json", "--target=0.01"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["title"], row["seeds"], row["rounds"]) == ("fedproto", [0, 1], 3)
    assert row["values"].keys() >= {
        "accuracy", "loss", "mean over rounds", "rounds to target", "bytes up", "bytes down",
        "mean client", "worst tenth", "at zero", "seconds",
    }  # fmt: skip
    assert main(["compare", str(swept), "--each", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_compare_writes_tables_for_papers(swept, capsys):
    assert main(["compare", str(swept), "--markdown"]) == 0
    head, rule, row, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("| method | accuracy % | mean client % | worst tenth %")
    assert head.count("|") == rule.count("|") == row.count("|")
    assert main(["compare", str(swept), "--latex"]) == 0
    latex = capsys.readouterr().out
    assert "\\begin{tabular}{lr" in latex
    assert "accuracy \\% &" in latex
    assert "$\\pm$" in latex


def test_compare_draws_figures(swept):
    assert main(["compare", str(swept), "--plots=pictures"]) == 0
    for name in ("accuracy", "loss"):
        picture = (swept.parent / "pictures" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5000
    options = ["--plot-format=pdf", "--plot-width=column"]
    assert main(["compare", str(swept), "--plots=figures", *options]) == 0
    assert (swept.parent / "figures" / "accuracy.pdf").read_bytes().startswith(b"%PDF")


def test_list_shows_everything_with_options(capsys, monkeypatch):
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in ("fedproto", "synthetic", "cnn", "reference", "methods-digits"):
        assert name in shown
    strategies = entries("strategies")
    fedprox = next(entry for entry in strategies if entry.name == "fedprox")
    assert [option.name for option in fedprox.options] == ["mu"]
    assert main(["list", "strategies"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == len(strategies) + 5, "a line per method"
    summaries = [entry.summary.replace("``", "") for entry in strategies]
    assert all(summary in shown for summary in summaries), "a pipe has room"
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert main(["list", "strategies"]) == 0
    narrow = capsys.readouterr().out
    assert all(summary.split()[-1] in narrow for summary in summaries), "nothing is cut off"
    assert all(line.endswith("│") for line in narrow.splitlines() if line.startswith("│"))
    assert main(["list", "fedprox"]) == 0
    shown = capsys.readouterr().out
    assert "strength μ of the proximal term" in shown
    assert "Sections that combine with every strategy" in shown
    assert main(["list", "fedprx"]) == 2
    assert "did you mean 'fedprox'" in capsys.readouterr().err
    assert main(["list", "lr"]) == 2
    assert "'lr'; it is an option: fedproto list train or fedproto list server" in (
        capsys.readouterr().err
    )


def test_info_shows_versions_devices_and_data(capsys):
    assert main(["info"]) == 0
    shown = capsys.readouterr().out
    for text in (f"fedproto: {fedproto.__version__}", "torch: ", "data root", *devices()):
        assert text in shown
    assert "synthetic: ready (nothing to download)" in shown


MISTAKES = {
    "unknown recipe": (["run", "quickstrt"], "did you mean 'quickstart'?"),
    "missing file": (["run", "none.toml"], "recipe file none.toml does not exist"),
    "unknown key": (["run", "quickstart", "--set=train.epoch=2"], "did you mean 'epochs'?"),
    "bad delta": (["run", "quickstart", "--set=schedule.delta=2"], "at most 1, not 2"),
    "zero epochs": (["run", "quickstart", "--set=train.epochs=0"], "at least 1, not 0"),
    "wrong type": (["run", "quickstart", "--set=train.lr=fast"], "must be a number, not 'fast'"),
    "large cohort": (["run", "quickstart", "--set=schedule.cohort=31"], "at most 30"),
    "no device": (["run", "quickstart", "--set=engine.device=cuda:9"], "engine.device 'cuda:9'"),
    "model and data": (["run", "quickstart", "--set=model.name=cnn"], "use model 'mlp'"),
    "no key": (["run", "quickstart", "--set=x"], "write it as key=value"),
    "resume nothing": (["resume", "."], "holds neither a run nor a sweep"),
    "compare nothing": (["compare", "."], "holds no run"),
    "compare nowhere": (["compare", "nowhere"], "nowhere does not exist"),
    "no plugin": (["--plugin=nope.py", "list"], "plugin file nope.py does not exist"),
    "broken plugin": (["--plugin=not.there", "list"], "plugin 'not.there' cannot be imported"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_a_remedy_and_exit_code_2(mistake, capsys):
    arguments, remedy = MISTAKES[mistake]
    assert main(arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert remedy in errors[0]


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_mistake_leaves_no_directory_behind(command, here):
    assert main([command, "quickstart", "--set=schedule.cohort=31", "--out=run"]) == 2
    assert not (here / "run").exists()
    assert main([command, "quickstart", *TINY, "--out=run", "--quiet"]) == 0


def test_wrong_usage_exits_with_2(capsys):
    assert main(["run"]) == 2
    assert main(["frobnicate"]) == 2
    assert main(["compare", ".", "--metric"]) == 2
    assert capsys.readouterr().err


def test_compare_names_the_metrics_there_are(swept, capsys):
    assert main(["compare", str(swept), "--metric=acuracy"]) == 2
    assert "did you mean 'accuracy'?" in capsys.readouterr().err


def test_a_run_of_another_configuration_is_left_as_it_was(swept, capsys):
    run = swept / "fedproto-seed0"
    before = (run / "rounds.jsonl").read_bytes()
    assert main(["run", "quickstart", *TINY, f"--out={run}"]) == 2
    assert main(["run", "quickstart", "--reuse", "--set=seed=4", f"--out={run}"]) == 2
    assert "differs in" in capsys.readouterr().err
    assert (run / "rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_what_needs_no_torch_does_not_import_it(arguments):
    code = (
        "import sys; from fedproto.cli import main;"
        f" code = main({arguments!r}); sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_says_of_a_command_what_it_says_itself(name):
    said = command(name).help.split("\n\n")[0]
    assert " ".join(said.split()) == " ".join(summary(name).split())
    assert summary(name)


def test_without_a_checkout_reproduce_says_where_it_runs(tmp_path):
    shutil.copytree(Path(fedproto.__file__).parent, tmp_path / "fedproto")
    done = subprocess.run(
        [sys.executable, "-m", "fedproto", "reproduce", "accuracy", "--scale", "quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "runs from a checkout of the repository: clone it" in done.stderr
    assert done.stderr.count("\n") == 1


def test_all_that_is_offered_can_be_had():
    assert all(getattr(fedproto, name) is not None for name in fedproto.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fedproto.nothing  # noqa: B018 - the access is what is tested


def test_a_run_that_learned_nothing_is_no_success(tmp_path, capsys):
    where = ["--out", str(tmp_path / "run"), "--set", "schedule.rounds=4"]
    assert main(["run", "quickstart", "-q", *where, "--set", "train.lr=1e30"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "of 40 updates were not used; most often: parameter" in said
    assert "error: a model has hardly learned" in said


def test_a_run_whose_clients_were_all_dropped_is_no_success(tmp_path, capsys):
    settings = ["strategy.name=fedavg", "schedule.delta=1", "schedule.rounds=2"]
    where = ["--out", str(tmp_path / "run"), *(f"--set={setting}" for setting in settings)]
    assert main(["run", "quickstart", "-q", *where]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "fedavg: the model did not move: every client was dropped" in said
