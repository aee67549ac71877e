"""Certificates and node keys: a certificate authority, a server's certificate, a key per client."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedproto.errors import ConfigError

DAYS = 825
"""The longest that common TLS libraries accept for a server's certificate."""


_PREFIX = "client-"


def node_name(client: int) -> str:
    """The name under which a client's node is registered."""
    return f"{_PREFIX}{client}"


def is_node_name(name: str) -> bool:
    """Whether a name is one of ours, and so binds a key to a client."""
    return name.startswith(_PREFIX)


@dataclass(frozen=True)
class Keys:
    """Where the files are: a folder per host, to be copied there, and one to be locked away."""

    folder: Path

    @property
    def authority(self) -> Path:
        """For the authority's secret, which no running host needs."""
        return self.folder / "authority"

    @property
    def server(self) -> Path:
        """For the server's host."""
        return self.folder / "server"

    def node(self, client: int) -> Path:
        """For a client's host."""
        return self.folder / node_name(client)

    def public_key(self, client: int) -> Path:
        """What the server registers of a client's node."""
        return self.server / f"{node_name(client)}.pub"


def public_keys(server: Path) -> dict[int, Path]:
    """The clients' public keys in the server's folder, by client."""
    numbers = {path.stem.rpartition("-")[2]: path for path in server.glob("*.pub")}
    found = {int(number): path for number, path in numbers.items() if number.isdecimal()}
    return {client: found[client] for client in sorted(found)}


def fingerprint(public_key: Path | bytes) -> str:
    """A short fingerprint of a public key: of OpenSSH's file, or as Flower has it (PEM)."""
    if isinstance(public_key, Path):
        public_key = serialization.load_ssh_public_key(public_key.read_bytes()).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    return hashlib.sha256(public_key).hexdigest()[:32]


def make_keys(folder: Path, hosts: Sequence[str], clients: int) -> Keys:
    """Writes an authority, a server certificate for some host names, and a key per client."""
    if not hosts:
        raise ConfigError("name at least one host under which clients reach the server")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; keys are never overwritten, choose another")
    keys = Keys(folder)
    for part in (folder, keys.authority, keys.server, *map(keys.node, range(clients))):
        part.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority_key, authority = _authority()
    server_key = ec.generate_private_key(ec.SECP384R1())
    server = _server_certificate(server_key, hosts, authority_key, authority)
    trusted = authority.public_bytes(serialization.Encoding.PEM)
    _write(keys.authority / "ca.key", _secret(authority_key), secret=True)
    _write(keys.authority / "ca.crt", trusted)
    _write(keys.server / "ca.crt", trusted)
    _write(keys.server / "server.key", _secret(server_key), secret=True)
    _write(keys.server / "server.crt", server.public_bytes(serialization.Encoding.PEM))
    for client in range(clients):
        _write(keys.node(client) / "ca.crt", trusted)
        _node_key(keys, client)
    return keys


def _node_key(keys: Keys, client: int) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(keys.node(client) / "node.key", private, secret=True)
    _write(keys.public_key(client), public + b"\n")


def _authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedproto federation")])
    certificate = (
        _certificate(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    return key, certificate


def _server_certificate(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _certificate(name, authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternatives(hosts)), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Clocks of different hosts disagree a little.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives(hosts: Sequence[str]) -> list[x509.GeneralName]:
    # The app's process on the server's own host speaks to it over loopback.
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, "localhost", "127.0.0.1"]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def _secret(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, *, secret: bool = False) -> None:
    # Created with its permissions, so that a secret is never readable by others, even for a moment.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
