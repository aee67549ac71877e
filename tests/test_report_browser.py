"""The report page as a person meets it: in a real browser, by pointer, by keyboard, on a phone."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from browser import console, open_browser, set_size
from fedproto.cli import main
from fedproto.report.results import find_runs
from fedproto.report.summary import summarize
from report_runs import NASTY, append_records, make_record, served, write_run, write_sweep

CHARTS = (
    "curves-chart",
    "attention-chart",
    "clients-chart",
    "calibration-chart",
    "embedding-chart",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with open_browser(tmp_path_factory.mktemp("profile")) as session:
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
    browser.get(address)
    yield browser
    assert console(browser) == []


def folder_of(address: str) -> Path:
    return Path(unquote(urlparse(address).path)).parent


def picture(page, chart="curves-chart") -> str:
    """What a chart's canvas shows."""
    return page.execute_script(
        "return document.querySelector(`#${arguments[0]} canvas`).toDataURL()", chart
    )


def press(page, key: str) -> None:
    page.switch_to.active_element.send_keys(key)


def tab_to(page, wanted: str) -> None:
    """Presses Tab until the element has the focus."""
    from selenium.webdriver.common.keys import Keys

    page.execute_script("document.activeElement.blur()")
    for _ in range(60):
        page.find_element("css selector", "body" if _at_body(page) else ":focus").send_keys(
            Keys.TAB
        )
        if page.execute_script("return document.activeElement.matches(arguments[0])", wanted):
            return
    pytest.fail(f"Tab does not reach {wanted}")


def _at_body(page) -> bool:
    return page.execute_script("return document.activeElement === document.body")


def test_every_section_is_there_and_every_chart_is_drawn(page):
    sections = [
        section.get_attribute("id") for section in page.find_elements("tag name", "section")
    ]
    assert sections == [
        "summary", "curves", "attention", "clients", "classes", "data-spread", "calibration",
        "embedding", "maps", "configuration",
    ]  # fmt: skip
    blank = "const blank = document.createElement('canvas');"
    for chart in CHARTS:
        assert page.execute_script(
            blank
            + "const drawn = document.querySelector(`#${arguments[0]} canvas`);"
            + "blank.width = drawn.width; blank.height = drawn.height;"
            + "return drawn.width > 300 && drawn.toDataURL() !== blank.toDataURL()",
            chart,
        ), chart
    assert len(page.find_elements("css selector", "#classes-chart svg.dots path")) == 6
    assert len(page.find_elements("css selector", ".data-chart canvas")) == 1
    assert len(page.find_elements("css selector", "#maps img")) == 4
    assert page.execute_script(
        "return [...document.images].every((image) => image.naturalWidth > 0)"
    )


def test_labels_are_shown_as_they_are_written(page):
    assert page.title == NASTY
    assert NASTY in page.find_element("id", "runs").text
    assert page.find_elements("css selector", "img[src='x']") == []


def test_a_button_takes_a_run_out_of_the_chart_and_brings_it_back(page):
    before = picture(page)
    button = page.find_element("css selector", "#runs .toggle")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert picture(page) != before
    button.click()
    assert picture(page) == before


def test_the_slider_smooths_the_curves(page):
    from selenium.webdriver.common.keys import Keys

    before, text = picture(page), page.find_element("id", "smoothing-text").text
    page.find_element("id", "smoothing").send_keys(Keys.END)
    assert picture(page) != before
    assert page.find_element("id", "smoothing-text").text != text
    page.find_element("id", "smoothing").send_keys(Keys.HOME)
    assert page.find_element("id", "smoothing-text").text == "off"


def test_metric_scale_and_seeds_change_the_chart(page):
    seen = [picture(page)]
    page.find_element("css selector", "#metric option[value='loss']").click()
    seen.append(picture(page))
    page.find_element("id", "log").click()
    seen.append(picture(page))
    page.find_element("id", "every-seed").click()
    seen.append(picture(page))
    assert len(set(seen)) == len(seen)


def test_smoothed_values_are_those_of_the_tables(page, address):
    (run,) = find_runs([folder_of(address) / "proto"])
    shown = page.execute_script(
        "return curveLines('accuracy', page.data.window, false).map((line) => [...line.mean])"
    )
    assert shown[1] == pytest.approx(run.smoothed("accuracy")[1].tolist(), abs=1e-6)


def test_the_pointer_reads_values(page):
    from selenium.webdriver import ActionChains

    chart = page.find_element("id", "curves-chart")
    page.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart
    )
    ActionChains(page).move_to_element(chart).perform()
    tip = chart.find_element("class name", "tip").text
    assert tip.startswith("round ")
    assert "Averaging" in tip
    assert "%" in tip
    canvas = page.find_element("css selector", "#attention-chart canvas")
    page.execute_script(
        "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas
    )
    ActionChains(page).move_to_element(canvas).perform()
    assert "client" in page.find_element("css selector", "#attention-chart .readout").text


