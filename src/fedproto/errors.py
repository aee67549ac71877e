"""The errors a user can cause, each with a message that names the thing and the remedy."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable


class FedprotoError(Exception):
    """A mistake in what was read from outside; the command line shows it without a traceback."""


class ConfigError(FedprotoError):
    """A recipe, flag or option that is unknown, of the wrong type or out of range."""


class DataError(FedprotoError):
    """Data that cannot be read or divided among clients."""


class StoreError(FedprotoError):
    """A run directory that cannot be read, written or continued."""


class TrainingError(FedprotoError):
    """A model and data that do not fit together."""


class HardlyLearnedWarning(UserWarning):
    """A run whose updates were mostly refused, so that its model has hardly moved."""


_UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode's categories of control and format characters, lone surrogates and line separators."""


def printable(text: object) -> str:
    """Text from outside for a terminal, a figure or a log: what could steer those is escaped.

    Escapes are written as in Python, with a backslash. Joiners inside of words and emoji stay.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        ascii(letter)[1:-1]
        if unicodedata.category(letter) in _UNSEEN and letter not in "\u200c\u200d"
        else letter
        for letter in text
    )


def counted(number: int, noun: str) -> str:
    """A number of things in words, such as ``1 run`` or ``2,000 rounds``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def install(extra: str) -> str:
    """The command that installs what an optional part needs, by the packages' own names.

    Unlike the name of the extra, it works wherever this package itself came from.
    """
    from importlib.metadata import PackageNotFoundError, requires  # slow, and seldom needed

    try:
        wanted = [line.partition(";") for line in requires("fedproto") or []]
    except PackageNotFoundError:
        wanted = []
    marked = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    packages = [f"'{need.strip()}'" for need, _, mark in wanted if marked.search(mark)]
    return "pip install " + " ".join(packages or [f"'.[{extra}]'"])


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str | None = None) -> str:
    """Says that a name is unknown, with the nearest known one or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if hint is None:
        hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names) or 'none'}"
    return f"unknown {kind} '{name}'; {hint}"


def reason_of(error: BaseException) -> str:
    """The first line of what another library's error says, or the error's kind."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
