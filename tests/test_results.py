"""Published results: what lies in the tree is what was published, and no more than that."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from archives import ARCHIVES
from documents import ROOT
from fedproto.config.recipe import read_recipe
from paper import benchmarked, pages
from paper.benchmarked import measured
from paper.cells import number, row
from paper.output import Output

ROOM = 15_000_000
"""Bytes; every refresh of an archive stays in everybody's clone for good."""


def test_archives_are_those_that_were_published():
    published = json.loads((ARCHIVES / "published.json").read_text())
    there = sorted(ARCHIVES.glob("*.tar.*"))
    assert there
    for path in there:
        assert published[path.name][-1]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_archives_do_not_grow_the_history():
    assert sum(path.stat().st_size for path in ARCHIVES.iterdir()) < ROOM


def rows(path: Path) -> list[dict[str, str | float]]:
    """A table, its numbers as such; without what comes from no run but from the data's files."""

    def read(cell: str) -> str | float:
        try:
            return float(cell)
        except ValueError:
            return cell

    with path.open(newline="", encoding="utf-8") as file:
        table = [{name: read(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    return [row for row in table if row.get("runs") != 0]


@pytest.mark.parametrize("folder", pages.ARCHIVES)
def test_archives_give_the_tables_beside_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Output, "figure", lambda *_: None)
    compared = set()
    for published, made in pages.tables(folder, tmp_path):
        compared.add(published)
        if published.suffix == ".csv":
            for ours, expected in zip(rows(made), rows(published), strict=True):
                assert ours == pytest.approx(expected), published.stem
        elif published.suffix == ".md":
            assert made.read_text() == published.read_text()
    beside = set((ROOT / "results" / folder).iterdir())
    assert {path for path in beside if path.suffix in (".csv", ".md")} <= compared


MEASURED_ELSEWHERE = {
    "README.md": ("Demo: 3 seeds",),
    "docs/appendix/paper-map.md": ("Open", "The source"),
}
"""Heads of tables with figures of benchmarks and counts, whose sources their pages name."""


def test_every_table_of_scores_in_the_docs_is_made_from_the_archives(tmp_path):
    """A table with four decimal fractions or more is made by `make tables`, or listed above."""
    for page, text in pages.pages(tmp_path).items():
        assert text == (ROOT / page).read_text(encoding="utf-8"), f"{page}: run make tables"
    made = {(table.page, row(table.make(tmp_path)[0])) for table in pages.PAGE_TABLES}
    for file in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        page = file.relative_to(ROOT).as_posix()
        if page.startswith("docs/reference/"):  # defaults and facts
            continue
        for head, body in tables_in(file.read_text(encoding="utf-8")):
            measured = re.findall(r"(?<![\w.`/=-])[+−]?\d+\.\d+(?![\w.`])", body)
            listed = any(known in head for known in MEASURED_ELSEWHERE.get(page, ()))
            assert len(measured) < 4 or listed or (page, head) in made, f"{page}: {head}"


def tables_in(text: str) -> Iterator[tuple[str, str]]:
    """The first line and the others of each table in Markdown."""
    for block in re.findall(r"(?:^[ ]*\|.*\n?)+", text, re.MULTILINE):
        head, *body = (line.strip() for line in block.splitlines())
        yield head, "\n".join(body)


def test_sentences_with_scores_say_what_the_tables_say():
    """README and the page on the paper, as they would be written from the tables."""
    accuracy = pages.published("sources/accuracy").set_index(["quantity", "data_set", "row"])
    mnist = accuracy.loc["test accuracy (%)"].loc["MNIST"]
    claims = pages.published("sources/claims").set_index(["claim", "data_set"])["difference"]
    claim = "Attention improves on equal weights that tolerate partial work"
    added = [number(claims[claim, one], sign=True) for one in ("Synthetic", "MNIST", "FEMNIST")]
    ours, paper = (number(mnist.loc["FedProto", side]) for side in ("ours", "paper"))
    readme, page = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", pages.EVIDENCE)
    )
    assert f"FedProto reaches {ours} % where the paper has {paper} %" in readme
    assert (
        f"{added[0]} points on synthetic data, {added[1]} on MNIST, {added[2]} on FEMNIST" in readme
    )
    assert f"FedProto reaches {ours} % where the paper has {paper} %" in page
    assert f"{added[0]} points on synthetic data, {added[1]} and {added[2]} on MNIST" in page
    ablation = pages.published("sources/ablation")
    means = ablation[
        (ablation["quantity"].str.contains("mean")) & (ablation["data_set"] == "MNIST")
    ]
    assert f"within {means['difference'].abs().mean():.1f} points on average" in page
    rho = pages.published("sources/margins-correlation").set_index("row").loc["ours"]
    assert f"ρ = {rho['rho']:.2f}, {rho['points']:.0f} points" in page


def test_sentences_with_measurements_say_what_was_measured():
    """Figures in prose outside of tables, as they would be written from the benchmarks' files."""
    for said in (speeds_in_words(), attacks_in_words(), studies_in_words()):
        for page, sentences in said.items():
            text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
            missing = [sentence for sentence in sentences if sentence not in text]
            assert missing == [], page


def speeds_in_words() -> dict[str, list[str]]:
    """The page on performance."""
    peers = measured("cpu-peers")["cnn"]["rows"]
    apart = max(one["weights_differ_by"]["first"] for one in peers)
    steps = {
        (one["model"], one["what"], one["tf32"], one["models"]): one["us_per_model_step"]
        for one in measured("gpu-steps")["steps"]["rows"]
        if "models" in one
    }
    bound = next(
        one["us_per_model_step"]
        for one in measured("gpu-steps")["steps"]["rows"]
        if (one["model"], one["what"]) == ("cnn", "bound by weights")
    )
    mlp = {
        tf32: steps["mlp", "stacked, compiled", tf32, 120] / steps["mlp", "stacked", tf32, 120]
        for tf32 in (True, False)
    }
    both = [measured("gpu-steps-compared")[when]["steps"]["rows"] for when in ("before", "after")]
    dearer = [
        100 * (after["us_per_model_step"] / before["us_per_model_step"] - 1)
        for before, after in zip(*both, strict=True)
        if before["what"] == "stacked, compiled"
    ]
    compiled = [
        one["first_round_seconds"]
        for one in measured("gpu-rounds")["rounds"]["rows"]
        if one.get("first_round_seconds", 0) > 3
    ]
    epyc = {one["name"]: f"{one['ratio']:.2f}" for one in measured("cpu-peers-epyc")["cnn"]["rows"]}
    variants = measured("gpu-variants")["variants"][0]["us_per_model_step"]
    runs = dict(measured("gpu-growth")["growth"]["runs"])
    share = "share of the plain loop, captured"
    voc = measured("segmentation-speed")["measured"]["bfloat16, channels last, captured"]
    sent = measured("flower")["bytes per client and round"]
    payload = sent["of these prototypes, counts and margins"].split("(")[1]
    many = measured("many-clients")
    million = many["build"]["1000000"]
    speed = voc["images per second"]
    segments = f"{speed['captured engine']:,.0f} images a second where a plain loop has"
    (sweep,) = (one for one in benchmarked.sweeps(ROOT) if one[0].startswith("MNIST"))
    assert sweep[0] == "MNIST, 1,000 clients: 15 runs of 220 rounds"
    return {
        "README.md": [f"fifteen runs of 220 rounds with 1,000 clients take {sweep[1]} seconds"],
        pages.PERFORMANCE: [
            f"differ by at most {apart:.1e}".replace("e-0", "e-"),
            f"median of {len(peers[0]['seconds'])} interleaved rounds",
            f"weights alone would take {bound:.1f} µs",
            f"{min(dearer):.0f} to {max(dearer):.0f} % per step",
            f"the plain loop takes {epyc['loop, plain']} times as long as ours,"
            f" {epyc['loop, channels-last']} with channels last, pfl-research"
            f" {epyc['pfl-research']}, Flower {epyc['Flower, as its tutorial']} and"
            f" {epyc['Flower, leanest']}",
            f"take {epyc['ours, processes:backpropagation']} times as long with automatic"
            f" differentiation, {epyc['ours, processes:spectra']} times without the convolution",
            f"once has won back {100 - 100 * variants['wide'] / variants['now']:.0f} %",
            f"saves {100 - 100 * mlp[True]:.0f} % in tf32",
            f"costs {100 * mlp[False] - 100:.0f} % in float32",
            f"compiles for {min(compiled):.0f} to {max(compiled):.0f} s",
            f"twelve runs took {runs[12] / runs[1]:.1f} times as long as one",
            f"reaches {100 * voc[share]['captured engine']:.0f} % of the images per second",
            f"sends {int(sent['up'].replace(',', '')) / 1000:.0f} kB a round,"
            f" {float(payload.rstrip('%)')):.1f} % of it",
            f"{million['processor seconds']:.1f} s of processor time"
            f" and {million['peak memory of the process, GB']:.1f} GB",
            f"{many['ratio to the first']['1000000']:.2f} times as long as one of 100",
        ],
        pages.SEGMENTATION: [f"{segments} {speed['plain loop']:.0f}"],
    }


ABOVE = "clients above twice the median, per cent"


def attacks_in_words() -> dict[str, list[str]]:
    """The pages on hostile clients, beside the table of attacks."""
    about = measured("takeover")
    table = {line[0]: line for line in benchmarked.attacks(ROOT)[1:]}

    def mean_of(title: str, column: int) -> str:
        (found,) = (line for name, line in table.items() if name.startswith(f"{title} ("))
        return found[column].split(" ")[0].lstrip("−")

    digits, synthetic = "digits, Steady", "synthetic, Steady"
    pairs = [
        name
        for name in table
        if name.startswith("digits, two") and ", Steady" in name and "by size" not in name
    ]
    (drawn,) = (line for name, line in table.items() if "by size" in name)
    cost, beyond_absence = (drawn[place].split(" ")[0].lstrip("−") for place in (4, 5))
    honest = measured("defence")["honest"]
    whole = [counts for name, counts in honest.items() if "," not in name]
    rejected = sum(one[f"rejected for {why}"] for one in whole for why in ("length", "statistics"))
    skewed = honest["synthetic, schedule.rounds=10"]
    beyond = sorted(float(table[name][5].split(" ")[0].lstrip("−")) for name in pairs)
    against = max(float(table[name][4].split(" ")[0].lstrip("−")) for name in pairs)
    rows = about["accuracy"]["synthetic"]["Steady"]
    scores = {name: mean(rows[name]["clip"].values()) for name in ("x -1", "10M samples, x -1")}
    added = scores["x -1"] - scores["10M samples, x -1"]
    way = {
        task: [f"{found[name]['against the others, per cent']:.0f}" for name in found]
        for task, found in about["agreement"].items()
    }
    large = []
    for name in ("digits", "synthetic"):
        sizes = next(iter(read_recipe(name).values())).data.load(Path()).train_sizes
        large.append(f"{100 * np.mean(sizes > 2 * np.median(sizes)):.0f} % of {name}")
    earlier = about["earlier"]["accuracy"]["digits"]
    flipped = {
        name: [mean(rows[attack]["clip"].values()) for attack in ("none", "x -1")]
        for name, rows in earlier.items()
    }
    bounds = f"{mean_of(digits, 5)} on digits, {mean_of(synthetic, 5)} on synthetic data"
    sizes = next(iter(read_recipe("synthetic").values())).data.load(Path()).train_sizes
    columns = ("runs", "updates", "rejected for length", "rejected for statistics")
    columns = (*columns, "clipped", "samples capped")
    rows_of_honest = [
        " | ".join([f"| `{name}`", *(f"{one[column]:,}" for column in columns)]) + " |"
        for name, one in honest.items()
    ]
    assert not any(one["rejected otherwise"] for one in honest.values())
    assert all(
        one["rejected for length"] + one["rejected for statistics"] < one["updates"] / 100
        for one in honest.values()
        if one is not skewed
    )
    return {
        pages.HOSTILE: [
            *rows_of_honest,
            f"costs {cost} points, {beyond_absence} beyond absence",
            f"{sizes.max() / np.median(sizes):.0f} times the median number of samples",
            f"{bounds}, {beyond[0]:.1f} to {beyond[-1]:.1f} where clients hold two classes",
            f"against all clients honest, too ({mean_of(digits, 4)})",
            f"On synthetic data invented samples add at most {added:.1f} points",
            f"{mean_of(synthetic, 4)} points on synthetic data, up to {against:.1f} where",
            f"{way['digits'][0]} % (FedAvg) and {way['digits'][1]} % (FedProto)",
            f"{way['synthetic'][0]} and {way['synthetic'][1]} % on synthetic data",
            "({:.1f} to {:.1f} on digits)".format(*flipped["scaffold"]),
            f"FedDyn loses {flipped['feddyn'][0] - flipped['feddyn'][1]:.1f} points",
        ],
        "docs/explanation/threat-model.md": [
            f"{mean_of(digits, 5)} on digits (`demo`), {mean_of(synthetic, 5)} on synthetic data",
            f"it is {mean_of(digits, 4)}, {mean_of(synthetic, 4)}, and up to {against:.1f} where",
            f"honest clients above twice the median: {large[0]}, {large[1]},"
            f" {honest['mnist, schedule.rounds=1'][ABOVE]:.0f} % of MNIST",
            f"rejects {rejected} of {sum(one['updates'] for one in whole):,} updates of"
            f" six whole recipes ({sum(one['runs'] for one in whole)} runs)",
            f"rejects {skewed['rejected for length']} of {skewed['updates']:,}",
            f"by {float(mean_of(synthetic, 4)) - 10:.1f} points",
            f"invented samples cost {cost} points",
        ],
    }


def studies_in_words() -> dict[str, list[str]]:
    """README, the page on what wins, and the appendices on levels and on heads."""
    pairs = (
        pages.published("serve/serve-pairs")
        .set_index(["data_set", "quantity", "method"])
        .sort_index()
    )
    ends = {one: pairs.loc[one, "final"] for one in ("CIFAR-10, α 0.1", "FEMNIST")}
    cifar, femnist = ends.values()
    lead = -cifar["difference"]
    assert (lead > 0).all()
    assert (femnist["difference"] < 0).all()
    acg = femnist.loc["FedACG"]
    assert max(acg["high"], -acg["low"]) < 0.5
    plain = cifar.loc[["FedACG", "FedAvgM", "FedAvg"]]
    assert plain["corrected_p"].max() < 0.05
    gains = pages.published("serve/serve").set_index(["data_set", "method"])["score"].sort_index()
    gain = {
        name: gains["CIFAR-10, α 0.1", f"{name} + average"] - gains["CIFAR-10, α 0.1", name]
        for name in ("FedACG", "FedAvgM")
    }
    averages = (
        pages.published("serve/serve-averages").set_index(["data_set", "method"]).sort_index()
    )
    chosen = pages.published("serve/serve-grid")
    chosen = (
        chosen[chosen["chosen"]].set_index(["data_set", "method"])["validation_score"].sort_index()
    )
    hundred = averages.loc["CIFAR-100, α 0.1", "FedACG"]["validation_score"].max()
    again = averages.loc["CIFAR-100, α 0.1", "Steady"]
    again = again[~again["average"].str.contains("head")]["validation_score"].max()
    ten = chosen["CIFAR-10, α 0.1"]
    oscillation = pages.published("serve/serve-oscillation").groupby("model")["mean_change"].mean()
    pairs = pages.published("guidance/guidance-pairs")
    pairs = pairs[(pairs["minus"] == "ProtoHead") & (pairs["pairs"] == 5)]
    over_rounds = pairs[pairs["quantity"] == "mean over rounds"]
    assert (over_rounds["difference"] < 0).all()
    assert over_rounds["corrected_p"].max() < 0.002
    fading = pages.published("guidance/guidance-forgetting").set_index(["method", "holders"])
    lost = fading.loc["Fairness + toleration", 0]
    celeba = pages.published("guidance/guidance-celeba").set_index("method")["score"]
    harmed = celeba.drop("Fairness + toleration")
    attention = pages.published("sources/attention").set_index("method")["std"]
    spread = {name: attention[name].agg(["min", "max"]) for name in ("FedProto", "FedAvg")}
    heads = measured("heads")
    return {
        pages.WINS: [
            f"the lead is {lead['FedACG']:.1f} points, {lead['FedACG + average']:.1f} if FedACG",
            f"is ahead by {hundred - chosen['CIFAR-100, α 0.1', 'Steady']:.1f}",
            f"scored {ten['FedDyn']:.1f}, {ten['FedAdam']:.1f} and {ten['FedNTD']:.1f} on",
            f"{ten['FedACG'] - ten['FedNTD']:.1f} points and more below FedACG",
            f"FedACG by {gain['FedACG']:.1f} points, FedAvgM by {gain['FedAvgM']:.1f}",
            f"FedAdam by {averages.loc['CIFAR-10, α 0.1', 'FedAdam']['gain'].max():.1f}",
            f"changes by {oscillation['newest model']:.1f} points on average",
            f"the averaged model by {oscillation['average']:.1f}",
            f"up to {chosen['CIFAR-100, α 0.1', 'Steady'] - again:.1f} points apart",
        ],
        "README.md": [
            f"ends {lead['FedAvg']:.1f} points above FedAvg and {lead['FedACG']:.1f} above",
        ],
        pages.EARLIER: [
            "(corrected p < 0.002)",
            f"loses {-lost['change']:.1f} ± {lost['std_error']:.1f} points in that round",
            f"Equal weights reach {celeba['Fairness + toleration']:.1f} %",
            f"{harmed.min():.1f} to {harmed.max():.1f} %",
        ],
        pages.APPENDIX: [
            "a standard deviation of {:.3f} to {:.3f}".format(*spread["FedProto"]),
            "With FedAvg it is {:.2f} to {:.2f}".format(*spread["FedAvg"]),
        ],
        "docs/appendix/field.md": [
            f"keeps {heads['directions'][1]} of {heads['directions'][0]:,} directions",
            f"scores {heads['accuracy']['pseudo-inverse in float32']:.1f},"
            f" where the exact solution scores {heads['accuracy']['exact'] + 1e-9:.1f}",
        ],
    }
