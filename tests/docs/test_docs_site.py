"""The docs site: what is wrong stops the build, and what is built needs no network.

`make docs` installs what this needs and runs it; without, it is skipped.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time

import pytest

from browser import open_browser, set_size
from documents import ROOT

pytest.importorskip("mkdocs", reason="needs the extra 'docs', which 'make docs' installs")

of_the_site = pytest.mark.skipif(
    not (ROOT / "build/docs/index.html").exists(), reason="'make docs' builds it"
)

MODULE = '''"""A module."""

from fedproto.options import option


class Mini:
    """A class."""

    share: float = option(0.5, "how much", above=0)


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: The number.
    """
    return 2 * x
'''
START = """# Start

- [a file](../src/fedproto/mini.py), [its lines](../src/fedproto/mini.py#L3)
- [its folder](../src/fedproto)
- [`fedproto.mini`](../src/fedproto/mini.py)
- [the readme](../README.md), [below](#more), [API](reference/api.md)

## More

Found by its needle.
"""
API = """# API
"""


@pytest.fixture
def project(tmp_path):
    """A small project with the configuration and tools of this one."""
    settings = (ROOT / "mkdocs.yml").read_text()
    nav = "nav:\n  - Start: index.md\n  - API: reference/api.md\n\n"
    settings = re.sub(
        r"^nav:\n.*?\n(?=exclude_docs)", nav, settings, flags=re.DOTALL | re.MULTILINE
    )
    (tmp_path / "mkdocs.yml").write_text(settings)
    for folder in ("tools", "assets"):
        shutil.copytree(ROOT / "docs" / folder, tmp_path / "docs" / folder)
    (tmp_path / "README.md").write_text("# Readme\n\n[start](docs/index.md#more)\n")
    (tmp_path / "docs/index.md").write_text(START)
    (tmp_path / "docs/reference").mkdir()
    (tmp_path / "docs/reference/api.md").write_text(API)
    (tmp_path / "src/fedproto").mkdir(parents=True)
    (tmp_path / "src/fedproto/__init__.py").write_text('"""A package."""\n')
    (tmp_path / "src/fedproto/mini.py").write_text(MODULE)
    return tmp_path


def build(project):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"], cwd=project, capture_output=True, text=True
    )


def test_a_sound_project_builds_and_loads_nothing_from_the_network(project):
    result = build(project)
    assert result.returncode == 0, result.stderr
    site = project / "build/docs"
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)[^>]+(?:src|href)="?(?:https?:)?//', page.read_text()
        )
        assert not fetched, page
    start = (site / "index.html").read_text()
    assert 'href="source/src/fedproto/mini.py.html">a file' in start
    assert 'href="source/src/fedproto/mini.py.html">its lines' in start
    assert 'href="source/src/fedproto/index.html">its folder' in start
    assert 'href="reference/api/fedproto.mini.html"><code>fedproto.mini' in start
    assert 'href="../index.html#more">start' in (site / "source/index.html").read_text()
    assert "How much (above 0)." in (site / "reference/api/fedproto.mini.html").read_text()
    api = (site / "reference/api.html").read_text()
    assert 'href="api/fedproto.mini.html"><code>fedproto.mini' in api


WRONG_DOCSTRING = '''def half(x: int) -> float:
    """Half a number.

    Args:
        y: Not there.
    """
