"""Runs notebooks without Jupyter and shows them as Markdown pages, with what really came out.

python docs/tools/notebooks.py docs/tutorials/own-model.ipynb > tutorial.md
"""

from __future__ import annotations

import ast
import base64
import contextlib
import html
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def as_markdown(path: Path) -> str:
    """Runs a notebook in an empty folder; texts, code and outputs in order.

    Raises:
        Exception: Whatever a cell raises.
    """
    with tempfile.TemporaryDirectory() as folder, _inside(folder):
        return "\n\n".join(_cells(path)) + "\n"


def _cells(path: Path) -> Iterator[str]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for place, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        printed, value = _run(source, f"{path.name}[{place}]", names)
        if printed:
            yield f"```text\n{printed.rstrip()}\n```"
        if value is not None:
            yield _shown(value)


def _run(source: str, title: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Runs a cell; what it printed, and the value of its last line if that is an expression."""
    tree, value = ast.parse(source), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, title, "exec"), names)  # noqa: S102 - notebooks of this repository
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), title, "eval"), names)  # noqa: S307
    return printed.getvalue(), value


def _shown(value: Any) -> str:
    if hasattr(value, "savefig"):
        file = io.BytesIO()
        value.savefig(file, dpi=100, metadata={"Software": None})
        picture = base64.b64encode(file.getvalue()).decode()
        return f'<img alt="the picture that the cell draws" src="data:image/png;base64,{picture}">'
    text = repr(value)
    kind = "output" if "\n" in text else "output line"
    return f'<pre class="{kind}">{html.escape(text)}</pre>'


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    sys.stdout.write(as_markdown(Path(sys.argv[1]).resolve()))
