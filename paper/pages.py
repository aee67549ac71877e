"""Published tables, all made again by one command from the archived runs: ``make tables``.

First the tables below ``results/`` by the commands in the JSON files beside them, then the tables
in the docs from these and from the runs. A table of a page is found by its first line, so
nothing but the text around it is written by hand. A test makes all of them and compares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedproto.cli import main as fedproto
from fedproto.report.results import StoredRun, find_runs
from paper import benchmarked
from paper.cells import DASH, Lines, around, number, row
from paper.experiments.claims import as_markdown

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/reproduce")
"""Where the commands of the published tables look for runs."""

SOURCES = ("synthetic-sources", "mnist-sources", "femnist-sources")
ARCHIVES: Mapping[str, tuple[str, ...]] = {
    "field": ("field-heads",),
    "serve": ("serve-cifar10", "serve-cifar100", "serve-femnist"),
    "sources": (*SOURCES, "celeba-sources", "segmentation"),
    "guidance": (
        *SOURCES,
        "guidance",
        "guidance-field",
        "guidance-field-mnist",
        "guidance-field-femnist",
        "guidance-more",
        "guidance-served",
        "guidance-celeba",
        "guidance-protohead",
        "guidance-fpascal",
        "guidance-fpascal-more",
    ),
}
"""Folders of tables below ``results``, and the archives that they come from."""


def unpack(names: Sequence[str], folder: Path) -> None:
    """Unpacks archives of ``results/runs``, each into a folder of its name."""
    for name in names:
        (archive,) = (ROOT / "results/runs").glob(f"{name}.tar.*")
        with tarfile.open(archive) as file:
            file.extractall(folder / name, filter="data")


def tables(folder: str, out: Path) -> Iterator[tuple[Path, Path]]:
    """Makes a folder's tables by their commands from its archives, in the working directory.

    Yields:
        Each published file and the file that was made for it.
    """
    unpack(ARCHIVES[folder], RUNS)
    by_command: dict[str, dict[Path, str]] = defaultdict(dict)
    for path in sorted((ROOT / "results" / folder).glob("*.json")):
        origin = json.loads(path.read_text(encoding="utf-8"))
        if "experiment" not in origin:  # a table itself
            continue
        files = [name for name in origin["files"] if name.endswith((".csv", ".md"))]
        files.append(f"{origin['experiment']}.json")
        # A file of a study's part has the part's name in place of the experiment's.
        named = {name.replace(origin["experiment"], path.stem): name for name in files}
        found = {path.with_name(mine): made for mine, made in named.items()}
        by_command[origin["command"]] |= found
    for place, (command, known) in enumerate(by_command.items()):
        made = out / f"made{place}"
        with contextlib.redirect_stdout(io.StringIO()):
            status = fedproto([*shlex.split(command)[1:], f"--out={made}"])
        if status:
            raise SystemExit(f"{command} failed")
        for path, name in known.items():
            if path.exists():
                (file,) = made.rglob(name)
                yield path, file


def publish(made: Path, known: Path) -> None:
    """Puts a file in the place of a published one.

    Rows that count data files instead of runs stay where these files are not there.
    """
    if made.suffix == ".csv":
        old, new = (pd.read_csv(file, dtype=str, keep_default_na=False) for file in (known, made))
        key = ["data_set", "quantity", "row"]
        if {"runs", *key} <= set(old.columns):
            there = set(new[key].itertuples(index=False, name=None))
            old_keys = old[key].itertuples(index=False, name=None)
            absent = np.array([one not in there for one in old_keys])
            counted = old[absent & old["runs"].eq("0").to_numpy()]
            pd.concat([counted, new]).to_csv(known, index=False)
            return
    shutil.copy(made, known)


@dataclass(frozen=True)
class PageTable:
    """A table in a page.

    Attributes:
        make: Gives its lines from the folder of the unpacked archives.
        archives: Those that it needs, besides the tables below ``results``.
    """

    page: str
    make: Callable[[Path], Lines]
    archives: tuple[str, ...] = ()


def written(text: str, lines: Lines, page: str) -> str:
    """A page's text with the table that has the same head replaced.

    Raises:
        SystemExit: If the page has no such table.
    """
    own = text.splitlines()
    head = row(lines[0])
    indents = [len(line) - len(line.lstrip()) for line in own if line.strip() == head]
    if len(indents) != 1:
        raise SystemExit(f"{page} has {len(indents)} tables that begin with {head}")
    indent = indents[0] * " "
    start = own.index(indent + head)
    end = start
    while end < len(own) and own[end].strip().startswith("|"):
        end += 1
    new = [own[start], own[start + 1], *(indent + row(line) for line in lines[1:])]
    return "\n".join([*own[:start], *new, *own[end:]]) + "\n"


def published(name: str) -> pd.DataFrame:
    """A table below ``results``."""
    return pd.read_csv(ROOT / "results" / f"{name}.csv")


def claims(_: Path) -> Lines:
    """Claims by data set."""
    lines = as_markdown(published("sources/claims")).splitlines()
    return [line.strip("| ").split(" | ") for line in (lines[0], *lines[2:])]


def data_sets(_: Path) -> Lines:
    """Table 1 of the paper: clients and samples that the recipes give."""
    by = published("sources/numbers").set_index(["data_set", "row"])
    titles = {
        "Synthetic": "synthetic",
        "MNIST": "mnist",
        "FEMNIST": "femnist",
        "CelebA": "celeba, by the official lists",
        "FPascal": "fpascal, fpascal-macro",
    }
    rows = {"clients": 0, "samples": 0, "samples per client, std": 1}
    lines: Lines = [["", "clients", "samples", "std", "paper: clients", "samples", "std"]]
    for data_set, title in titles.items():
        cells = [
            number(by.loc[(data_set, name), side], digits)
            for side in ("ours", "paper")
            for name, digits in rows.items()
        ]
        lines.append([title, *cells])
    return lines


def accuracy(_: Path) -> Lines:
    """Table 2 of the paper: accuracy and training loss."""
    frame = published("sources/accuracy")
    names = {"Synthetic": "synthetic"}
    lines: Lines = [
        ["", "", "accuracy, ours", "the paper", "difference", "training loss, ours", "the paper"]
    ]
    by = frame.set_index(["quantity", "data_set", "row"])
    for data_set, method in by.loc["test accuracy (%)"].index:
        score = by.loc[("test accuracy (%)", data_set, method)]
        loss = by.loc[("training loss over all clients", data_set, method)]
        lines.append(
            [
                names.get(data_set, data_set),
                method,
                around(score["ours"], score["std_over_deltas"]),
                around(score["paper"], score["paper_std"]),
                number(score["difference"], sign=True),
                around(loss["ours"], loss["std_over_deltas"], 2),
                around(loss["paper"], loss["paper_std"], 2),
            ]
        )
    return lines


def ablation(_: Path) -> Lines:
    """Table 3 of the paper: MNIST at three δ."""
    frame = published("sources/ablation")
    frame = frame[frame["data_set"] == "MNIST"]
    quantities = list(frame["quantity"].unique())
    by = frame.set_index(["quantity", "row"])
    lines: Lines = [["", "ours", "the paper", "difference of the means"]]
    for method in frame["row"].unique():
        found = [by.loc[(quantity, method)] for quantity in quantities]
        ours, paper = (
            " / ".join(number(one[side]) for one in found[:-1]) for side in ("ours", "paper")
        )
        paper = paper.replace(" / ".join([DASH] * (len(found) - 1)), DASH)
        lines.append([method, ours, paper, number(found[-1]["difference"], sign=True)])
    return lines


def discrepancies(_: Path) -> Lines:
    """FFD by data set."""
    frame = published("sources/margins")
    frame = frame[frame["quantity"] == "FFD (%)"]
    methods = ("FedProx", "FedAtt", "FedProto", "Fairness + toleration")
    head = ["FedProx", "FedAtt", "FedProto", "fairness + toleration"]
    lines: Lines = [["", *head, "the paper's FedProx / FedProto"]]
    for data_set, group in frame.groupby("data_set", sort=False):
        by = group.set_index("row")
        ours = [around(*by.loc[one, ["ours", "std_over_deltas"]]) for one in methods]
        theirs = " / ".join(number(by.loc[one, "paper"]) for one in ("FedProx", "FedProto"))
        lines.append([str(data_set).replace("Synthetic", "synthetic"), *ours, theirs])
    return lines


def readings(runs: Path) -> Lines:
    """MNIST by reading of the sources: runs that have all their rounds."""
    methods = ("FedAvg", "FedProx", "FedAtt", "FedProto", "Fairness + toleration")
    found: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    for run in find_runs([runs / "readings-mnist"]):
        options = run.config.to_dict()
        where: tuple[str, str, str] = (
            {"none": "0 to 1", "pixel": "pixel by pixel"}[options["data"]["normalize"]],
            str(options["model"]["init"]),
            {"size": "by size", "uniform": "uniform"}[options["schedule"]["sampling"]],
        )
        score = run.final("accuracy")
        if run.finished and score is not None:
            found[where][run.config.title] = 100 * score
    head = ["FedAvg", "FedProx", "FedAtt", "FedProto", "fairness + toleration"]
    lines: Lines = [["pixels", "initial weights", "sampling", *head]]
    for where, scores in sorted(found.items(), key=lambda one: (one[0][0], one[0][1] != "torch")):
        lines.append([*where, *(number(scores[method]) for method in methods)])
    frame = published("sources/accuracy")
    chosen = (frame["quantity"] == "test accuracy (%)") & (frame["data_set"] == "MNIST")
    paper = frame[chosen].set_index("row")["paper"]
    means = [number(paper.get(method, float("nan"))) for method in methods]
    return [*lines, ["*the paper, mean over δ*", "", "", *means]]


def computed_heads(_: Path) -> Lines:
    """Heads in closed form on frozen features, beside published figures."""
    lines: Lines = [["head", "ours", "published", "difference"]]
    for _, one in published("field/field-heads").iterrows():
        ours = around(one["ours"], one["std_over_seeds"])
        difference = number(one["difference"], sign=True)
        lines.append([one["method"], ours, number(one["published"]), difference])
    return lines


def served_scores(_: Path) -> Lines:
    """What wins: scores at the end / over all rounds of the newest and of the averaged model."""
    frame = published("serve/serve")
    sets = list(frame["data_set"].unique())
    models = ("newest model", "average over rounds")
    head = [f"{data_set}, {model}" for data_set in sets for model in models]
    lines: Lines = [["method", *head]]
    scores = frame.set_index(["data_set", "method"])
    for method in SERVED:
        cells = []
        for data_set in sets:
            for label in _labels(method):
                known = (data_set, label) in scores.index
                one = scores.loc[data_set, label] if known else None
                both = () if one is None else (one["score"], one["mean_over_rounds"])
                cells.append(" / ".join(number(each) for each in both) or DASH)
        lines.append([method, *cells])
    return lines


def served_differences(_: Path) -> Lines:
    """What wins: the recommended method minus others, at the end, with intervals."""
    frame = published("serve/serve-pairs")
    frame = frame[(frame["minus"] == "Steady") & (frame["quantity"] == "final")]
    sets = list(frame["data_set"].unique())
    sides = [(data_set, own) for data_set in sets for own in range(2)]
    words = ("the newest model", "with its average")
    lines: Lines = [["Steady minus", *(f"{data_set}: {words[own]}" for data_set, own in sides)]]
    by = frame.set_index(["data_set", "method"])
    for method in SERVED[1:]:
        cells = []
        for data_set, own in sides:
            side = (data_set, _labels(method)[own])
            cells.append(_interval(by.loc[side]) if side in by.index else DASH)
        lines.append([method, *cells])
    return lines


SERVED = ("Steady", "FedACG", "SCAFFOLD", "FedSAM", "FedAvgM", "FedAdam", "Equal weights", "FedAvg")
"""Methods of the study of served models, by their scores on CIFAR-10, then on FEMNIST."""


def _labels(method: str) -> tuple[str, str]:
    """What a method's newest and averaged models are called."""
    return (
        (f"{method}, newest model", method)
        if method == "Steady"
        else (method, f"{method} + average")
    )


