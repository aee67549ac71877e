"""Deploy over Flower, on real machines."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedproto.api.progress import progress_for
from fedproto.cli.running import Out, Overrides, Quiet, Rounds, conclude, fresh_directory, prolong
from fedproto.config import RunConfig
from fedproto.config.recipe import read_recipe
from fedproto.disk.files import Folder, write_atomically
from fedproto.errors import ConfigError, FedprotoError, StoreError, install
from fedproto.rounds import load_federations
from fedproto.store import RunStore, is_run
from fedproto.store.sweeps import create_sweep, is_sweep, open_runs

if importlib.util.find_spec("flwr") is None:
    raise ConfigError(f"Flower is not installed; {install('flower')}")

from fedproto.flower.deploy import become_host, control_of, deployment
from fedproto.flower.keys import make_keys, public_keys

group = typer.Typer(name="flower", help=__doc__, no_args_is_help=True)

Source = Annotated[str, typer.Argument(help="A recipe, or the directory of a run to continue.")]
ServerFolder = Annotated[
    Path, typer.Option("--server", help="The server's folder, made by 'fedproto flower keys'.")
]


@group.command()
def up(
    source: Source,
    overrides: Overrides = None,
    out: Out = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for keys and logs; default: a temporary one.")
    ] = None,
    rounds: Rounds = None,
    quiet: Quiet = False,
) -> None:
    """Start a server and a node per client on this machine, run, and shut everything down."""
    path, stores, clients = _runs_of(source, overrides, out, rounds, data_here=True)
    # Interrupts are caught outside of all: the processes are taken down whatever else comes.
    with _interrupted(path, stores), contextlib.ExitStack() as stack:
        folder = logs or stack.enter_context(_kept_on_failure(path))
        secrets = make_keys(folder / "keys", ["localhost"], clients)
        typer.echo(f"starting a server and {clients} nodes; logs in {folder}", err=True)
        state = Folder(path).make("nodes")
        deployed = stack.enter_context(deployment(folder, secrets, clients, state=state))
        run = deployed.control.submit(path)
        with progress_for(stores) as callback:
            deployed.control.follow(run, path, stores, callback, deployed.check)
    conclude(stores, quiet=quiet)


@group.command()
def keys(
    folder: Annotated[
        Path, typer.Argument(help="New folder for the keys, with a folder per host.")
    ],
    host: Annotated[
        list[str],
        typer.Option(help="Name or address under which clients reach the server; repeatable."),
    ],
    clients: Annotated[int, typer.Option(help="Number of clients.", min=1)],
    port: Annotated[
        int,
        typer.Option(
            min=1, max=65534, help="Port for nodes; the next one is the owner's, on loopback."
        ),
    ] = 8000,
) -> None:
    """Make certificates and node keys for several hosts."""
    made = make_keys(folder, host, clients, port)
    typer.echo(
        f"Keys of a server and {clients} clients are in {folder}:\n"
        f"  {made.server.name}        copy to the server's host, as FOLDER\n"
        f"  {made.node(0).name}, …   copy each to its client's host, as FOLDER\n"
        "On every host:              fedproto flower start FOLDER\n"
        "On the server's host, once: fedproto flower register --server FOLDER\n"
        "On the server's host:       fedproto flower submit RECIPE --server FOLDER --out DIRECTORY"
    )


@group.command()
def start(
    folder: Annotated[Path, typer.Argument(help="This host's folder of 'fedproto flower keys'.")],
    node_config: Annotated[
        str,
        typer.Option(
            envvar="FEDPROTO_NODE_CONFIG",
            help="Settings of the host's owner, such as 'local-client=0 threads=1'.",
        ),
    ] = "",
) -> None:
    """Start the server or the node of a folder of keys."""
    become_host(folder.resolve(), node_config)


@group.command()
def register(server: ServerFolder) -> None:
    """Register the clients' keys with the server on this host."""
    control = control_of(server)
    found = public_keys(server)
    if not found:
        raise ConfigError(f"{server} has no keys of clients (client-0.pub and so on)")
    for path in found.values():
        control.register(path, path.stem)
        typer.echo(f"registered {path.stem}")


@group.command()
def submit(
    source: Source,
    server: ServerFolder,
    overrides: Overrides = None,
    out: Out = None,
    rounds: Rounds = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe on the server on this host, or continue a run."""
    control = control_of(server)
    path, stores, _ = _runs_of(source, overrides, out, rounds, data_here=False)
    with _interrupted(path, stores):
        run = control.submit(path)
        typer.echo(f"run {run} in {path}", err=True)
        try:
            with progress_for(stores) as callback:
                control.follow(run, path, stores, callback)
        except KeyboardInterrupt:
            control.stop(run)
            raise
    conclude(stores, quiet=quiet)


def _runs_of(
    source: str,
    overrides: Sequence[str] | None,
    out: Path | None,
    rounds: int | None,
    *,
    data_here: bool,
) -> tuple[Path, list[RunStore], int]:
    """The directory of a recipe's runs, made now, or of runs to continue.

    Where all data is on this machine, it is loaded before anything is written, so that a mistake
    leaves nothing behind; the number of clients comes last, otherwise 0.
    """
    path = Path(source)
    if is_run(path) or is_sweep(path):
        if overrides or out:
            raise ConfigError(f"{source} is a run: it continues as it is, without --set and --out")
        if rounds is not None:
            prolong(path, rounds)
        stores = open_runs(path)
        if all(store.finished for store in stores):
            raise StoreError(f"{source} is finished; give it more rounds with --rounds")
        clients = _number_of_clients([store.config for store in stores]) if data_here else 0
        return path, stores, clients
    number = [] if rounds is None else [f"schedule.rounds={rounds}"]
    read = read_recipe(source, [*(overrides or []), *number])
    configs = {name: config.defended() for name, config in read.items()}
    clients = _number_of_clients(configs.values()) if data_here else 0
    for name, config in configs.items():
        if data_here:
            configs[name] = replace(config, flower=replace(config.flower, clients=clients))
    path = out or fresh_directory(source)
    if len(configs) > 1:
        return path, create_sweep(path, configs), clients
    (config,) = configs.values()
    return path, [RunStore.create(path, config)], clients


def _number_of_clients(configs: Iterable[RunConfig]) -> int:
    numbers = {len(federation.clients) for federation in load_federations(configs).values()}
    if len(numbers) > 1:
        raise ConfigError(f"the runs have different numbers of clients: {sorted(numbers)}")
    return numbers.pop()


@contextlib.contextmanager
def _interrupted(path: Path, stores: Sequence[RunStore]) -> Iterator[None]:
    """Turns Ctrl-C, and a request to end from outside, into exit code 130 and a helpful line.

    Only the first counts: until all is taken down, further ones are ignored.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end(number: int, frame: object) -> None:
        del number, frame
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        done = sum(len(store.records()) for store in stores)
        typer.echo(
            f"stopped; {done} rounds are safe; continue with this directory: {path}", err=True
        )
        raise typer.Exit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _kept_on_failure(path: Path) -> Iterator[Path]:
    """A temporary folder for keys and logs; the logs are kept beside the run if it fails."""
    with tempfile.TemporaryDirectory(prefix="fedproto-") as name:
        folder = Path(name)
        try:
            yield folder
        except FedprotoError as error:
            kept = Folder(path).make("flower-logs")
            for log in folder.glob("*.log"):
                write_atomically(kept / log.name, log.read_bytes())
            raise type(error)(f"{str(error).replace(name, str(kept))} (logs: {kept})") from None
