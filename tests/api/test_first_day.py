"""What a new user meets on the first day: plugins, options, more rounds, names where they help."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

import fedproto
from fedproto import STRATEGIES, Federation
from fedproto import options as registered_options
from fedproto.cli import main
from fedproto.cli.inspecting import entries
from fedproto.config import SECTIONS, digest_of
from fedproto.data.images import open_image
from fedproto.disk.files import Folder
from fedproto.disk.integrity import sealed, unsealed
from fedproto.errors import ConfigError, DataError, StoreError
from fedproto.options import describe
from fedproto.store import read_description
from helpers import Clock
from paper.output import Output

TINY = [
    "--set=data.name=digits",
    "--set=data.clients=5",
    "--set=model.hidden=4",
    "--set=model.features=4",
    "--set=schedule.rounds=2",
    "--set=schedule.cohort=3",
    "--set=engine.name=reference",
]

PLUGIN = """
from dataclasses import dataclass
from fedproto import options as registered_options
from fedproto import STRATEGIES, FedAvg

@STRATEGIES.register("mine")
@dataclass(frozen=True)
class Mine(FedAvg):
    '''A strategy of one's own.'''
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    command = ["sweep", "quickstart", *TINY, "--set=sweep.seed=[0, 3]", "-q"]
    assert main([*command, f"--out={folder / 'both'}"]) == 0
    return folder


def unknown(run: Path, description: dict) -> None:
    """Makes a run one of a strategy that nobody here knows."""
    description["config"]["strategy"] = {"name": "from-elsewhere"}
    description["digest"] = digest_of(description["config"])
    (run / "run.json").write_bytes(sealed(description))