def _interval(pair: pd.Series[float]) -> str:
    """What the other has more, with its interval."""
    mean, low, high = (number(-pair[end], sign=True) for end in ("difference", "high", "low"))
    return f"{mean} [{low}, {high}]"


def guided_scores(_: Path) -> Lines:
    """The earlier study: scores at the end / over all rounds, five seeds."""
    frame = published("guidance/guidance")
    methods = ("ProtoHead", "Guided", "FedAvgM", "FedAdam", "Fairness + toleration")
    lines: Lines = [["data set", *methods[:-1], "equal weights"]]
    chosen = frame[frame["runs"] == 5].groupby(["data_set", "delta"], sort=False)
    for (data_set, delta), group in chosen:
        by = group.set_index("method")
        cells = [
            f"{number(by.loc[one, 'score'])} / {number(by.loc[one, 'mean_over_rounds'])}"
            for one in methods
        ]
        lines.append([f"{data_set}, δ = {delta:g}", *cells])
    return lines


def guided_differences(_: Path) -> Lines:
    """The earlier study: ProtoHead minus two others with intervals."""
    frame = published("guidance/guidance-pairs")
    frame = frame[(frame["minus"] == "ProtoHead") & (frame["pairs"] == 5)]
    sides = [
        (method, quantity)
        for method in ("Fairness + toleration", "FedAvgM")
        for quantity in ("final", "mean over rounds")
    ]
    names = {"Fairness + toleration": "equal weights", "final": "at the end"}
    head = [
        f"{names.get(one, one)}, {names.get(what, what.replace('mean', '').strip())}".replace(
            "over rounds", "over all rounds"
        )
        for one, what in sides
    ]
    lines: Lines = [["data set", *head]]
    for (data_set, delta), group in frame.groupby(["data_set", "delta"], sort=False):
        by = group.set_index(["method", "quantity"])
        lines.append([f"{data_set}, δ = {delta:g}", *(_interval(by.loc[side]) for side in sides)])
    return lines


