"""A stranger who has the federation's certificate, and a second key under a client's name."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tomllib
import zipfile

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, RecordDict
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StartRunResponse,
    StopRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES

from fedproto.cli import main
from fedproto.config import read_config
from fedproto.flower import nodes, programs
from fedproto.flower.deploy import Control, Deployment, DeploymentError
from fedproto.flower.keys import SERVER_FILE, as_pem, fingerprint, make_keys, public_keys
from fedproto.flower.programs import NODE_CALLS, Gateway, is_owner
from fedproto.flower.server_app import app, serve
from fedproto.store import RunStore
from flower_grid import LocalGrid
from flower_runs import CLIENTS, tables

NOBODY = 65534


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with TLS on loopback, one registered client and no node."""
    folder = tmp_path_factory.mktemp("server")
    deployed = Deployment(folder / "flower", make_keys(folder / "keys", ["localhost"], 1))
    try:
        deployed.start_link()
        deployed.register(0)
        yield deployed
    finally:
        deployed.end()


@pytest.mark.timeout(300)
def test_the_certificate_alone_lists_registers_submits_and_stops_nothing(server, tmp_path):
    """What lies on every client's host: server.crt, and a key that the stranger made."""
    own = make_keys(tmp_path / "own", ["localhost"], 1)
    stranger = Control(server.public, server.keys.node(0))
    store = RunStore.create(tmp_path / "run", read_config(tables()))
    key = RegisterNodeRequest(public_key=as_pem(own.public_key(0)), name="client-0")
    for act in (
        lambda: stranger.call("ListNodes", ListNodesRequest()),
        lambda: stranger.call("RegisterNode", key),
        lambda: stranger.register(own.public_key(0), "client-0"),
        lambda: stranger.submit(store.path),
        lambda: stranger.status(1),
        lambda: stranger.call("StopRun", StopRunRequest(run_id=1)),
    ):
        with pytest.raises(DeploymentError, match="404 Not Found"):
            act()
    # The owner, on loopback, sees client 0; nothing else was registered.
    found = server.control.call("ListNodes", ListNodesRequest()).nodes_info
    assert "registered" in {node.status for node in found}
    assert key.public_key not in {node.public_key for node in found}


@pytest.mark.timeout(120)
def test_the_public_port_has_the_calls_of_registered_nodes_and_nothing_else(server):
    trusted = ssl.create_default_context(cafile=str(server.keys.node(0) / "server.crt"))
    pages = [("GET", "/health"), ("GET", "/docs"), ("GET", "/openapi.json")]
    with httpx.Client(verify=trusted, base_url=f"https://{server.public}") as client:
        found = {
            path: client.request(
                method, path, headers={"content-type": PROTOBUF_MEDIA_TYPE}
            ).status_code
            for method, path in [*PROTOBUF_REQUEST_TYPES, *pages]
        }
    assert {path for path, status in found.items() if status != 404} == NODE_CALLS
    assert {found[path] for path in NODE_CALLS} == {401}
    assert len(found) > len(NODE_CALLS) + 40


def status(server, *headers: str, user: int | None = None) -> str:
    """What the owner's port answers."""
    ask = ["curl", "-sk", "-o", "/dev/null", "-w", "%{http_code}"]
    ask += [part for header in headers for part in ("-H", header)]
    ask.append(f"https://{server.control.address}/health")
    return subprocess.run(ask, capture_output=True, text=True, check=True, user=user).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.timeout(60)
def test_another_user_of_the_servers_host_does_not_reach_the_owners_port(server):
    host, _, port = server.control.address.rpartition(":")
    assert status(server) == "200"
    assert status(server, user=NOBODY) == "404"
    # Everybody can read in /proc/net/tcp where the owner's connections come from.
    with socket.create_connection((host, int(port))) as owners:
        forged = "X-Forwarded-For: {}:{}".format(*owners.getsockname())
        assert status(server, forged, user=NOBODY) == "404"


@pytest.mark.timeout(60)
def test_a_header_does_not_say_whose_a_connection_is(server):
    assert status(server, "X-Forwarded-For: 127.0.0.1:1") == "200"


@pytest.mark.parametrize(
    ("scope", "passes"),
    [
        ({"type": "lifespan"}, True),
        ({"type": "http", "server": ("10.0.0.1", 8000), "path": "/v1/fleet/get-run"}, True),
        ({"type": "http", "server": ("10.0.0.1", 8000), "path": "/v1/fleet/get-run/"}, False),
        ({"type": "http", "server": ("10.0.0.1", 8001), "path": "/v1/control/list-runs"}, False),
        ({"type": "http", "server": None, "path": "/v1/control/list-runs"}, False),
        # No process is behind this one.
        (
            {
                "type": "http",
                "server": ("127.0.0.1", 8001),
                "client": ("127.0.0.1", 1),
                "path": "/v1/control/list-runs",
            },
            False,
        ),
        ({"type": "websocket", "server": ("10.0.0.1", 8000), "path": "/"}, False),
    ],
)
def test_a_request_is_judged_by_where_it_arrived_and_its_exact_path(scope, passes):
    reached, sent = [], []

    async def flowers(scope, receive, send):
        del receive, send
        reached.append(scope)

    async def send(event):
        sent.append(event)

    asyncio.run(Gateway(flowers, ("127.0.0.1", 8001))(scope, None, send))
    assert bool(reached) == passes
    assert bool(sent) != passes


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists whose a connection is")
def test_whose_a_connection_is_says_its_own_line_alone(tmp_path, monkeypatch):
    table = tmp_path / "tcp"
    monkeypatch.setattr(programs, "CONNECTIONS", table)
    here, there = ("127.0.0.1", 8001), ("127.0.0.1", 40000)
    own, other = os.getuid(), os.getuid() + 1
    ends = "0100007F:9C40 0100007F:1F41"  # of the client, then of the server

    def admitted(line: str) -> bool:
        table.write_text(f"sl local_address rem_address st ...\n{line}\n")
        return is_owner(there, here)

    assert admitted(f"0: {ends} 01 0:0 00:0 0 {own} 0 1")
    assert admitted(f"0: {ends} 01 0:0 00:0 0 0 0 1")
    assert not admitted(f"0: {ends} 01 0:0 00:0 0 {other} 0 1")
    # Of one that its process has closed Linux says that it is root's.
    assert not admitted(f"0: {ends} 04 0:0 00:0 0 0 0 1")
    # The server's own end is the server's user's, whoever has the other.
    assert not admitted(f"0: {' '.join(reversed(ends.split()))} 01 0:0 00:0 0 {own} 0 1")
    assert not admitted("")
    assert not is_owner(None, here)


