"""The entry point: imports the command that was called, and turns mistakes into one-line errors.

Most commands need PyTorch, which takes seconds to import; `fedproto --help` does not. Its line
about a command is the first paragraph of the command's docstring, read from the source.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from fedproto.cli.terminal import echo
from fedproto.errors import ConfigError, FedprotoError
from fedproto.options import load_plugin, load_plugins
from fedproto.version import __version__

if TYPE_CHECKING:
    from click import Command, Context

COMMANDS = {
    "run": ("running", "run"),
    "sweep": ("running", "sweep"),
    "resume": ("running", "resume"),
    "predict": ("using", "predict"),
    "export": ("using", "export_run"),
    "compare": ("comparing", "compare"),
    "best": ("comparing", "best"),
    "tune": ("running", "tune_recipe"),
    "analyse": ("using", "analyse_runs"),
    "report": ("comparing", "report"),
    "reproduce": ("app", "reproduce"),
    "list": ("inspecting", "list_known"),
    "info": ("inspecting", "info"),
    "check": ("inspecting", "check"),
    "data": ("data", ""),
    "flower": ("flower", ""),
}
"""The module and the function of each command; a group of commands has no function."""

_CHECKOUT = Path(__file__).resolve().parents[3]


class OnDemand(TyperGroup):
    """Knows the names of all commands, and imports the one that is called."""

    def list_commands(self, ctx: Context) -> list[str]:
        """All commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        """A stand-in with the command's summary, for the help."""
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=summary(cmd_name))

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, Command | None, list[str]]:
        """The command that was called, with all its options."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(name) if name in COMMANDS else None, rest


def command(name: str) -> Command:
    """A command with all its options; imports what it needs."""
    module, function = COMMANDS[name]
    home, gathered = importlib.import_module(f"fedproto.cli.{module}"), typer.Typer()
    if not function:
        gathered.add_typer(home.group)
    elif name != "reproduce":
        gathered.command(name)(getattr(home, function))
    elif "paper" in sys.modules or (_CHECKOUT / "paper/command.py").is_file():
        sys.path.insert(0, str(_CHECKOUT))
        gathered.command(name)(importlib.import_module("paper.command").reproduce)
    else:  # its options are unknown here: whatever they are, the answer is where it runs
        unread = {"allow_extra_args": True, "ignore_unknown_options": True}
        gathered.command(name, context_settings=unread)(reproduce)
    return typer.main.get_group(gathered).commands[name]


def summary(name: str) -> str:
    """The first paragraph of a command's docstring, read without importing its module."""
    module, function = COMMANDS[name]
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text("utf-8"))
    named = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    text = ast.get_docstring(named[function] if function else tree) or ""
    return text.split("\n\n")[0]


def reproduce() -> None:
    """Reproduce tables and figures of the paper, from a checkout of the repository."""
    raise ConfigError(
        "fedproto reproduce runs from a checkout of the repository: clone it, install it with"
        " pip install -e '.[paper]' in its folder, and try again"
    )


app = typer.Typer(
    name="fedproto",
    cls=OnDemand,
    help="Federated learning of visual models, guided by prototypes.",
    epilog="First steps: 'fedproto run quickstart', then 'fedproto list'.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fedproto {__version__}")
        raise typer.Exit


@app.callback()
def common(
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="Python file or module that adds strategies, data sets or models; repeatable."
            " Also in FEDPROTO_PLUGINS, separated as in PATH."
        ),
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the downloaded data sets; a per-user cache by default.",
            envvar="FEDPROTO_DATA",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of all commands; they may also come after the command's name."""
    del version
    if data_root is not None:
        os.environ["FEDPROTO_DATA"] = str(data_root)
    load_plugins()
    for source in plugin or []:
        load_plugin(source)


_ANYWHERE = ("--plugin", "--data-root")


def _common_first(arguments: list[str]) -> list[str]:
    """The arguments with the options of all commands where they are understood: before it."""
    common: list[str] = []
    others: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            return [*common, *others, argument, *left]
        if argument in _ANYWHERE:
            common += [argument, *itertools.islice(left, 1)]
        else:
            (common if argument.partition("=")[0] in _ANYWHERE else others).append(argument)
    return [*common, *others]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 0, 2 for a user's mistake, 130 when interrupted."""
    try:
        app(args=_common_first(list(sys.argv[1:] if arguments is None else arguments)))
    except FedprotoError as error:
        echo(f"error: {error}", err=True)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
