"""Commands that are imported when they are called.

Most of them need PyTorch, which takes seconds to import; `fedproto --help` does not. What it says
of a command is the first paragraph of the command's docstring, read from the source.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup

from fedproto.options.sources import docstring

if TYPE_CHECKING:
    from click import Command, Context

COMMANDS = {
    "run": ("running", "run"),
    "sweep": ("running", "sweep"),
    "resume": ("running", "resume"),
    "predict": ("predicting", "predict"),
    "export": ("exporting", "export_run"),
    "compare": ("comparing", "compare"),
    "best": ("choosing", "best"),
    "tune": ("choosing", "tune_recipe"),
    "analyse": ("analysing", "analyse_runs"),
    "report": ("reporting", "report"),
    "reproduce": ("reproducing", "reproduce"),
    "list": ("inspecting", "list_known"),
    "info": ("inspecting", "info"),
    "check": ("inspecting", "check"),
    "data": ("data", ""),
    "flower": ("flower", ""),
}
"""Where each command is: a module here, and a function in it; a group of commands has none."""


class OnDemand(TyperGroup):
    """Knows the names of all commands, and imports the one that is called."""

    def list_commands(self, ctx: Context) -> list[str]:
        """All commands, in the order of the help."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """A stand-in that knows what the command does, for the help."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=summary(cmd_name))

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """The command that was asked for, whole."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(name) if name in COMMANDS else None, rest


def command(name: str) -> Command:
    """A command with all its options; imports what it needs."""
    module, function = COMMANDS[name]
    home, gathered = importlib.import_module(f"fedproto.cli.{module}"), typer.Typer()
    if function:
        settings = getattr(home, "SETTINGS", None)
        gathered.command(name, context_settings=settings)(getattr(home, function))
    else:
        gathered.add_typer(home.group)
    return typer.main.get_group(gathered).commands[name]


def summary(name: str) -> str:
    """What a command does, in a sentence."""
    module, function = COMMANDS[name]
    return docstring(f"fedproto.cli.{module}", function).split("\n\n")[0]