@pytest.mark.parametrize("plugins", [["/home/me/own.py"], []])
def test_a_run_of_a_plugin_does_not_hide_the_others(swept, tmp_path, capsys, plugins):
    shutil.copytree(swept, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "both" / "fedproto-seed0", tmp_path / "foreign")
    description = unsealed((tmp_path / "foreign" / "run.json").read_bytes())
    description["environment"]["plugins"] = plugins
    unknown(tmp_path / "foreign", description)
    for command in (["compare"], ["report", f"--out={tmp_path / 'page.html'}"]):
        assert main([*command, str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert command[0] == "report" or ("fedproto" in said and "from-elsewhere" in said)
    assert main(["export", str(tmp_path / "foreign")]) == 2
    said = capsys.readouterr().err
    assert "unknown strategy 'from-elsewhere'" in said
    assert ("--plugin /home/me/own.py" if plugins else "--plugin FILE") in said


def test_plugins_are_named_anywhere_and_remembered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registered_options, "_loaded", [])
    monkeypatch.setattr(STRATEGIES, "_entries", dict(STRATEGIES._entries))
    (tmp_path / "own_strategy.py").write_text(PLUGIN)
    for place, command in enumerate(
        (
            ["run", "quickstart", "--plugin", "own_strategy.py"],
            ["run", "--plugin=own_strategy.py", "quickstart"],
        )
    ):
        out = tmp_path / f"run{place}"
        settings = [*TINY, "--set=strategy.name=mine", f"--out={out}", "-q"]
        assert main([*command, *settings]) == 0
        plugins = read_description(out)["environment"]["plugins"]
        assert str(tmp_path / "own_strategy.py") in plugins
    assert main(["run", "quickstart", "--plugin", "nowhere.py"]) == 2
    assert "nowhere.py does not exist" in capsys.readouterr().err


def test_plugins_of_the_environment_may_have_spaces_in_their_paths(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registered_options, "_loaded", [])
    monkeypatch.setattr(STRATEGIES, "_entries", dict(STRATEGIES._entries))
    (tmp_path / "my work").mkdir()
    files = [tmp_path / "my work" / f"{name}.py" for name in ("one", "other")]
    for file in files:
        file.write_text(PLUGIN.replace('"mine"', f'"{file.stem}"'))
    monkeypatch.setenv("FEDPROTO_PLUGINS", os.pathsep.join(map(str, files)))
    assert main(["list", "one"]) == 0
    assert {"one", "other"} <= set(STRATEGIES.names())
    assert registered_options.loaded_plugins() == tuple(map(str, files))
    monkeypatch.setenv("FEDPROTO_PLUGINS", "nowhere.py")
    assert main(["list", "one"]) == 2
    assert "nowhere.py does not exist" in capsys.readouterr().err


def test_a_file_whose_name_is_no_text_does_not_hide_other_data_sets(tmp_path, capsys):
    (tmp_path / "MNIST").mkdir()
    try:
        os.close(os.open(os.fsencode(tmp_path / "MNIST") + b"/\xff.gz", os.O_CREAT))
    except OSError:
        pytest.skip("this file system has such names no more")
    assert main(["info", "--data-root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"mnist: .*is not UTF-8; rename it", shown)
    assert "svhn: no files" in shown


def test_a_comparison_says_which_run_is_which(swept, capsys):
    assert main(["compare", str(swept), "--each", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seeds"] for row in rows] == [[0], [3]]
    folders = [[str(swept / "both" / f"fedproto-seed{seed}")] for seed in (0, 3)]
    assert [row["directories"] for row in rows] == folders
    assert main(["compare", str(swept), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["seeds"] == [0, 3]
    assert len(row["directories"]) == 2
    assert main(["compare", str(swept), "--each"]) == 0
    shown = capsys.readouterr().out
    assert "seed 0" in shown
    assert "seed 3" in shown


def test_a_comparison_as_csv(swept, capsys):
    assert main(["compare", str(swept), "--each", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["seeds"] for row in rows] == ["0", "3"]
    last = [fedproto.load(row["directories"]).metrics["accuracy"] for row in rows]
    assert [float(row["accuracy"]) for row in rows] == pytest.approx(last)


def test_a_target_in_per_cent_is_refused(swept, capsys):
    assert main(["compare", str(swept), "--target", "75"]) == 2
    assert "accuracy lies between 0 and 1; write 0.75 for 75 %" in capsys.readouterr().err
    assert main(["compare", str(swept), "--target", "75", "--metric=loss"]) == 0


def test_options_are_listed_by_section(capsys):
    (entry,) = entries("train")
    assert [one.name for one in entry.options] == [one.name for one in describe(SECTIONS["train"])]
    assert main(["list", "options"]) == 0
    shown = capsys.readouterr().out
    for section in SECTIONS:
        assert section in shown
    assert main(["list", "engines"]) == 0
    shown = capsys.readouterr().out
    assert "auto" in shown
    assert main(["list", "engine"]) == 0
    assert "channels_last" in capsys.readouterr().out
    assert main(["list", "trian"]) == 2
    assert "did you mean 'train'" in capsys.readouterr().err


def test_an_option_without_its_section_is_found(capsys):
    assert main(["run", "quickstart", "--set", "rounds=3"]) == 2
    assert "did you mean 'schedule.rounds'?" in capsys.readouterr().err


def test_a_finished_run_goes_on_to_more_rounds(swept, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(swept / "both" / "fedproto-seed3", run)
    assert main(["resume", str(run), "--rounds=4", "-q"]) == 0
    assert main(["resume", str(run), "--rounds=4", "-q"]) == 0
    settings = [*TINY, "--set=schedule.rounds=4", "--set=seed=3", f"--out={tmp_path / 'whole'}"]
    assert main(["run", "quickstart", *settings, "-q"]) == 0
    ours, theirs = (fedproto.load(path) for path in (run, tmp_path / "whole"))
    assert len(ours.records) == len(theirs.records)
    for mine, other in zip(ours.records, theirs.records, strict=True):
        # The round that was the last one before also has the scores of the end of a run.
        assert mine.metrics == other.metrics | (mine.metrics if mine.round == 1 else {})
        assert mine.metrics.items() >= other.metrics.items()
    for name, tensor in theirs.state.params.items():
        assert np.array_equal(tensor, ours.state.params[name])
    assert main(["run", "quickstart", *settings[:-1], "--reuse", f"--out={run}", "-q"]) == 0
    assert main(["resume", str(run), "--rounds=3"]) == 2
    assert "already has 4 rounds; --rounds must be larger (got 3)" in capsys.readouterr().err


def test_a_sweep_goes_on_to_more_rounds(swept, tmp_path):
    shutil.copytree(swept / "both", tmp_path / "both")
    # As if a kill had come between the runs and the list of them.
    fedproto.extend(tmp_path / "both" / "fedproto-seed0", 3)
    assert main(["resume", str(tmp_path / "both"), "--rounds=3", "-q"]) == 0
    assert [len(run.records) for run in fedproto.load_all(tmp_path / "both")] == [3, 3]
    assert main(["resume", str(tmp_path / "both"), "-q"]) == 0


def test_a_sweep_that_another_process_lists_anew_is_not_extended(swept, tmp_path, monkeypatch):
    shutil.copytree(swept / "both", tmp_path / "both")
    before = (tmp_path / "both" / "sweep.json").read_bytes()
    monkeypatch.setattr("fedproto.disk.files.time", Clock())
    with (
        Folder(tmp_path / "both").locked(),
        pytest.raises(StoreError, match="in use by another process"),
    ):
        fedproto.extend(tmp_path / "both", 3)
    assert (tmp_path / "both" / "sweep.json").read_bytes() == before
    fedproto.extend(tmp_path / "both", 3)


def test_what_cannot_be_extended_is_refused(tmp_path):
    federation = Federation.from_clients([(np.random.rand(9, 4), np.arange(9) % 3)] * 3)
    out = tmp_path / "run"
    keywords = {"rounds": 1, "cohort": 2, "epochs": 1, "train": {"lr_schedule": "polynomial"}}
    fedproto.run(federation, "mlp", "fedavg", out=out, **keywords)
    with pytest.raises(ConfigError, match="learning rate that depends on the number of rounds"):
        fedproto.extend(out, 2)
    with pytest.raises(StoreError, match="neither a run nor a sweep"):
        fedproto.extend(tmp_path, 2)


def test_more_rounds_are_asked_for_where_the_data_is(tmp_path, capsys):
    data = Federation.from_clients([(np.random.rand(9, 4), np.arange(9) % 3)] * 3)
    keywords = {"cohort": 2, "epochs": 1}
    run, sweep = tmp_path / "run", tmp_path / "sweep"
    fedproto.run(data, "mlp", "fedavg", rounds=1, out=run, **keywords)
    fedproto.sweep(data, "mlp", ["fedavg"], rounds=1, out=sweep, **keywords)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.json")}
    for command in (["resume"], ["flower", "up"]):
        for folder in (run, sweep):
            assert main([*command, str(folder), "--rounds=3"]) == 2
            assert "started from Python with own data" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.json")} == before
    with pytest.raises(StoreError, match=r"or call fedproto\.extend\('.*run', 3\) before$"):
        fedproto.run(data, "mlp", "fedavg", rounds=3, out=run, **keywords)
    with pytest.raises(StoreError, match=r"or call fedproto\.extend\('.*sweep', 3\) before$"):
        fedproto.sweep(data, "mlp", ["fedavg"], rounds=3, out=sweep, **keywords)
    fedproto.extend(sweep, 3)
    (grown,) = fedproto.sweep(data, "mlp", ["fedavg"], rounds=3, out=sweep, **keywords)
    assert len(grown.records) == 3


def test_more_rounds_of_named_data_are_a_command(swept, tmp_path, capsys):
    shutil.copytree(swept / "both", tmp_path / "both")
    command = ["sweep", "quickstart", *TINY, "--set=sweep.seed=[0, 3]", "--reuse"]
    for rounds, remedy in ((3, "or fedproto resume {} --rounds 3"), (1, "")):
        more = [f"--out={tmp_path / 'both'}", f"--set=schedule.rounds={rounds}"]
        assert main([*command, *more]) == 2
        assert capsys.readouterr().err.endswith(
            f"directory, {remedy.format(tmp_path / 'both')}\n" if remedy else "directory\n"
        )


def test_a_broken_picture_is_named():
    with pytest.raises(DataError) as caught:
        open_image(b"no picture at all", "folder/mine.png")
    assert "folder/mine.png" in str(caught.value)
    assert "BytesIO" not in str(caught.value)


def test_pictures_of_other_settings_say_so(tmp_path):
    console = Console(file=io.StringIO())
    for remark in ("", "scale smoke: not the paper's settings"):
        figure = Figure()
        figure.subplots().plot([1, 2])
        figure.supxlabel("round")
        Output(tmp_path, console, remark).figure("one", figure)
        assert figure.get_supxlabel() == ("round\n" + remark if remark else "round")


def test_tables_of_one_data_set_take_the_place_of_no_others(tmp_path):
    nowhere = [f"--runs={tmp_path / 'none'}", f"--out={tmp_path}", "--scale=smoke"]
    for name in ("synthetic", "mnist"):
        assert main(["reproduce", "data", f"--only={name}", *nowhere]) == 0
        assert (tmp_path / "smoke" / name / "data.csv").exists()
