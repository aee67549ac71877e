"""A method is one short file: what is common to methods is written elsewhere, once."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

from fedproto import FedProto
from fedproto.strategies import STRATEGIES

NEW = ("fedacg", "ghbm", "moon", "fedntd", "feddecorr", "fedprototan", "fedper", "fedrep")
NEW += ("fedbabu", "ditto", "fedrod")


def code_lines(source: str) -> int:
    """Lines of code: without imports, docstrings, comments and empty lines."""
    tree = ast.parse(source)
    told = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        inside = getattr(node, "body", None)
        for one in inside if isinstance(inside, list) else ():
            is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            told += [one] if is_text and isinstance(one.value.value, str) else []
    left_out = {line for node in told for line in range(node.lineno, node.end_lineno + 1)}
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in left_out
        for number, line in enumerate(source.splitlines(), start=1)
    )


def test_lines_of_code_are_counted():
    source = '"""Text."""\nimport math\n\n# why\ndef f():\n    """More."""\n    return 1'
    assert code_lines(source) == 2


def test_fedproto_has_at_most_eighty_lines_and_five_options():
    assert code_lines(Path(inspect.getfile(FedProto)).read_text(encoding="utf-8")) <= 80
    assert len(dataclasses.fields(FedProto)) <= 5


@pytest.mark.parametrize("name", NEW)
def test_a_new_method_is_a_file_of_at_most_sixty_lines(name):
    path = Path(inspect.getfile(STRATEGIES.get(name)))
    assert path.stem == name
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60
