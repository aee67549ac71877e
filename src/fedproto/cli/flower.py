"""Run over Flower, on real machines."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedproto.cli.flower_runs import runs_here, runs_of
from fedproto.cli.progress import progress_for
from fedproto.cli.running import Out, Overrides, Quiet, Rounds, conclude
from fedproto.cli.terminal import DataRoot, echo
from fedproto.disk.files import Folder, write_atomically
from fedproto.errors import ConfigError, FedprotoError, install
from fedproto.store import RunStore

group = typer.Typer(name="flower", help=__doc__, no_args_is_help=True)

Source = Annotated[str, typer.Argument(help="A recipe, or the directory of a run to go on with.")]
ServerFolder = Annotated[
    Path, typer.Option("--server", help="The server's folder, made by 'fedproto flower keys'.")
]


@group.command()
def up(
    source: Source,
    overrides: Overrides = None,
    out: Out = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and node keys; only for trying out.")
    ] = False,
    logs: Annotated[
        Path | None,
        typer.Option(help="Keep keys, logs and databases here; a temporary folder by default."),
    ] = None,
    rounds: Rounds = None,
    quiet: Quiet = False,
    data_root: DataRoot = None,
) -> None:
    """Start a server and a node per client on this machine, run, and take all down again."""
    del data_root
    _need_flwr()
    from fedproto.flower.deploy import DeploymentError, deployment
    from fedproto.flower.keys import make_keys
    from fedproto.flower.server_app import INSECURE

    path, stores, clients = runs_here(source, overrides, out, rounds)
    if insecure:
        typer.secho(INSECURE, err=True, fg="red", bold=True)
    # Interrupts are waited for outside of all: what follows is taken down whatever else comes.
    with _interrupted(path, stores), contextlib.ExitStack() as stack:
        folder = logs or stack.enter_context(_kept_on_failure(path))
        secrets = None if insecure else make_keys(folder / "keys", ["localhost"], clients)
        typer.echo(f"starting a server and {clients} nodes; logs in {folder}", err=True)
        state = Folder(path).make("nodes")
        deployed = stack.enter_context(deployment(folder, secrets, clients, state=state))
        run = deployed.control.submit(path)
        link = deployed.link

        def still_there() -> None:
            if link is not None and link.exit_code is not None:
                raise DeploymentError(f"the SuperLink ended; see {link.log}")

        with progress_for(stores) as callback:
            deployed.control.follow(run, path, stores, callback, still_there)
    _summary(stores, quiet=quiet)


@group.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder; one part of it per host.")],
    host: Annotated[
        list[str],
        typer.Option(help="Name or address under which clients reach the server; may be repeated."),
    ],
    clients: Annotated[int, typer.Option(help="Number of clients.", min=1)],
    port: Annotated[
        int,
        typer.Option(
            help="The server's port for nodes; the one above it is its owner's, on loopback.",
            min=1,
            max=65534,
        ),
    ] = 8000,
    install: Annotated[
        Path, typer.Option(help="Where the folder of a host will lie on it, for systemd.")
    ] = Path("/etc/fedproto"),
) -> None:
    """Make certificates, node keys, start scripts and systemd units for several hosts."""
    _need_flwr()
    from fedproto.flower.hosts import write_host_files
    from fedproto.flower.keys import make_keys

    made = make_keys(folder, host, clients)
    write_host_files(made, host[0], port, clients, install)
    nodes = ", ".join(made.node(client).name for client in range(min(clients, 3)))
    more = ", …" if clients > 3 else ""
    typer.echo(
        f"Keys and commands for a server and {clients} clients are in {folder}:\n"
        f"  {made.authority.name}  the authority's secret: lock it away, no running host needs it\n"
        f"  {made.server.name}     copy to the server's host, as {install}\n"
        f"  {nodes}{more}  copy each to its client's host, as {install}\n"
        "On the server's host:\n"
        f"  {install}/superlink.sh                      (or fedproto-superlink.service)\n"
        f"  fedproto flower register --server {install}\n"
        "On every client's host:\n"
        f"  {install}/supernode.sh                      (or fedproto-supernode.service)\n"
        "On the server's host again:\n"
        f"  fedproto flower submit RECIPE --server {install} --out DIRECTORY"
    )


@group.command()
def register(server: ServerFolder) -> None:
    """Make the clients' keys known to the server that runs on this host."""
    _need_flwr()
    from fedproto.flower.keys import public_keys

    control = _control(server)
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
    data_root: DataRoot = None,
) -> None:
    """Run a recipe on the server that runs on this host, or go on with a run."""
    del data_root
    _need_flwr()
    path, stores = runs_of(source, overrides, out, rounds)
    control = _control(server)
    with _interrupted(path, stores) as on_interrupt:
        run = control.submit(path)
        on_interrupt(lambda: control.stop(run))
        typer.echo(f"run {run} in {path}", err=True)
        with progress_for(stores) as callback:
            control.follow(run, path, stores, callback)
    _summary(stores, quiet=quiet)


