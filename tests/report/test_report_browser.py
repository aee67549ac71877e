"""The report page as a person meets it: in a real browser, by pointer, by keyboard, on a phone."""

from __future__ import annotations

import csv
import io
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from browser import axe_violations, console, open_browser, set_size
from fedproto.cli import main
from fedproto.report.results import find_runs
from fedproto.store import RunStore
from report_runs import NASTY, append_records, make_record, write_run, write_sweep


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def browser(tmp_path_factory, downloads):
    with open_browser(tmp_path_factory.mktemp("profile")) as session:
        session.execute_cdp_cmd(
            "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
        )
        yield session


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_sweep(folder)
    assert main(["report", str(folder), "--title", NASTY, "--target", "0.6"]) == 0
    return (folder / "report.html").as_uri()


@pytest.fixture
def page(browser, address):
    set_size(browser, 1200, 900)
    browser.get("about:blank")
    browser.get(address)
    yield browser
    assert console(browser) == []


def folder_of(address: str) -> Path:
    return Path(unquote(urlparse(address).path)).parent


def settle(page) -> None:
    """Waits until what is not in view is drawn too."""
    while page.execute_script("return page.pending.length > 0"):
        time.sleep(0.01)


def picture(page, where="curves-panels") -> str:
    """What a section's charts show, but for running numbers."""
    settle(page)
    return page.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} svg`)].map((svg) =>"
        " svg.outerHTML.replaceAll(/(clip|scale)-[0-9]+/g, '')).join()",
        where,
    )


def click(page, selector: str) -> None:
    page.execute_script("document.querySelector(arguments[0]).click()", selector)


def choose(page, select: str, value: str) -> None:
    page.execute_script(
        "const select = document.getElementById(arguments[0]); select.value = arguments[1];"
        "select.dispatchEvent(new Event('change'))",
        select,
        value,
    )


def press(page, key: str) -> None:
    page.switch_to.active_element.send_keys(key)


def tab_to(page, wanted: str) -> None:
    """Presses Tab until the element has the focus."""
    from selenium.webdriver.common.keys import Keys

    page.execute_script("document.activeElement.blur()")
    for _ in range(90):
        at_body = page.execute_script("return document.activeElement === document.body")
        page.find_element("css selector", "body" if at_body else ":focus").send_keys(Keys.TAB)
        if page.execute_script("return document.activeElement.matches(arguments[0])", wanted):
            return
    pytest.fail(f"Tab does not reach {wanted}")


def texts(page, selector: str) -> list[str]:
    return page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText.trim())",
        selector,
    )


def downloaded(page, downloads: Path, section: str) -> str:
    file = downloads / f"{section}.csv"
    file.unlink(missing_ok=True)
    click(page, f"#{section} .save")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if file.exists() and file.stat().st_size:
            return file.read_text()
        time.sleep(0.05)
    pytest.fail(f"{section} gave no table")


def test_every_section_is_there_and_every_chart_is_drawn(page):
    sections = page.execute_script(
        "return [...document.querySelectorAll('section')].filter((one) => !one.hidden)"
        ".map((one) => one.id)"
    )
    assert sections == [
        "answer", "curves", "clients", "classes", "cost", "attention", "embedding",
        "maps", "configuration",
    ]  # fmt: skip
    # A line per method, and thin ones for the two seeds of the first.
    assert len(page.find_elements("css selector", "#curves-panels path.curve")) == 4
    assert len(page.find_elements("css selector", "#cost-panels path.dot")) == 2
    assert len(page.find_elements("css selector", "#clients-panels path.curve")) == 2
    assert len(page.find_elements("css selector", "#attention-panels path.curve")) == 2
    assert texts(page, "#classes-table thead th") == ["run", "cat", "dog", "bird"]
    assert len(page.find_elements("css selector", "#embedding-chart svg path")) == 150 + 3 + 3
    prototypes = page.find_elements("css selector", "#embedding-chart svg path.prototype title")
    assert [one.get_attribute("textContent") for one in prototypes] == [
        f"prototype of {name}" for name in ("cat", "dog", "bird")
    ]
    assert page.execute_script(
        "return document.getElementById('map-keys').innerText.includes('entropy') &&"
        " document.images.length === 4 && [...document.images].every((i) => i.naturalWidth)"
    )
    named = "return [...document.querySelectorAll('svg.plot')].every((one) => one.textContent)"
    assert page.execute_script(named)


def test_labels_are_shown_as_they_are_written(page):
    assert page.title == NASTY
    assert NASTY in page.find_element("id", "runs").text
    assert page.find_elements("css selector", "img[src='x']") == []


def test_a_chip_takes_a_method_out_of_charts_and_tables_and_brings_it_back(page):
    before, rows = picture(page), texts(page, "#answer-table tbody th")
    assert len(rows) == 2
    click(page, ".chip")
    assert picture(page) != before
    assert texts(page, "#answer-table tbody th") == rows[:1]
    assert page.find_element("css selector", ".chip").get_attribute("aria-pressed") == "false"
    assert "1 of 2 groups" in page.find_element("id", "count").text
    click(page, ".chip")
    assert picture(page) == before


def test_the_first_screen_answers(page):
    said = page.find_element("id", "sentence").text
    assert said.startswith(f"{NASTY} scores highest: ")
    assert "points against Averaging" in said
    assert "one seed, too few for a test" in said
    assert "MB" in said
    assert "mean client" in said
    assert (
        "Baseline: Averaging, as the method with most pairs."
        in page.find_element("id", "answer").text
    )
    bottom = page.execute_script(
        "return document.querySelector('#answer-table').getBoundingClientRect().bottom"
    )
    assert bottom < 900, "sentence and table are on the first screen"
    assert len(page.find_elements("css selector", "#answer-table svg.interval")) == 1
    (zero,) = page.find_elements("css selector", "#answer-table svg.interval line")
    assert zero.get_attribute("x1") == zero.get_attribute("x2"), "no interval without a test"


def test_lines_are_named_at_their_ends_and_chance_is_drawn(browser, tmp_path):
    for chance, width in ((False, 1200), (True, 390)):
        set_size(browser, width, 900)
        write_run(tmp_path / str(chance) / "one", label="One")
        if chance:
            RunStore.open(tmp_path / "True" / "one").describe(data={"num_classes": 4})
        assert main(["report", str(tmp_path / str(chance))]) == 0
        browser.get((tmp_path / str(chance) / "report.html").as_uri())
        words = browser.execute_script(
            "return [...document.querySelectorAll('#curves-panels svg text')]"
            ".map((one) => one.textContent)"
        )
        assert "One" in words
        assert ("chance" in words) == chance
    assert console(browser) == []


def test_many_methods_leave_most_of_them_grey(browser, tmp_path):
    for number in range(9):
        write_run(tmp_path / str(number), label=f"Method {number}", level=0.5 + number / 20)
    set_size(browser, 1200, 900)
    assert main(["report", str(tmp_path)]) == 0
    browser.get((tmp_path / "report.html").as_uri())
    lines = browser.execute_script(
        "return curveLines(page.conditions[0], 'accuracy', 0, false, 'round')"
        ".map((line) => [line.label, Boolean(line.named)])"
    )
    # The baseline, here the first of those with as many pairs, and the best five.
    best = {"Method 0", *(f"Method {number}" for number in range(4, 9))}
    assert {label for label, named in lines if named} == best
    assert console(browser) == []


def test_a_table_without_rows_in_view_says_so(browser, tmp_path):
    write_sweep(tmp_path)
    set_size(browser, 1200, 900)
    assert main(["report", str(tmp_path)]) == 0
    browser.get((tmp_path / "report.html").as_uri())
    assert len(texts(browser, "#classes-table tr")) > 1
    browser.find_element("id", "find").send_keys("nothing is called so")
    settle(browser)
    assert texts(browser, "#classes-table tr") == []
    assert "None of the runs in view" in browser.find_element("css selector", "#classes").text
    for section in ("curves", "clients", "cost", "attention"):
        said = browser.execute_script(
            "return getComputedStyle(document.querySelector(arguments[0]), '::after').content",
            f"#{section}-panels",
        )
        assert said == '"No run in view has this."', section
    assert console(browser) == []


def test_unfinished_runs_are_compared_at_the_round_they_share(browser, tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"avg{seed}", rounds=12, planned=25, label="FedAvg", seed=seed)
        write_run(tmp_path / f"new{seed}", rounds=6, planned=25, label="New", seed=seed, level=0.9)
    assert main(["report", str(tmp_path)]) == 0
    set_size(browser, 1200, 900)
    browser.get((tmp_path / "report.html").as_uri())
    assert texts(browser, "#answer-table tbody th")[0] == "New"
    said = browser.find_element("id", "sentence").text
    assert "scores highest so far" in said
    assert "after 6 of 25 rounds" in said
    assert "both at round 6" in said
    assert "@ 6" in texts(browser, ".difference .word")[0]
    assert console(browser) == []


def test_the_search_box_filters_charts_and_tables(page):
    page.find_element("id", "find").send_keys("averag")
    settle(page)
    assert texts(page, "#answer-table tbody th") == ["Averaging baseline"]
    assert len(page.find_elements("css selector", "#curves-panels path.curve")) == 3
    page.find_element("id", "find").send_keys(" nothing like it")
    settle(page)
    assert texts(page, "#answer-table tbody th") == []


def test_the_slider_smooths_the_curves(page):
    from selenium.webdriver.common.keys import Keys

    before, text = picture(page), page.find_element("id", "smoothing-text").text
    page.find_element("id", "smoothing").send_keys(Keys.END)
    assert picture(page) != before
    assert page.find_element("id", "smoothing-text").text != text
    page.find_element("id", "smoothing").send_keys(Keys.HOME)
    settle(page)
    assert page.find_element("id", "smoothing-text").text == "off"


def test_metric_axis_scale_and_seeds_change_the_chart(page):
    seen = [picture(page)]
    choose(page, "curve-metric", "loss")
    seen.append(picture(page))
    click(page, "#log")
    seen.append(picture(page))
    click(page, "#every-seed")
    seen.append(picture(page))
    for axis in ("megabytes", "seconds"):
        choose(page, "x-axis", axis)
        seen.append(picture(page))
        assert axis in seen[-1]
    assert len(set(seen)) == len(seen)


def test_smoothed_values_are_those_of_the_tables(page, address):
    (run,) = find_runs([folder_of(address) / "proto"])
    shown = page.execute_script(
        "return curveLines(page.conditions[0], 'accuracy', page.data.window, false, 'round')"
        ".map((line) => [...line.y])"
    )
    assert shown[3] == pytest.approx(run.smoothed("accuracy")[1].tolist(), abs=1e-6)
    widths = page.execute_script(
        "return [5, 14, 15, 25, 35, 220].map((n) => smoothingWidth(page.data.window, n))"
    )
    from fedproto.report.statistics import window_width

    assert widths == [window_width(rounds) for rounds in (5, 14, 15, 25, 35, 220)]


def test_megabytes_and_seconds_are_what_was_spent(page, address):
    (run,) = find_runs([folder_of(address) / "proto"])
    spent = page.execute_script(
        "return ['megabytes', 'seconds'].map((axis) =>"
        " curveLines(page.conditions[0], 'accuracy', 0, false, axis)[3].x)"
    )
    rounds = range(1, 31)
    assert spent[0] == pytest.approx([0.002 * number for number in rounds])
    assert spent[1] == pytest.approx([0.25 * number for number in rounds])
    assert len(run.records) == 30


def test_the_pointer_reads_values(page):
    from selenium.webdriver import ActionChains

    def point_at(selector):
        element = page.find_element("css selector", selector)
        page.execute_script(
            "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", element
        )
        settle(page)
        ActionChains(page).move_to_element(page.find_element("css selector", selector)).perform()

    point_at("#curves-panels .body")
    tip = page.find_element("css selector", "#curves-panels .tip").text
    assert tip.startswith("round ")
    assert "Averaging" in tip
    assert "%" in tip


def test_everything_can_be_done_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    before = picture(page)
    tab_to(page, "#find")
    press(page, "averag")
    assert picture(page) != before
    press(page, Keys.BACKSPACE * 6)
    assert picture(page) == before
    tab_to(page, ".chip")
    press(page, Keys.ENTER)
    assert picture(page) != before
    press(page, Keys.SPACE)
    assert picture(page) == before
    tab_to(page, "#base")
    press(page, Keys.ARROW_DOWN)
    assert page.execute_script("return page.state.base") == NASTY
    tab_to(page, "#answer-table button")
    press(page, Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("data-key") == "title"
    tab_to(page, "#smoothing")
    for _ in range(5):
        press(page, Keys.ARROW_RIGHT)
    assert picture(page) != before
    tab_to(page, "#log")
    press(page, Keys.SPACE)
    assert page.execute_script("return page.state.log")
    tab_to(page, "#curves-panels .body")
    press(page, Keys.ARROW_RIGHT)
    said = page.find_element("css selector", "#curves-panels .quiet")
    assert "round 1: " in said.get_attribute("textContent")


def test_methods_are_ranked_and_a_heading_sorts(page):
    heading = "#answer-table [data-key='accuracy']"
    titles = "#answer-table tbody th"
    assert texts(page, titles) == [NASTY, "Averaging baseline"], "the best first"
    click(page, heading)
    settle(page)
    assert texts(page, titles) == [NASTY, "Averaging baseline"]
    click(page, heading)
    settle(page)
    assert texts(page, titles) == ["Averaging baseline", NASTY]
    cell = page.find_element("css selector", "#answer-table th[aria-sort='ascending']")
    assert "accuracy" in cell.text


def test_headline_columns_come_first_and_the_others_on_demand(page):
    few = texts(page, "#answer-table thead th")
    assert "training loss" not in " ".join(few)
    assert any("rounds to 0.6" in head for head in few)
    click(page, "#columns")
    settle(page)
    many = texts(page, "#answer-table thead th")
    assert many[: len(few)] == few
    assert "training loss" in " ".join(many)


def test_personal_models_have_columns_where_a_run_has_them(browser, page, tmp_path, capsys):
    assert not any("personal" in head for head in texts(page, "#answer-table thead th"))
    write_run(tmp_path / "plain", label="Plain")
    write_run(tmp_path / "own", rounds=0, planned=30, label="Own")
    scores = {"personal_accuracy": 0.91, "worst_tenth_personal_accuracy": 0.72}
    records = [make_record(round_, level=0.9) for round_ in range(30)]
    append_records(
        tmp_path / "own", [replace(one, metrics={**one.metrics, **scores}) for one in records]
    )
    assert main(["report", str(tmp_path)]) == 0
    browser.get((tmp_path / "report.html").as_uri())
    heads = texts(browser, "#answer-table thead th")
    own = texts(
        browser, "#answer-table tbody tr:first-child th, #answer-table tbody tr:first-child td"
    )
    shown = dict(zip(heads, own, strict=True))
    assert shown["personal accuracy %"] == "91.0"
    assert shown["worst tenth personal accuracy %"] == "72.0"
    assert "personal models 91.0 %" in texts(browser, "#sentence")[0]
    capsys.readouterr()
    assert main(["compare", str(tmp_path), "--markdown"]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "| personal % | personal worst tenth % |" in head
    assert "| 91.0 | 72.0 |" in next(row for row in rows if row.startswith("| Own"))
    assert "| – | – |" in next(row for row in rows if row.startswith("| Plain"))


def test_the_address_holds_the_view(page, address):
    page.find_element("id", "find").send_keys("a")
    click(page, ".chip[data-method='1']")
    choose(page, "x-axis", "megabytes")
    choose(page, "base", NASTY)
    click(page, "#log")
    click(page, "#answer-table [data-key='accuracy']")
    click(page, "#theme")
    before, shared = picture(page), page.current_url
    assert shared.startswith(address + "#")
    page.get("about:blank")
    page.get(shared)
    assert picture(page) == before
    state = page.execute_script("return {...page.state, hide: [...page.state.hide]}")
    wanted = {"x": "megabytes", "base": NASTY, "log": True, "sort": "accuracy:down", "find": "a"}
    assert {name: state[name] for name in wanted} == wanted
    assert state["hide"] == [NASTY]
    assert page.find_element("id", "find").get_attribute("value") == "a"
    click(page, "#reset")
    assert "hide" not in page.current_url


def test_a_jump_is_not_hidden_by_the_bar(page):
    click(page, "#contents a[href='#curves']")
    assert "#curves" in page.current_url
    bar, title = page.execute_script(
        "return ['runs', 'curves-title'].map((id) => document.getElementById(id)"
        ".getBoundingClientRect()).map((box) => [box.top, box.bottom])"
    )
    assert bar[0] == 0, "the bar stays"
    assert title[0] >= bar[1]


def test_every_table_is_a_csv_file(page, downloads):
    for section in ("answer", "curves", "cost", "attention", "clients"):
        text = downloaded(page, downloads, section)
        rows = list(csv.reader(io.StringIO(text)))
        assert len(rows) > 1, section
        assert {len(row) for row in rows} == {len(rows[0])}, section
    text = downloaded(page, downloads, "answer")
    _, averaging = csv.DictReader(io.StringIO(text))
    assert averaging["method"] == "Averaging"
    score, sent = page.execute_script(
        "return [figureOf([page.data.groups[0]], 'accuracy').mean,"
        " figureOf([page.data.groups[0]], 'bytes up').mean]"
    )
    # The units are those of the heads: per cent and megabytes, not fractions and bytes.
    assert float(averaging["test accuracy %"]) == pytest.approx(100 * score)
    assert float(averaging["MB up"]) == pytest.approx(1e-6 * sent)
    assert float(averaging["MB"]) == pytest.approx(2e-6 * sent)
    assert float(averaging["mean client %"]) > 1
    formulas = page.execute_script("return csvOf([['=1+1', '@x', '-2', -2, 'a']])")
    assert formulas == "'=1+1,'@x,-2,-2,a\n"


def test_the_configuration_shows_only_what_differs_until_asked(page):
    click(page, "#options > summary")
    wait_for(page, "#configuration-table th")
    assert "strategy.name" in texts(page, "#configuration-table thead th")
    assert "train.lr" not in texts(page, "#configuration-table thead th")
    click(page, "#only-differences")
    settle(page)
    assert "train.lr" in texts(page, "#configuration-table thead th")


def wait_for(page, selector: str):
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(page, 20).until(lambda page: page.find_elements("css selector", selector))


@pytest.mark.parametrize(("width", "phone"), [(390, True), (1200, False)])
def test_nothing_sticks_out_at_the_side(page, address, width, phone):
    set_size(page, width, 844, phone=phone)
    page.get("about:blank")
    page.get(address)
    assert page.execute_script("return innerWidth") == width
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_dark_is_dark_and_paper_is_light(page):
    def background() -> str:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    light, before = background(), picture(page)
    for _ in range(2):
        click(page, "#theme")
    assert background() != light
    assert picture(page) != before
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert background() == light
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert background() != light


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing(page, address, theme, width):
    set_size(page, width, 844, phone=width == 390)
    page.get("about:blank")
    page.get(f"{address}#?theme={theme}&columns=1&only=0")
    page.execute_script("document.querySelectorAll('details').forEach((one) => {one.open = true})")
    wait_for(page, "#configuration-table th")
    assert axe_violations(page) == []


def test_nothing_is_fetched(page):
    assert (
        page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        == []
    )


def test_sections_without_anything_take_a_line_that_says_how_to_fill_them(browser, tmp_path):
    write_run(tmp_path / "one", rounds=3, label="One")
    assert main(["report", str(tmp_path)]) == 0
    browser.get((tmp_path / "report.html").as_uri())
    lines = {
        line.get_attribute("data-section"): line.text
        for line in browser.find_elements("css selector", "#absent li")
    }
    assert set(lines) == {
        "clients", "classes", "embedding", "maps",
    }  # fmt: skip
    assert "fedproto analyse" in lines["embedding"]
    assert not browser.find_element("id", "embedding").is_displayed()
    assert console(browser) == []
