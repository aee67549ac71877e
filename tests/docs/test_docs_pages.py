"""Links lead somewhere, commands exist with their options, recipes can be read, code compiles."""

from __future__ import annotations

import ast
import json
import pkgutil
import re
import runpy
import shlex
import tomllib

import pytest
import typer
import yaml

import fedproto
from documents import DOCUMENTS, ROOT, anchors, blocks, commands, prose
from fedproto.cli import main
from fedproto.cli.app import app
from fedproto.config.recipe import bundled_recipes, expand, read_recipe
from fedproto.strategies import STRATEGIES

EACH_DOCUMENT = pytest.mark.parametrize(
    "path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


def fedproto_commands(path):
    """Arguments and shown output of the document's calls of the command line."""
    for command, *output in commands(path):
        if command.startswith("fedproto "):
            yield shlex.split(command, comments=True)[1:], output


def parse(arguments):
    """The command that these arguments call, by name, and its parameters; nothing is run."""
    command, names = typer.main.get_command(app), []
    context = command.make_context("fedproto", list(arguments))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        names.append(name)
    return names, context.params


def known_recipe(given: object) -> str | None:
    """A bundled recipe or a file of the repository that a document names; None for a reader's."""
    if given in bundled_recipes():
        return given
    return str(ROOT / given) if isinstance(given, str) and given.startswith("paper/") else None


@EACH_DOCUMENT
def test_links_and_anchors_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if target.startswith(("http://", "https://")):
            continue
        place, _, anchor = target.partition("#")
        found = (path.parent / place).resolve() if place else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


@EACH_DOCUMENT
def test_pictures_have_a_text_equivalent(path):
    for text in re.findall(r"!\[([^\]]*)\]\(", prose(path)):
        assert len(text.split()) > 2, text


def test_every_picture_is_shown():
    text = "".join(path.read_text() for path in DOCUMENTS)
    for picture in (ROOT / "docs/images").iterdir():
        assert f"images/{picture.name})" in text, picture.name


@EACH_DOCUMENT
def test_commands_exist_with_their_options(path, capsys):
    for arguments, output in fedproto_commands(path):
        names, given = parse(arguments)
        if output and output[0].startswith("error: "):
            assert main(arguments) == 2
            assert capsys.readouterr().err.strip() == output[0]
        elif recipe := known_recipe(given.get("recipe")):
            runs = read_recipe(recipe, given["overrides"] or [])
            assert len(runs) == 1 or names != ["run"], arguments


def test_a_wrong_option_is_noticed():
    with pytest.raises(Exception, match="No such option"):
        parse(["run", "quickstart", "--sett", "seed=1"])
    with pytest.raises(Exception, match="No such command"):
        parse(["flower", "upp"])


@EACH_DOCUMENT
def test_recipes_can_be_read(path):
    """The recipe of the extension example needs its plugin and is run in test_docs."""
    for block in blocks(path, "toml") if path.name != "write-a-strategy.md" else []:
        tables = tomllib.loads(block)
        part = "strategy" not in tables and "variants" not in tables
        assert expand({"strategy": {"name": "fedavg"}} | tables if part else tables)


@EACH_DOCUMENT
def test_python_compiles(path):
    for place, block in enumerate(blocks(path, "python")):
        compile(block, f"{path.name}, block {place}", "exec")


def test_the_api_reference_names_what_the_package_exports():
    table = (ROOT / "docs/reference/api.md").read_text().split("\n## ")[0]
    assert set(fedproto.__all__) <= set(re.findall(r"`(\w+)`", table))


def test_the_call_paths_of_the_architecture_name_what_exists():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    assert len(page.split()) <= 1200
    names = set(re.findall(r"`(fedproto\.[\w.]+)`", page))
    assert len(names) >= 10
    for name in names - {"fedproto.run"}:
        pkgutil.resolve_name(name)


def test_the_architecture_names_every_package():
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    named = set(re.findall(r"\(\.\./\.\./src/fedproto/([\w.]+)\)", page))
    there = {
        path.name for path in (ROOT / "src/fedproto").iterdir() if not path.name.startswith("_")
    }
    assert named == there - {"py.typed", "version.py"}


def test_the_reading_list_is_short_and_complete():
    """Five files that show the idea; what they import from others is told beside them."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Read first")[1].split("\n## ")[0]
    files = [ROOT / path for path in re.findall(r"\]\((src/fedproto/[\w/]+\.py)\)", text)]
    assert len(files) == 5
    assert sum(len(path.read_text().splitlines()) for path in files) <= 900
    listed = {path.relative_to(ROOT / "src").with_suffix("").as_posix() for path in files}
    imported = {
        alias.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedproto")
        for alias in node.names
        if node.module.replace(".", "/") not in listed
    }
    assert set(re.findall(r"`(\w+)`", text)) == imported


def test_the_guide_for_contributors_names_what_is_there():
    named = re.findall(r"`([\w./]*/[\w./]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists() or (ROOT / "src/fedproto" / path).exists(), path


def test_readme_and_lines_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "results/README.md"]
    for path in pages:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            table_or_picture = line.lstrip().startswith(("|", "!["))
            assert len(line) <= 120 or table_or_picture, f"{path.name}, line {number}"


class _Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml without what it calls."""


_Configuration.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def _pages(entry):
    """The titles of the navigation with their pages."""
    for title, inner in entry.items():
        if isinstance(inner, str):
            yield title, inner
        for each in inner if isinstance(inner, list) else ():
            yield from _pages(each)


def test_a_page_has_one_name():
    """In the navigation, in its heading, and so in the search."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Configuration)
    pages = dict(page for entry in settings["nav"] for page in _pages(entry))
    assert len(pages) > 35
    for title, page in pages.items():
        path = ROOT / "docs" / page
        if path.exists():
            heading = path.read_text().splitlines()[0]
        else:
            heading = json.loads(path.with_suffix(".ipynb").read_text())["cells"][0]["source"][0]
        assert heading.strip() == f"# {title if title != 'Start' else 'fedproto'}", page


def test_every_page_is_within_its_budget_of_words():
    found = runpy.run_path(str(ROOT / "docs/tools/budget.py"))
    counts = found["counts"]()
    assert len(counts) > 40
    assert {name: count for name, count in counts.items() if count[0] > count[1]} == {}
    pages = [number for name, (number, _) in counts.items() if "/appendix/" not in name]
    assert sum(pages) <= found["TOTAL"]


def test_pages_count_the_strategies():
    classes = [STRATEGIES.get(name) for name in STRATEGIES.names()]
    number = len([each for each in classes if each.__module__.startswith("fedproto.")])
    said = {
        "README.md": (f"[{number} strategies]", f"{number - 1} more methods"),
        "docs/index.md": (f"{number - 1} others",),
        "docs/evidence/other-libraries.md": (f"| Methods | {number},",),
    }
    for page, texts in said.items():
        text = " ".join((ROOT / page).read_text().split())
        assert all(each in text for each in texts), page


PRIVATE_WORDS = (
    "anew",
    "are no number",
    "are told(?! apart)",
    "as it is told",
    "bears",
    "beyond belief",
    "brought to",
    "carried out",
    "carry out",
    "come out of it",
    "counts? less and less",
    "counts? nowhere",
    "flower's clothes",
    "go(es|ing)? on",
    "grows up",
    "how far (things|it|training) (are|is)",
    "is no [a-z]+ (directory|folder|file)",
    "is no number",
    "is no run",
    "is told",
    "listens to",
    "longest way",
    "look(ed|ing|s) into",
    "must be a text",
    "no room for",
    "nobody",
    "not more than",
    "nothing cheaper",
    "nothing needs to be chosen",
    "are shortened",
    "so many",
    "somebody",
    "surer",
    "tells? besides",
    "the rooms",
    "the way of the",
    "walks through",
    "what (it|they|is|was|was it) (counts?|holds?|keeps?|says?|sends?|told|sent|kept)",
    "whole number",
)
"""Patterns of words that a reader would have to translate; the field has its own for each."""


def test_texts_use_the_fields_words():
    """Documents, notebooks, docstrings, help, errors, recipes and the report page."""
    found = {}
    kinds = ("*.md", ".github/**/*.yml", "docs/**/*.md", "docs/**/*.ipynb", "results/*.md")
    kinds += ("recipes/*.toml", "paper/**/*.toml", "paper/**/*.py")
    kinds += ("src/**/*.py", "src/**/*.js", "src/**/*.html")
    paths = [path for kind in kinds for path in ROOT.glob(kind)]
    assert len(paths) > 250
    for path in paths:
        text = " ".join(path.read_text(encoding="utf-8").lower().split())
        text = re.sub(r"there is no run\b", "", text)
        pattern = rf"\b(?:{'|'.join(PRIVATE_WORDS)})(?!\w)"
        if words := sorted({match[0] for match in re.finditer(pattern, text)}):
            found[str(path.relative_to(ROOT))] = words
    assert found == {}