def centralised_segmentation(runs: Path) -> Lines:
    """Centralised training on VOC beside the paper's."""
    paper = published("sources/segmentation").set_index(["data_set", "row"])["paper"]
    shown = {"fpascal": ("20 classes", "FPascal"), "fpascal-macro": ("4 groups", "FPascal Macro")}
    head = ["mIoU, object classes", "with background", "pixel accuracy"]
    lines: Lines = [["", *head, "the paper's mIoU (full resolution)"]]
    names = ("miou", "miou_with_background", "pixel_accuracy")
    pooled = [run for run in find_runs([runs / "segmentation"]) if run.config.strategy.pooled]
    for data_set, (title, name) in shown.items():
        (run,) = (run for run in pooled if run.config.to_dict()["data"]["name"] == data_set)
        cells = [percent(run.final(f"validation_{metric}")) for metric in names]
        lines.append([title, *cells, number(paper[name, "Centralized (validation)"])])
    return lines


FPASCAL = ("guidance-fpascal", "guidance-fpascal-more")


def federated_segmentation(runs: Path) -> Lines:
    """Forty rounds of a federation on VOC; α = 0.1 out of a sweep of a hundred."""
    lines: Lines = [["", "α = 0.01", "α = 0.1", "α = 1"]]
    short = mixes(find_runs([runs / "segmentation"]))
    longer = mixes(find_runs([runs / name for name in FPASCAL]))
    for method in ("FedAvg", "FedProto", "Fairness + toleration"):
        cells = [
            percent((longer if alpha == 0.1 else short)[method, alpha].final("miou", 40))
            for alpha in (0.01, 0.1, 1.0)
        ]
        lines.append([method, *cells])
    return lines


