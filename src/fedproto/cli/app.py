"""The entry point: finds the command and turns a user's mistakes into one-line errors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from fedproto.cli.ondemand import OnDemand
from fedproto.cli.options import set_for_command
from fedproto.cli.tables import echo
from fedproto.disk.limits import VARIABLE, limits
from fedproto.errors import FedprotoError
from fedproto.options.registry import load_plugin
from fedproto.version import __version__

app = typer.Typer(
    name="fedproto",
    cls=OnDemand,
    help="Federated learning of visual models, guided by prototypes.",
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
    context: typer.Context,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="Python file or module that adds strategies, data sets or models.",
            envvar="FEDPROTO_PLUGINS",
        ),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER",
            help="The most that files may make this machine unpack or allocate: file, members,"
            " classes, pixels, runs.",
            envvar=VARIABLE,
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of all commands."""
    del version
    if limit:
        set_for_command(context, VARIABLE, " ".join(limit))
        limits()
    for source in plugin or []:
        load_plugin(source)


def _plugins_first(arguments: list[str]) -> list[str]:
    """The arguments with ``--plugin`` where it is understood: before the command."""
    plugins: list[str] = []
    others: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument == "--":
            return [*plugins, *others, argument, *left]
        if argument == "--plugin":
            plugins += [argument, *itertools.islice(left, 1)]
        else:
            (plugins if argument.startswith("--plugin=") else others).append(argument)
    return [*plugins, *others]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit code is 0, 2 for a user's mistake, 130 when interrupted."""
    try:
        app(args=_plugins_first(list(sys.argv[1:] if arguments is None else arguments)))
    except FedprotoError as error:
        echo(f"error: {error}", err=True)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