@pytest.mark.timeout(120)
def test_a_key_that_replaces_a_stolen_one_is_registered_beside_those_that_are(server, tmp_path):
    """As the guide says it: replace the file, register again. The other keys are known already."""
    folder = shutil.copytree(server.keys.server, tmp_path / "server")
    addresses = {"public": server.public, "control": server.control.address}
    (folder / SERVER_FILE).write_text(json.dumps(addresses))
    renewed = make_keys(tmp_path / "renewed", ["localhost"], 2).public_key(1)
    shutil.copy(renewed, folder / "client-1.pub")
    for _ in range(2):
        assert main(["flower", "register", "--server", str(folder)]) == 0
    found = server.control.call("ListNodes", ListNodesRequest()).nodes_info
    assert sorted(node.name for node in found) == ["client-0", "client-1"]
    assert as_pem(renewed) in {node.public_key for node in found}
    # The owner is told what Flower says.
    again = RegisterNodeRequest(public_key=as_pem(renewed), name="client-1")
    with pytest.raises(DeploymentError, match="Public key already in use"):
        server.control.call("RegisterNode", again)


def test_a_run_is_asked_for_only_once(server, monkeypatch):
    """A server that does not answer in time may have started it."""
    asked = []

    def slow(_, request):
        asked.append(request)
        raise httpx.ReadTimeout("timed out")

    monkeypatch.setattr(ControlHttpClient, "StartRun", slow)
    with pytest.raises(DeploymentError, match="StartRun failed: timed out"):
        server.control.call("StartRun", StartRunRequest())
    assert len(asked) == 1


def a_key() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def test_a_second_key_under_a_clients_name_never_takes_part_as_that_client(tmp_path, monkeypatch):
    """Client 0 is away, when the run begins and when it goes on; who comes is not client 0."""
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "LOOK_EVERY", 0.01)
    own = {1000 + client: a_key() for client in range(CLIENTS)}
    bound = {client: fingerprint(own[1000 + client]) for client in range(CLIENTS)}

    def grid(*, impostor: bool) -> LocalGrid:
        made = LocalGrid(range(CLIENTS))
        made.keys = own | ({1000: a_key()} if impostor else {})
        made.names = {node: f"client-{client}" for node, client in made.clients.items()}
        return made

    everyone = {"cohort": CLIENTS, "delta": 0.0, "rounds": 1}
    store = RunStore.create(tmp_path / "run", read_config(tables(schedule=everyone)))
    for rounds, impostor in ((1, True), (2, False), (3, True)):
        config = read_config(tables(schedule=everyone | {"rounds": rounds}))
        store.reconfigure(config)
        serve(grid(impostor=impostor), store.path, keys=bound)
    first, second, third = store.records()
    assert [record.failures.keys() for record in (first, second, third)] == [{0}, set(), {0}]
    assert "its key is not that of client 0" in first.note
    assert "node client-0 rejected" in first.note


def test_a_submitted_run_knows_the_clients_keys(tmp_path, monkeypatch):
    """From the server's folder to the app, which turns the second key of client 0 away."""
    monkeypatch.setattr(nodes, "PULL_EVERY", 0.01)
    monkeypatch.setattr(nodes, "LOOK_EVERY", 0.01)
    keys = make_keys(tmp_path / "keys", ["localhost"], CLIENTS)
    everyone = {"cohort": CLIENTS, "delta": 0.0, "rounds": 1}
    store = RunStore.create(tmp_path / "run", read_config(tables(schedule=everyone)))
    asked = []

    def call(control, name, request):
        del control, name
        asked.append(request)
        return StartRunResponse(run_id=1)

    monkeypatch.setattr(Control, "call", call)
    Control("localhost:1", keys.server).submit(store.path)
    ((request,), grid) = asked, LocalGrid(range(CLIENTS))
    with zipfile.ZipFile(io.BytesIO(request.fab.content)) as fab:
        about = tomllib.loads(fab.read("pyproject.toml").decode())
    grid.keys = {1000 + client: as_pem(keys.public_key(client)) for client in range(CLIENTS)}
    grid.keys[1000] = a_key()
    app(grid, Context(1, 1, {}, RecordDict(), about["tool"]["flwr"]["app"]["config"]))
    (record,) = store.records()
    assert record.failures.keys() == {0}
    assert "its key is not that of client 0" in record.note


def test_the_fingerprint_of_a_key_is_the_same_on_disk_and_from_flower(tmp_path):
    keys = make_keys(tmp_path / "keys", ["localhost"], 11)
    found = public_keys(keys.server)
    assert list(found) == list(range(11))
    public = serialization.load_ssh_public_key(found[10].read_bytes())
    as_flower = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert fingerprint(found[10]) == fingerprint(as_flower)