'''
QUESTIONS = {
    "own data": ("how-to/own-images", "how-to/own-arrays"),
    "own model": ("how-to/own-model", "tutorials/own-model"),
    "own strategy": ("how-to/write-a-strategy",),
    "deploy": ("how-to/deploy-hosts", "how-to/deploy-one-machine"),
    "reproduce": ("how-to/reproduce-paper", "evidence/reproduction"),
    "recommended method": ("evidence/what-wins",),
    "tune": ("how-to/tune",),
    "export": ("how-to/export",),
    "GPU": ("how-to/gpu",),
    "privacy": ("how-to/privacy",),
}
"""What newcomers ask, and the pages that answer."""
HITS = "return [...document.querySelectorAll('.md-search-result__item > a')].map((a) => a.href)"


@of_the_site
@pytest.mark.parametrize(("name", "score"), [("own-model", 50), ("segmentation", 5)])
def test_a_notebook_draws_and_learns_something(name, score):
    """The site's build runs the notebooks; the last table compares methods, in per cent."""
    page = (ROOT / f"build/docs/tutorials/{name}.html").read_text()
    assert page.count("the picture that the cell draws") == 2
    *_, results = re.findall(r'<pre class="output">(method .*?)</pre>', page, flags=re.DOTALL)
    cells = [re.split(r"\s{2,}", row) for row in results.splitlines()[2:]]
    assert len(cells) >= 2
    assert min(float(row[1].split()[0]) for row in cells) > score


@of_the_site
def test_ten_questions_are_answered(tmp_path):
    """In at most two clicks from the start page, and by the first or second hit of the search."""
    start = ROOT / "build/docs/index.html"
    with open_browser(tmp_path) as browser:
        set_size(browser, 1440, 900)
        browser.get(start.as_uri())
        links = browser.execute_script(
            "return [...document.querySelectorAll('.md-content a')].map((a) => a.href)"
        )
        for question, answers in QUESTIONS.items():
            wanted = [(start.parent / f"{answer}.html").as_uri() for answer in answers]
            assert {link.split("#")[0] for link in links} & set(wanted), question
            browser.get("about:blank")
            browser.get(f"{start.as_uri()}?q={question.replace(' ', '%20')}")
            deadline = time.monotonic() + 60
            while not (hits := browser.execute_script(HITS)) and time.monotonic() < deadline:
                time.sleep(0.1)
            found = [hit.split("?")[0].split("#")[0] for hit in hits[:2]]
            assert set(found) & set(wanted), f"{question}: {found}"


@of_the_site
@pytest.mark.parametrize("width", [1440, 390])
def test_no_page_is_wider_than_the_window(width, tmp_path):
    site = ROOT / "build/docs"
    folders = ("tutorials", "how-to", "explanation", "evidence", "appendix")
    pages = [site / "index.html", *(page for name in folders for page in (site / name).glob("*"))]
    with open_browser(tmp_path) as browser:
        set_size(browser, width, 900)
        for page in pages:
            browser.get(page.as_uri())
            wide = browser.execute_script(
                "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, page.name


MISTAKES = {
    "docs/index.md": {
        "[x](nowhere.md)": "'nowhere.md', but the target is not found",
        "[x](../src/nowhere.py)": "there is no ../src/nowhere.py in the repository",
        "[x](#nowhere)": "no such anchor",
        "[x](reference/api.md#nowhere)": "does not contain an anchor '#nowhere'",
        "![x](nowhere.png)": "'nowhere.png', but the target is not found",
        "[x][fedproto.nowhere]": "Could not find cross-reference target 'fedproto.nowhere'",
        "![x](https://example.org/x.png)": "fetches from the network",
        "text\n- item": "a list needs an empty line above it",
    },
    "docs/more.md": {"# A page outside the navigation": 'not included in the "nav"'},
    "src/fedproto/mini.py": {WRONG_DOCSTRING: "'y' does not appear"},
}


def test_every_mistake_is_an_error(project):
    for place, mistakes in MISTAKES.items():
        with (project / place).open("a") as file:
            file.write("\n".join(f"\n{text}\n" for text in mistakes))
    result = build(project)
    assert result.returncode != 0
    for mistakes in MISTAKES.values():
        for text, message in mistakes.items():
            assert message in result.stderr, text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs the browser chromium")
def test_search_works_from_a_file(project, tmp_path):
    assert build(project).returncode == 0
    page = f"file://{project}/build/docs/reference/api.html?q=needle"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--user-data-dir={tmp_path / 'profile'}"]  # HOME may not be writable
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000"]
    result = subprocess.run(
        ["chromium", *options, *offline, "--dump-dom", page], capture_output=True, text=True
    )
    assert "CONSOLE" not in result.stderr
    assert "1 matching document" in result.stdout
    assert re.search(r'index\.html[^"]*" class="md-search-result__link"', result.stdout)