def guided_segmentation(runs: Path) -> Lines:
    """Mean IoU after 40, 80 and 100 rounds at three class mixes."""
    found = mixes(find_runs([runs / name for name in FPASCAL]))
    rounds, alphas = (40, 80, 100), (0.01, 0.1, 1.0)
    head = [f"α = {alpha:g}: {at}" if at == 40 else str(at) for alpha in alphas for at in rounds]
    titles = {
        "Guided": "Guided (head by class and momentum)",
        "FedAvgM": "FedAvgM (momentum)",
        "Head by class": "head by class",
        "FedAvg": "FedAvg",
        "FedProto": "FedProto",
        "Fairness + toleration": "fairness + toleration",
    }
    lines: Lines = [["after rounds", *head]]
    for method, title in titles.items():
        cells = []
        for alpha in alphas:
            run = found.get((method, alpha))
            for at in rounds:
                there = run is not None and len(run.records) >= at
                cells.append(percent(run.final("miou", at)) if run and there else DASH)
        lines.append([title, *cells])
    return lines


def mixes(runs: Sequence[StoredRun]) -> dict[tuple[str, float], StoredRun]:
    """The longest federated run of each method and class mix."""
    found: dict[tuple[str, float], StoredRun] = {}
    for run in sorted(runs, key=lambda run: len(run.records)):
        if not run.config.strategy.pooled:
            found[run.config.title, float(getattr(run.config.data, "alpha", 0.0))] = run
    return found


