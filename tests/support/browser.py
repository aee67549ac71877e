"""A real headless Chromium for tests, where one is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--force-prefers-reduced-motion",  # no scrolling under the pointer
)


def _skip(reason: str) -> None:
    """Skips the test, unless the machine is meant to have a browser."""
    if os.environ.get("FEDPROTO_NEED_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A browser that keeps what pages write to the console."""
    if importlib.util.find_spec("selenium") is None:
        _skip("selenium is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        _skip("no chromium with its chromedriver on this machine")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        yield session
    finally:
        session.quit()


def set_size(session: Any, width: int, height: int, *, phone: bool = False) -> None:
    """The size of what the page sees; windows cannot be made as narrow as a phone."""
    session.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone},
    )


def console(session: Any) -> list[str]:
    return [entry["message"] for entry in session.get_log("browser")]


def axe_violations(session: Any) -> list[str]:
    """What axe-core finds wrong with the page: rule, where, why."""
    if importlib.util.find_spec("selenium_axe_python") is None:
        _skip("selenium-axe-python, which brings axe-core, is not installed")
    import selenium_axe_python

    script = Path(selenium_axe_python.__file__).parent / "axe-core" / "axe.min.js"
    session.execute_script(script.read_text(encoding="utf-8"))
    session.set_script_timeout(180)
    found = session.execute_async_script(
        "axe.run(document, {resultTypes: ['violations']}).then(arguments[0])"
    )
    assert found["passes"], "nothing was looked at"
    return [
        f"{rule['id']}: {node['html'][:120]} ({node['failureSummary']})"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]
