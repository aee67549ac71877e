"""Makes a site of Markdown that is written for a code host.

Pages link to files of the repository (``../src/fedproto/rounds.py``), which a site does not have.
Each such file or folder becomes a page of its own here, so that every link works offline. Every
module has a page in the API reference, made from its docstrings; a link whose text is a module's
name leads there, and ``docs/reference/api.md`` is followed by a list of them. The pages of options,
strategies and commands go on with tables made by `reference.py`. What would look different on the
two, or be fetched from elsewhere, is a warning, and warnings are errors. Notebooks are run and
shown with their output.
"""

from __future__ import annotations

import ast
import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference
from notebooks import as_markdown

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "fedproto"
TOOLS = DOCS / "tools"
LANGUAGES = {
    ".csv": "text",
    ".json": "json",
    ".jsonl": "json",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".txt": "text",
    ".yml": "yaml",
}
LARGEST_PAGE = 200_000  # bytes of a text that is still shown; a longer one is offered as a file

_BEHIND_GUIDES = "---\nsearch:\n  boost: 0.3\n---\n\n"
"""Guides come before generated pages among the results of a search."""

log = logging.getLogger("mkdocs.hooks.fedproto")

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//")
_ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages of the API reference into the navigation."""
    sections = [
        {title: [{_short(module): _api_page(module)} for module in modules]}
        for title, modules in _reference().items()
    ]
    config.nav = _expanded(config.nav, "reference/api.md", sections)
    options = [{name: f"reference/options/{name}.md"} for name in sorted(reference.option_pages())]
    config.nav = _expanded(config.nav, "reference/options.md", options)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated reference, notebooks, and all outside of docs/ that pages lead to."""
    for notebook in sorted(DOCS.rglob("*.ipynb")):
        page = notebook.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, page, content=as_markdown(notebook)))
    for module in _modules():
        text = f"{_BEHIND_GUIDES}# {module}\n\n::: {module}\n"
        files.append(File.generated(config, _api_page(module), content=text))
    if files.get_file_from_path("reference/options.md") is not None:
        for name, text in reference.option_pages().items():
            page = f"reference/options/{name}.md"
            files.append(File.generated(config, page, content=_BEHIND_GUIDES + text))
    waiting = [path for page in files.documentation_pages() for path in _outside(page)]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(_uri(path)) is None:
            files.append(_as_file(path, config))
            waiting += _outside(files.get_file_from_path(_uri(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links out of docs/ into links to their pages; names what would read differently."""
    del config, files
    if page.file.src_uri.startswith(("how-to/", "evidence/what-wins")):
        page.meta["search"] = {"boost": 2}
    if page.file.src_uri == "reference/api.md":
        markdown += _list_of_modules()
    if page.file.src_uri in reference.PAGES:
        markdown += "\n" + reference.PAGES[page.file.src_uri]()
    for number, line in _misread_lists(markdown):
        log.warning(
            "%s:%d: a list needs an empty line above it: %s", page.file.src_uri, number, line
        )
    return "".join(
        part if is_code else _LINK.sub(lambda link: _rewritten(link, page.file), part)
        for part, is_code in _parts(markdown)
    )


def _to_page(link: str) -> str:
    """A notebook is a page here."""
    return re.sub(r"\.ipynb(?=[)#])", ".md", link)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuses what a browser would fetch from elsewhere."""
    del config
    for match in _FETCHED.finditer(output):
        if 'rel="canonical"' not in match.group():
            log.warning("%s fetches from the network: %s", page.file.src_uri, match.group())
    return output


def _reference() -> dict[str, list[str]]:
    """The modules of the API reference by their packages."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        if not parts[-1].startswith("_"):
            found.setdefault(".".join(parts[: min(2, len(parts) - 1)]), []).append(".".join(parts))
    return found


def _list_of_modules() -> str:
    """A table per package: its modules and the first lines of their docstrings."""
    text = ""
    for package, modules in _reference().items():
        text += f"\n## {package}\n\n| Module | Content |\n|---|---|\n"
        for module in modules:
            file = SOURCE.parent / f"{module.replace('.', '/')}.py"
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            summary = docstring.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            text += f"| [`{module}`](../../src/{module.replace('.', '/')}.py) | {summary} |\n"
    return text


def _modules() -> list[str]:
    return [module for modules in _reference().values() for module in modules]


def _short(module: str) -> str:
    return module.removeprefix("fedproto.")


def _api_page(module: str) -> str:
    return f"reference/api/{module}.md"


def _expanded(entry: Any, page: str, more: list[Any]) -> Any:
    """Navigation in which a page became the first of a section."""
    if isinstance(entry, list):
        return [_expanded(each, page, more) for each in entry]
    if isinstance(entry, dict):
        return {
            title: [page, *more] if value == page else _expanded(value, page, more)
            for title, value in entry.items()
        }
    return entry


def _uri(path: Path) -> str:
    """Where a file or folder of the repository is in the site."""
    place = f"source/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{place}/README.md"
    return f"{place}.md" if _is_shown(path) else place


def _is_shown(path: Path) -> bool:
    return path.suffix in LANGUAGES and path.stat().st_size <= LARGEST_PAGE


def _is_page(path: Path) -> bool:
    """Whether a file is in the site anyway."""
    return path.is_relative_to(DOCS) and not path.is_relative_to(TOOLS)


def _as_file(path: Path, config: MkDocsConfig) -> File:
    uri, hidden = _uri(path), InclusionLevel.NOT_IN_NAV
    if path.is_dir() or _is_shown(path):
        text = _folder(path) if path.is_dir() else _listing(path)
        text = f"---\nsearch:\n  exclude: true\n---\n{text}"
        return File.generated(config, uri, content=text, inclusion=hidden)
    return File.generated(config, uri, abs_src_path=str(path), inclusion=hidden)


def _listing(path: Path) -> str:
    code = path.read_text(encoding="utf-8")
    return f"# `{path.relative_to(ROOT)}`\n\n``````{LANGUAGES[path.suffix]}\n{code}\n``````\n"


def _folder(path: Path) -> str:
    readme = path / "README.md"
    if readme.exists():
        return readme.read_text(encoding="utf-8")
    entries = (each for each in sorted(path.iterdir()) if not each.name.startswith((".", "__py")))
    lines = [f"- [`{entry.name}`]({entry.name}){_summary(entry)}" for entry in entries]
    return f"# `{path.relative_to(ROOT)}`\n\n" + "\n".join(lines) + "\n"


def _summary(path: Path) -> str:
    """What the first paragraph of a Python file says it is for."""
    if path.suffix != ".py":
        return ""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    text = " ".join(docstring.partition("\n\n")[0].split())
    return f": {text}" if text else ""


def _place(file: File) -> Path:
    """The folder that a page's links are relative to."""
    path = file.src_uri
    if path.startswith("source/"):
        return (ROOT / path.removeprefix("source/")).parent
    return (DOCS / path).parent


def _outside(file: File | None) -> Iterator[Path]:
    """What a page leads to in the repository but outside of docs/."""
    if file is None or not file.is_documentation_page():
        return
    for part, is_code in _parts(file.content_string):
        for link in () if is_code else _LINK.finditer(part):
            path = _target(link, file)
            if path is not None and path.exists() and not _is_page(path):
                yield path


def _target(link: re.Match[str], file: File) -> Path | None:
    """The file in the repository that a link leads to; None for any other link."""
    target = link["target"]
    if "://" in target or target.startswith(("mailto:", "/")):
        return None
    path = (_place(file) / target).resolve()
    if not path.is_relative_to(ROOT):
        return None
    if _is_page(path) and not file.src_uri.startswith("source/"):
        return None
    return path.parent if path.name == "README.md" and path.parent != ROOT else path


def _rewritten(link: re.Match[str], file: File) -> str:
    path = _target(link, file)
    if path is None:
        return _to_page(link.group())
    if not path.exists():
        log.warning("%s: there is no %s in the repository", file.src_uri, link["target"])
        return link.group()
    module = link["text"].strip("`")
    if _is_page(path):
        uri = _to_page(path.relative_to(DOCS).as_posix() + ")")[:-1]
    else:
        uri = _api_page(module) if module in _modules() else _uri(path)
    here = posixpath.dirname(file.src_uri)
    # Listings have no anchors; a code host's line numbers lead to the file as a whole.
    anchor = link["anchor"] if link["anchor"] and path.suffix == ".md" else ""
    return f"[{link['text']}]({posixpath.relpath(uri, here or '.')}{anchor})"


def _parts(markdown: str) -> Iterator[tuple[str, bool]]:
    """Text and fenced code in turn, each with whether it is code."""
    fence = re.compile(r"^(`{3,})[^\n]*\n.*?^\1 *$\n?", flags=re.DOTALL | re.MULTILINE)
    end = 0
    for block in fence.finditer(markdown):
        yield markdown[end : block.start()], False
        yield block.group(), True
        end = block.end()
    yield markdown[end:], False


def _misread_lists(markdown: str) -> Iterator[tuple[int, str]]:
    """Lists right below a paragraph: a code host shows a list there, this site would not."""
    number, above = 0, ""
    for part, is_code in _parts(markdown):
        for line in part.splitlines():
            number += 1
            below_text = above.strip() and not above.startswith((" ", "#", "|"))
            if not is_code and _ITEM.match(line) and below_text and not _ITEM.match(above):
                yield number, line
            above = line
