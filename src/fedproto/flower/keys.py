"""Certificates, node keys and addresses of a federation: a folder per host."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedproto.disk.files import content, explained
from fedproto.errors import ConfigError

DAYS = 825
"""The longest that common TLS libraries accept for a server's certificate."""

SERVER_FILE, NODE_FILE = "server.json", "node.json"
ADDRESSES = {SERVER_FILE: ("public", "control"), NODE_FILE: ("client", "server")}
"""A host's settings beside its keys, by the file in its folder."""


def node_name(client: int) -> str:
    """The name under which a client's node is registered."""
    return f"client-{client}"


@dataclass(frozen=True)
class Keys:
    """The created files: a folder per host, to be copied there."""

    folder: Path

    @property
    def server(self) -> Path:
        """For the server's host."""
        return self.folder / "server"

    def node(self, client: int) -> Path:
        """For a client's host."""
        return self.folder / node_name(client)

    def public_key(self, client: int) -> Path:
        """The key that the server registers for a client's node."""
        return self.server / f"{node_name(client)}.pub"


def public_keys(server: Path) -> dict[int, Path]:
    """The clients' public keys in the server's folder, by client."""
    numbers = {path.stem.rpartition("-")[2]: path for path in server.glob("*.pub")}
    found = {int(number): path for number, path in numbers.items() if number.isdecimal()}
    return {client: found[client] for client in sorted(found)}


def as_pem(public_key: Path) -> bytes:
    """A public key of OpenSSH's file as Flower has it."""
    try:
        return serialization.load_ssh_public_key(content(public_key)).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{public_key} is not a public key of OpenSSH's; restore it, or remove it"
        ) from None


def fingerprint(public_key: Path | bytes) -> str:
    """A short fingerprint of a public key, in a file or as Flower has it."""
    pem = as_pem(public_key) if isinstance(public_key, Path) else public_key
    return hashlib.sha256(pem).hexdigest()[:32]


def read_addresses(folder: Path, name: str) -> dict[str, str]:
    """The addresses in a host's folder, from `SERVER_FILE` or `NODE_FILE`."""
    try:
        found = json.loads((folder / name).read_text(encoding="utf-8"))
        int(found.get("client", 0))
        return {key: str(found[key]) for key in ADDRESSES[name]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{folder} is not a {name.removesuffix('.json')}'s folder, its {name} is missing or of"
            " another version; make one with 'fedproto flower keys'"
        ) from None


def make_keys(folder: Path, hosts: Sequence[str], clients: int, port: int = 8000) -> Keys:
    """Writes a server certificate for some host names, which every host trusts, and client keys.

    Nodes reach the server at the first host and the port, its owner at the next port, on loopback.
    """
    if not hosts:
        raise ConfigError("name at least one host under which clients reach the server")
    server_key, keys = ec.generate_private_key(ec.SECP384R1()), Keys(folder)
    try:
        trusted = _certificate(server_key, hosts).public_bytes(serialization.Encoding.PEM)
    except ValueError as error:
        named = ", ".join(map(repr, hosts))
        raise ConfigError(f"no certificate can be made for the host {named}: {error}") from None
    with explained(folder, " cannot be written", "; choose another folder"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; keys are never overwritten, choose another")
        for part in (keys.server, *map(keys.node, range(clients))):
            part.mkdir(mode=0o700)
    host, anywhere = hosts[0], "0.0.0.0"  # noqa: S104 - nodes come from anywhere
    if ":" in host:  # IPv6
        host, anywhere = f"[{host}]", "[::]"
    addresses = {"public": f"{anywhere}:{port}", "control": f"127.0.0.1:{port + 1}"}
    _write(keys.server / "server.key", _secret(server_key), secret=True)
    _write(keys.server / "server.crt", trusted)
    _write(keys.server / SERVER_FILE, json.dumps(addresses).encode())
    for client in range(clients):
        node, key = keys.node(client), ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        facts = {"client": client, "server": f"{host}:{port}"}
        _write(node / "server.crt", trusted)
        _write(node / "node.key", _secret(key, serialization.PrivateFormat.OpenSSH), secret=True)
        _write(node / NODE_FILE, json.dumps(facts).encode())
        _write(keys.public_key(client), public + b"\n")
    return keys


def _certificate(key: ec.EllipticCurvePrivateKey, hosts: Sequence[str]) -> x509.Certificate:
    """A certificate that its own key signs, and that can sign no other."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    names: list[x509.GeneralName] = []
    # The app's process on the server's own host connects over loopback.
    for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    now = datetime.datetime.now(datetime.UTC)
    server_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of different hosts disagree a little.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(server_only, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA384())
    )


def _secret(
    key: ec.EllipticCurvePrivateKey,
    kind: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, kind, serialization.NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    # Created with its permissions, so that a secret is never readable by others, even for a moment.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