@group.command()
def simulate(
    source: Source,
    overrides: Overrides = None,
    out: Out = None,
    rounds: Rounds = None,
    quiet: Quiet = False,
    data_root: DataRoot = None,
) -> None:
    """Run on Flower's simulation engine (Ray), for clients spread over a cluster."""
    del data_root
    _need_flwr()
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"Ray is not installed; {install('ray')}")
    from fedproto.flower.ray import simulate_on_ray

    path, stores, clients = runs_here(source, overrides, out, rounds)
    with _interrupted(path, stores), progress_for(stores) as callback:
        simulate_on_ray(path, clients, callback)
    _summary(stores, quiet=quiet)


@group.command()
def privacy(
    noise: Annotated[float, typer.Option(help="Noise multiplier, as in --node-config noise=….")],
    rounds: Annotated[int, typer.Option(help="Rounds that a client takes part in.")],
    delta: Annotated[float, typer.Option(help="The δ.")] = 1e-5,
) -> None:
    """Show the (ε, δ) of noisy prototypes, and what it does not cover."""
    from fedproto.flower.privacy import epsilon

    typer.echo(
        f"prototypes, counts and margins of {rounds} rounds with noise {noise:g}:"
        f" ε = {epsilon(noise, rounds, delta):.3g} at δ = {delta:g}\n"
        "for data sets that differ in one sample. Not covered: the trained weights, the training"
        " loss and the test sums, which are sent as they are."
    )


def _need_flwr() -> None:
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError(f"Flower is not installed; {install('flower')}")


def _control(server: Path) -> Any:
    from fedproto.flower.deploy import Control
    from fedproto.flower.hosts import SERVER_FILE

    try:
        address = json.loads((server / SERVER_FILE).read_text(encoding="utf-8"))["control"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{server} is no server's folder of this version; make one with 'fedproto flower keys'"
        ) from None
    return Control(server / "control", str(address), server)


@contextlib.contextmanager
def _interrupted(
    path: Path, stores: Sequence[RunStore]
) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Turns Ctrl-C, and a request to end from outside, into exit code 130 and a helpful line.

    Only the first counts: until all is taken down, further ones are ignored.
    """
    actions: list[Callable[[], None]] = []
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end(number: int, frame: object) -> None:
        del number, frame
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield actions.append
    except KeyboardInterrupt:
        for action in actions:
            action()
        done = sum(len(store.records()) for store in stores)
        typer.echo(f"stopped; {done} rounds are safe: go on with this directory: {path}", err=True)
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


def _summary(stores: Sequence[RunStore], *, quiet: bool) -> None:
    for store in stores:
        for record in store.records():
            reasons = [f"client {client}: {why}" for client, why in record.failures.items()]
            for text in [*reasons, *([record.note] if record.note else [])]:
                echo(f"{store.config.title}, round {record.round + 1}: {text}", err=True)
    conclude(stores, quiet=quiet)