def test_everything_can_be_done_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    before = picture(page)
    tab_to(page, "#runs .toggle")
    press(page, Keys.ENTER)
    hidden = picture(page)
    assert hidden != before
    press(page, Keys.SPACE)
    assert picture(page) == before
    tab_to(page, "#summary-table button")
    press(page, Keys.ENTER)
    assert page.switch_to.active_element.get_attribute("data-key") == "title"
    tab_to(page, "#smoothing")
    for _ in range(5):
        press(page, Keys.ARROW_RIGHT)
    assert picture(page) != before
    tab_to(page, "#log")
    press(page, Keys.SPACE)
    assert page.execute_script("return page.state.log")
    tab_to(page, "#curves-chart")
    press(page, Keys.ARROW_RIGHT)
    said = page.find_element("css selector", "#curves-chart .quiet")
    assert "round 1: " in said.get_attribute("textContent")
    tab_to(page, "#attention-chart canvas")
    press(page, Keys.ARROW_RIGHT)
    assert (
        "client 0, round 1" in page.find_element("css selector", "#attention-chart .readout").text
    )


def test_a_heading_sorts_the_table(page):
    def column(place: int) -> list[str]:
        cells = page.find_elements("css selector", f"#summary-table tbody tr > :nth-child({place})")
        return [cell.text for cell in cells]

    heading = page.find_element("css selector", "#summary-table [data-key='accuracy']")
    assert column(1) == ["Averaging", NASTY]
    heading.click()
    assert column(1) == [NASTY, "Averaging"]
    heading = page.find_element("css selector", "#summary-table [data-key='accuracy']")
    heading.click()
    assert column(1) == ["Averaging", NASTY]
    cell = page.find_element("css selector", "#summary-table th[aria-sort='ascending']")
    assert "accuracy" in cell.text


def test_the_table_says_when_the_target_is_reached(page, address):
    heads = page.find_elements("css selector", "#summary-table thead button")
    place = [head.text for head in heads].index("rounds to 0.6") + 1
    cells = page.find_elements("css selector", f"#summary-table tbody tr > :nth-child({place})")
    folder = folder_of(address)
    expected = []
    for runs in (["avg-0", "avg-1"], ["proto"]):
        (row,) = summarize([find_runs([folder / run for run in runs])], "accuracy", 0.6)
        mean, std = row.values["rounds to target"]
        expected.append(f"{mean:.0f}" + (f" ± {std:.0f}" if len(runs) > 1 else ""))
    assert [cell.text for cell in cells] == expected


def test_the_configuration_shows_only_what_differs_until_asked(page):
    def options() -> list[str]:
        rows = page.find_elements("css selector", "#configuration-table tbody th")
        return [row.text for row in rows]

    assert "strategy.name" in options()
    assert "train.lr" not in options()
    page.find_element("id", "only-differences").click()
    assert "train.lr" in options()


@pytest.mark.parametrize(("width", "phone"), [(390, True), (1200, False)])
def test_nothing_sticks_out_at_the_side(page, address, width, phone):
    set_size(page, width, 844, phone=phone)
    page.get(address)
    assert page.execute_script("return innerWidth") == width
    assert page.execute_script("return document.documentElement.scrollWidth") <= width


def test_dark_is_dark_and_paper_is_light(page):
    def background() -> str:
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    light, before = background(), picture(page)
    for _ in range(2):
        page.find_element("id", "theme").click()
    assert background() != light
    assert picture(page) != before
    page.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert background() == light
    page.execute_script("dispatchEvent(new Event('afterprint'))")
    assert background() != light


def test_nothing_is_fetched(page):
    assert (
        page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        == []
    )


def test_a_live_page_waits_for_the_first_run(browser, tmp_path):
    from selenium.webdriver.support.wait import WebDriverWait

    with served(tmp_path) as address:
        browser.get(address)
        assert browser.find_element("id", "waiting").is_displayed()
        assert not browser.find_element("id", "main").is_displayed()
        write_run(tmp_path / "one", rounds=0, planned=30, label="One")
        shown = WebDriverWait(browser, 20)
        shown.until(lambda page: page.find_element("id", "main").is_displayed())
        assert "No round is finished yet" in browser.find_element("id", "curves").text
        append_records(tmp_path / "one", [make_record(0)])
        shown.until(lambda page: page.find_elements("css selector", "#curves-chart canvas"))
        assert console(browser) == []


def test_a_live_page_keeps_what_the_reader_chose(browser, tmp_path):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    write_run(tmp_path / "one", rounds=5, planned=30, label="One")
    write_run(tmp_path / "two", rounds=5, planned=30, label="Two", level=0.5)
    set_size(browser, 1200, 900)
    wait = WebDriverWait(browser, 20)
    with served(tmp_path) as address:
        browser.get(address)
        browser.find_element("css selector", "#runs .toggle").click()
        browser.find_element("id", "smoothing").send_keys(Keys.HOME)
        before = picture(browser)
        append_records(tmp_path / "two", [make_record(t, level=0.5) for t in range(5, 12)])
        with (tmp_path / "two" / "rounds.jsonl").open("a") as file:
            file.write('{"round": 12, "coh')
        wait.until(lambda page: "12 of 30" in page.find_element("id", "summary-table").text)
        assert picture(browser) != before
        toggle = browser.find_element("css selector", "#runs .toggle")
        assert toggle.get_attribute("aria-pressed") == "false"
        assert browser.find_element("id", "smoothing").get_attribute("value") == "0"
        write_run(tmp_path / "three", rounds=3, planned=30, label="Three")
        wait.until(lambda page: "Three" in page.find_element("id", "runs").text)
        toggle = browser.find_element("css selector", "#runs .toggle")
        assert toggle.get_attribute("aria-pressed") == "false"
        assert console(browser) == []
    wait.until(lambda page: "has gone" in page.find_element("id", "live").text)
    console(browser)
