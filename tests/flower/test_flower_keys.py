"""Keys, the commands around them, and a core that does without Flower."""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
import subprocess
import sys

import pytest

from fedproto.cli import main

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedproto[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedproto.errors import ConfigError
from fedproto.flower.deploy import environment
from fedproto.flower.keys import fingerprint, make_keys


@pytest.fixture
def made(tmp_path, capsys):
    folder = tmp_path / "keys"
    arguments = ["flower", "keys", str(folder), "--host", "fl.example.org", "--host", "10.0.0.7"]
    assert main([*arguments, "--clients", "2", "--port", "8123"]) == 0
    return folder, capsys.readouterr().out


def test_every_host_gets_its_own_folder_and_no_other_secret(made):
    folder, output = made
    parts = {path.name: {file.name for file in path.iterdir()} for path in folder.iterdir()}
    assert parts == {
        "server": {"server.crt", "server.key", "server.json", "client-0.pub", "client-1.pub"},
        "client-0": {"server.crt", "node.key", "node.json"},
        "client-1": {"server.crt", "node.key", "node.json"},
    }
    for secret in folder.rglob("*.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    # A server's folder comes to hold its database: messages, names and addresses of clients.
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in parts} == {0o700}
    assert "fedproto flower start FOLDER" in output


def test_the_server_certificate_names_its_hosts_and_can_sign_no_other(made):
    folder, _ = made
    certificate = x509.load_pem_x509_certificate((folder / "server/server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["10.0.0.7", "127.0.0.1"]
    limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not limits.ca
    trusted = (folder / "client-1/server.crt").read_bytes()
    assert trusted == (folder / "server/server.crt").read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server/server.crt", folder / "server/server.key")


def test_nodes_trust_the_server_and_nobody_with_another_certificate(made, tmp_path):
    folder, _ = made
    other = make_keys(tmp_path / "other", ["fl.example.org"], 1)
    for server, trusted in ((folder / "server", True), (other.server, False)):
        listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        listening.load_cert_chain(server / "server.crt", server / "server.key")
        node = ssl.create_default_context(cafile=str(folder / "client-0/server.crt"))
        ends = [ssl.MemoryBIO() for _ in range(2)]
        near = node.wrap_bio(ends[0], ends[1], server_hostname="fl.example.org")
        far = listening.wrap_bio(ends[1], ends[0], server_side=True)
        steps = contextlib.suppress(ssl.SSLWantReadError)
        with steps:
            near.do_handshake()
        with steps:
            far.do_handshake()
        if trusted:
            near.do_handshake()
            assert near.getpeercert()
        else:
            with pytest.raises(ssl.SSLCertVerificationError):
                near.do_handshake()


def test_a_node_key_fits_the_public_key_that_the_server_registers(made):
    folder, _ = made
    private = load_ssh_private_key((folder / "client-1/node.key").read_bytes(), None)
    public = load_ssh_public_key((folder / "server/client-1.pub").read_bytes())
    assert private.public_key() == public


@pytest.fixture
def become(tmp_path, monkeypatch):
    """The mask of files, the command and the environment that would replace this process."""
    found = []
    monkeypatch.setattr(os, "execve", lambda *given: found.extend(given))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "umask", found.append)
    return found


def test_a_host_starts_what_its_folder_is_for(made, become, monkeypatch):
    folder, _ = made
    monkeypatch.setenv("FEDPROTO_NODE_CONFIG", "threads=2")
    monkeypatch.delenv("FEDPROTO_STATE")
    assert main(["flower", "start", str(folder / "client-1")]) == 0
    mask, _, command, settings = become
    assert mask == 0o077  # what the host's processes write is for its user alone
    assert command[3:5] == ["fedproto.flower.programs", "supernode"]
    assert command[command.index("--superlink") + 1] == "fl.example.org:8123"
    assert command[command.index("--node-config") + 1] == "partition-id=1 threads=2"
    assert command[command.index("--port") + 1] == "9095"
    assert settings["FEDPROTO_STATE"] == str(folder / "client-1" / "state")
    become.clear()
    monkeypatch.chdir(folder)
    for name in ("FEDPROTO_STATE", "FEDPROTO_DATA"):  # it leaves this directory
        monkeypatch.setenv(name, "beside")
    assert main(["flower", "start", "server"]) == 0
    assert {become[3][name] for name in ("FEDPROTO_STATE", "FEDPROTO_DATA")} == {f"{folder}/beside"}
    command = become[2]
    assert command[3:5] == ["fedproto.flower.programs", "superlink"]
    assert command[command.index("superlink") + 1] == "0.0.0.0:8123"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "8124"


def test_plugins_reach_the_nodes(tmp_path, monkeypatch):
    for name in ("mine.py", "other.py"):
        (tmp_path / name).write_text("'Adds nothing.'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedproto.options._loaded", [])
    assert main(["list", "engines", "--plugin=mine.py", "--plugin=other.py"]) == 0
    plugins = environment(tmp_path / "home")["FEDPROTO_PLUGINS"].split(os.pathsep)
    assert plugins == [str(tmp_path / name) for name in ("mine.py", "other.py")], (
        "an absolute path: nodes run elsewhere"
    )


def test_a_server_is_reached_by_an_address_of_ipv6_too(tmp_path, become):
    keys = make_keys(tmp_path / "keys", ["::1", "fl.example.org"], 1)
    for folder, address in ((keys.server, "[::]:8000"), (keys.node(0), "[::1]:8000")):
        become.clear()
        assert main(["flower", "start", str(folder)]) == 0
        assert address in become[2]


def test_more_clients_than_a_cohort_has_cannot_be_required(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["flower", "up", "quickstart", "--set=flower.min_clients=99"]) == 2
    assert "flower.min_clients must be at most schedule.cohort" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_keys_are_never_overwritten(made, capsys):
    folder, _ = made
    before = (folder / "server/server.key").read_bytes()
    assert main(["flower", "keys", str(folder), "--host", "x", "--clients", "1"]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (folder / "server/server.key").read_bytes() == before


@pytest.mark.parametrize(
    ("host", "said"), [("", "''"), ("münchen.de", "A-label"), ("x", "keys is not empty")]
)
def test_keys_for_an_impossible_host_or_folder_are_refused(tmp_path, capsys, host, said):
    folder = tmp_path / "keys"
    if host == "x":
        (folder / "notes").mkdir(parents=True)
    command = ["flower", "keys", str(folder), f"--host={host}", "--clients=1"]
    assert main(command) == 2
    assert said in capsys.readouterr().err
    assert host == "x" or not folder.exists()
    (tmp_path / "file").touch()
    command[2] = str(tmp_path / "file")
    assert main([*command, "--host=y"] if host == "x" else command) == 2


def test_damaged_files_of_a_host_are_named(made, capsys):
    folder, _ = made
    (folder / "client-0/node.json").write_text('{"client": "x", "server": "y"}')
    assert main(["flower", "start", str(folder / "client-0")]) == 2
    assert "is not a node's folder" in capsys.readouterr().err
    for damage in (b"", b"ssh-rsa what"):
        (folder / "server/client-0.pub").write_bytes(damage)
        with pytest.raises(ConfigError, match=r"client-0\.pub is not a public key"):
            fingerprint(folder / "server/client-0.pub")


@pytest.mark.parametrize("command", [["register", "--server"], ["start"]])
def test_a_folder_that_is_not_a_servers_is_named(tmp_path, capsys, command):
    assert main(["flower", *command, str(tmp_path)]) == 2
    assert f"{tmp_path} is not a server's folder" in capsys.readouterr().err


def test_a_server_that_does_not_run_is_an_error_of_one_line(made, capsys):
    folder, _ = made
    out = folder / "run"
    for command in (["register"], ["submit", "quickstart", "--out", str(out)]):
        assert main(["flower", *command, "--server", str(folder / "server")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: no server answers")
        assert len(error.splitlines()) == 1
    assert not out.exists(), "the same command works once the server runs"


def test_up_takes_no_options_for_a_run_that_goes_on(tmp_path, capsys):
    from fedproto.config import read_config
    from fedproto.store import RunStore
    from flower_runs import tables

    store = RunStore.create(tmp_path / "run", read_config(tables()))
    assert main(["flower", "up", str(store.path), "--set", "seed=1"]) == 2
    assert "continues as it is" in capsys.readouterr().err


WITHOUT = """
import sys
for name in ("flwr", "cryptography"):
    sys.modules[name] = None
from fedproto.cli import main
assert main(["list"]) == 0
small = ["schedule.rounds=1", "schedule.cohort=2", "data.clients=3", "engine.name=reference"]
options = [word for setting in small for word in ("--set", setting)]
assert main(["run", "quickstart", *options, "-q", "--out", sys.argv[1]]) == 0
sys.exit(main(["flower", "up", "quickstart"]))
"""


def test_the_core_works_without_flower_and_says_what_to_install(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "'flwr<2,>=" in done.stderr
