"""The page about real runs, those of results/runs: its verdicts, its filters, its size."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from archives import unpacked
from browser import axe_violations, console, open_browser, set_size
from fedproto.cli import main
from fedproto.report.arrangement import arrange
from fedproto.report.results import find_runs

stats = pytest.importorskip("scipy.stats")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = unpacked(tmp_path_factory.mktemp("synthetic"), "synthetic")
    assert main(["report", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = unpacked(tmp_path_factory.mktemp("everything"))
    assert main(["report", str(folder)]) == 0
    return folder


def visit(browser, folder: Path, view: str = "") -> None:
    set_size(browser, 1440, 900)
    browser.get("about:blank")
    browser.get((folder / "report.html").as_uri() + view)


def independent(folder: Path, metric: str, base: str) -> dict[tuple[str, str], tuple]:
    """From the files alone, by method and δ: number of pairs, mean, interval and p-value."""
    finals: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for description in folder.rglob("run.json"):
        config = json.loads(description.read_text())["config"]
        if config["strategy"]["name"] == "centralized":
            continue
        lines = (description.parent / "rounds.jsonl").read_text().splitlines()
        taken = [json.loads(line)["metrics"].get(metric) for line in lines]
        span = config["schedule"]["rounds"] // 10
        values = [value for value in taken[-span:] if value is not None]
        key = config["label"], f"δ {config['schedule']['delta']}"
        finals[key][config["seed"]] = float(np.mean(values))
    found = {}
    for (label, delta), ours in finals.items():
        if label != base:
            theirs = finals[base, delta]
            seeds = sorted(ours.keys() & theirs.keys())
            test = stats.ttest_rel([ours[seed] for seed in seeds], [theirs[s] for s in seeds])
            interval = test.confidence_interval(0.95)
            mean = float(np.mean([ours[seed] - theirs[seed] for seed in seeds]))
            ends = interval.low, interval.high, float(test.pvalue)
            found[label, delta] = (len(seeds), mean, *ends)
    return found


def shown_verdicts(browser) -> dict[tuple[str, str], dict]:
    rows = browser.execute_script(
        "return blocksOf().filter((block) => !block.overall).flatMap((block) => block.rows.filter("
        "(row) => row.found).map((row) => [page.data.methods[row.method].title, block.title,"
        " row.found]))"
    )
    return {(method, title): found for method, title, found in rows}


@pytest.mark.parametrize(
    ("metric", "base"), [("accuracy", "Fairness + toleration"), ("loss", "FedAvg")]
)
def test_verdicts_are_those_of_an_independent_computation(browser, synthetic, metric, base):
    visit(browser, synthetic, f"#answer?metric={metric}&base={base.replace('+', '%2B')}")
    shown, expected = shown_verdicts(browser), independent(synthetic, metric, base)
    assert shown.keys() == expected.keys()
    assert len(shown) == 16
    good = -1 if metric == "loss" else 1
    order = sorted(expected, key=lambda key: expected[key][4])
    steps = [(len(order) - rank) * expected[key][4] for rank, key in enumerate(order)]
    corrected = dict(zip(order, np.minimum(1, np.maximum.accumulate(steps)), strict=True))
    for key, (pairs, mean, low, high, _) in expected.items():
        found = shown[key]
        assert found["pairs"] == pairs == 3
        numbers = [found["mean"], found["low"], found["high"]]
        assert numbers == pytest.approx([mean, low, high], rel=1e-6, abs=1e-9)
        assert found["corrected"] == pytest.approx(corrected[key], rel=1e-6, abs=1e-9)
        assert found["of"] == 16
        inside = metric == "accuracy" and max(-low, high) <= 0.01
        word = "better" if good * mean > 0 else "worse"
        if corrected[key] >= 0.05:
            word = "equivalent" if inside else "unclear"
        assert found["word"] == word
    assert len({found["word"] for found in shown.values()}) > 1
    assert console(browser) == []


def test_the_command_says_what_the_page_says(browser, synthetic, capsys):
    visit(browser, synthetic)
    shown = shown_verdicts(browser)
    capsys.readouterr()
    assert main(["compare", str(synthetic), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    said = {(row["method"], row["condition"]): row["against"] for row in rows if row["against"]}
    assert said.keys() == shown.keys()
    for key, against in said.items():
        assert against["verdict"] == shown[key]["word"]
        assert against["difference"]["mean"] == pytest.approx(shown[key]["mean"])
        assert against["corrected_p"] == pytest.approx(shown[key]["corrected"])


def test_conditions_of_one_seed_are_averaged_before_they_are_compared(browser, synthetic):
    visit(browser, synthetic, "#answer?base=FedAvg")
    rows = browser.execute_script(
        "return blocksOf()[0].rows.filter((row) => row.found)"
        ".map((row) => [page.data.methods[row.method].title, row.found, row.groups.length])"
    )
    expected = independent(synthetic, "accuracy", "FedAvg")
    for method, found, conditions in rows:
        assert (found["pairs"], conditions) == (3, 3), "three seeds, not nine runs"
        means = [expected[method, f"δ {delta}"][1] for delta in (0.0, 0.5, 0.8)]
        assert found["mean"] == pytest.approx(np.mean(means), abs=1e-6)
    assert len(rows) >= 4


def test_a_facet_filters_charts_and_tables(browser, synthetic):
    def panels(section: str) -> list[str]:
        return browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} figcaption`)]"
            ".map((one) => one.textContent)",
            section,
        )

    visit(browser, synthetic, "#answer?all=1")
    assert panels("curves-panels") == ["δ 0.0", "δ 0.5", "δ 0.8"]
    browser.execute_script("document.querySelector(\".chip[data-value='δ: 0.5']\").click()")
    browser.execute_script("while (page.pending.length) drawPending()")
    assert panels("curves-panels") == ["δ 0.0", "δ 0.8"]
    assert panels("cost-panels") == ["δ 0.0", "δ 0.8"]
    titles = browser.find_element("id", "answer-table").text
    assert "δ 0.5" not in titles
    assert "δ 0.8" in titles
    assert "without=" in browser.current_url
    assert console(browser) == []


def test_a_method_has_one_colour_everywhere(browser, synthetic):
    visit(browser, synthetic)
    colors = browser.execute_script(
        "return page.conditions.map((condition) => new Set(curveLines(condition, 'accuracy', 0,"
        " false, 'round').map((line) => line.method)).size)"
    )
    assert colors == [6, 10, 6]
    from fedproto.report.style import line_styles
    from paper.panels import line_of

    for method in browser.execute_script("return page.data.methods"):
        if method["title"] in ("FedAvg", "FedProto", "FedProx", "FedAtt", "Centralized"):
            assert method["color"] == line_of(method["title"])["color"]
            assert method["color"] == line_styles([method["title"]])[0].color


def test_axe_finds_nothing_wrong_with_real_runs(browser, synthetic):
    visit(browser, synthetic)
    assert axe_violations(browser) == []


def test_all_runs_together_make_a_page_of_bearable_height(browser, everything):
    visit(browser, everything)
    stored = find_runs([everything])
    assert len(stored) == len(list(everything.rglob("run.json"))) > 200
    # Where a seed is stored twice, the longest run is shown, and that is said.
    found = arrange(stored)
    number = sum(len(group.runs) for group in found.groups)
    assert 0 < len(found.notices) <= len(stored) - number
    assert f"{number} runs" in browser.find_element("id", "subtitle").text
    said = f"{len(found.notices)} seeds are stored more than once"
    assert said in browser.find_element("id", "notices").text
    height, width = browser.execute_script(
        "const root = document.documentElement; return [root.scrollHeight, root.scrollWidth]"
    )
    assert height < 12_000
    assert width <= 1440
    unreadable = browser.execute_script(
        "return [...document.querySelectorAll('th, td')].filter((cell) => cell.textContent"
        ".includes('NaN') || cell.textContent.includes('undefined')).length"
    )
    assert unreadable == 0
    assert console(browser) == []


def test_the_mean_over_conditions_answers_and_the_conditions_follow_on_demand(browser, synthetic):
    def blocks() -> list[str]:
        return browser.execute_script(
            "return [...document.querySelectorAll('#answer-table tr.block')]"
            ".map((one) => one.textContent)"
        )

    def note() -> str:
        return browser.find_element("css selector", "#answer .hint").text

    visit(browser, synthetic)
    assert blocks() == ["mean over 3 conditions"]
    assert re.search(r"corrected for \d+ comparisons \(Holm\)", note()), "of those in view alone"
    assert "within ± 1 point;" in note()
    browser.find_element("id", "more-blocks").click()
    assert blocks() == ["mean over 3 conditions", "δ 0.0", "δ 0.5", "δ 0.8"]
    assert re.search(r"corrected for \d+ and \d+ comparisons", note())
    browser.find_element("id", "more-blocks").click()
    assert blocks() == ["mean over 3 conditions"]


def test_what_tests_on_training_samples_is_said_beside_its_scores_alone(browser, everything):
    said = "some of the test samples of femnist are in some client's training part"
    visit(browser, everything, "#answer?data=synthetic")
    assert said not in browser.find_element("id", "notices").text
    visit(browser, everything, "#answer?data=femnist")
    assert said in browser.find_element("id", "notices").text


def test_all_runs_together_open_on_one_data_set_and_an_answer(browser, everything):
    visit(browser, everything)
    families = browser.execute_script(
        "return [...new Set(page.conditions.map((condition) => condition.family))]"
    )
    assert len(families) == 1
    assert " scores highest on " in browser.find_element("id", "sentence").text
    assert ". Verdict: " in browser.find_element("id", "sentence").text
    assert not browser.find_element("id", "reset").is_displayed(), "the reader has hidden nothing"
    spent = browser.execute_script(
        "return performance.getEntriesByType('navigation')[0].loadEventEnd"
    )
    assert spent < 2000
    visit(browser, everything, "#answer?data=all")
    assert browser.execute_script(
        "return new Set(page.conditions.map((condition) => condition.family)).size > 4"
    )
    assert console(browser) == []


def test_all_runs_together_fit_a_phone(browser, everything):
    set_size(browser, 390, 844, phone=True)
    browser.get("about:blank")
    browser.get((everything / "report.html").as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert console(browser) == []