def percent(value: float | None) -> str:
    """A share as per cent."""
    return DASH if value is None else number(100 * value)


EVIDENCE, APPENDIX = "docs/evidence/reproduction.md", "docs/appendix/reproduction.md"
PERFORMANCE, HOSTILE = "docs/evidence/performance.md", "docs/appendix/hostile-clients.md"
WINS, SEGMENTATION = "docs/evidence/what-wins.md", "docs/appendix/segmentation.md"
EARLIER = "docs/appendix/class-statistics.md"
PAGE_TABLES = (
    PageTable(EVIDENCE, claims),
    PageTable(APPENDIX, accuracy),
    PageTable(APPENDIX, ablation),
    PageTable(APPENDIX, discrepancies),
    PageTable(APPENDIX, readings, ("readings-mnist",)),
    PageTable("docs/appendix/field.md", computed_heads),
    PageTable("docs/appendix/paper-map.md", data_sets),
    PageTable(PERFORMANCE, benchmarked.peers),
    PageTable(PERFORMANCE, benchmarked.steps),
    PageTable(PERFORMANCE, benchmarked.rounds),
    PageTable(PERFORMANCE, benchmarked.sweeps),
    PageTable(PERFORMANCE, benchmarked.flower),
    PageTable(HOSTILE, benchmarked.attacks),
    PageTable(HOSTILE, benchmarked.backdoor),
    PageTable(WINS, served_scores),
    PageTable(WINS, served_differences),
    PageTable(EARLIER, guided_scores),
    PageTable(EARLIER, guided_differences),
    PageTable(SEGMENTATION, centralised_segmentation, ("segmentation",)),
    PageTable(SEGMENTATION, federated_segmentation, ("segmentation", *FPASCAL)),
    PageTable(SEGMENTATION, guided_segmentation, FPASCAL),
)


def pages(runs: Path) -> dict[str, str]:
    """The texts of all pages with their tables made again; archives are unpacked below `runs`."""
    unpack(sorted({name for table in PAGE_TABLES for name in table.archives}), runs)
    texts: dict[str, str] = {}
    for table in PAGE_TABLES:
        text = texts.get(table.page) or (ROOT / table.page).read_text(encoding="utf-8")
        texts[table.page] = written(text, table.make(runs), table.page)
    return texts


def main() -> None:
    """Writes all published tables again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", action="store_true", help="only those of the docs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        for name in [] if given.pages else ARCHIVES:
            place = Path(folder) / name
            place.mkdir()
            os.chdir(place)
            for known, made in tables(name, place):
                publish(made, known)
        os.chdir(before)
        for page, text in pages(Path(folder) / "runs").items():
            (ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
