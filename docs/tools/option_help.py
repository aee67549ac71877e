"""Shows the help text of a declared option as its documentation.

Options are written once, `name: type = option(default, "what it means", ...)`, with the text that
the command line prints. The API reference reads it from there too.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


class OptionHelp(griffe.Extension):
    """Gives every field that is declared with `option` its help text as a docstring."""

    def on_attribute_instance(
        self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **kwargs: Any
    ) -> None:
        """Reads the second argument of `option(...)`, and its bounds."""
        del kwargs
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return
        if call.func.id != "option" or len(call.args) < 2:
            return
        text = ast.literal_eval(call.args[1])
        bounds = [
            f"{word.arg.replace('_', ' ')} {ast.unparse(word.value)}"
            for word in call.keywords
            if word.arg in ("above", "at_least", "at_most", "below")
        ]
        sentence = text[0].upper() + text[1:] + (f" ({', '.join(bounds)})" if bounds else "") + "."
        attr.docstring = griffe.Docstring(sentence, lineno=call.lineno, parent=attr)
        attr.value = ast.unparse(call.args[0])
