"""A folder of keys: a certificate authority (CA), the server's certificate, an enrolment file of each client and relay, and a registry.

    ca.crt, ca.key:            The CA's certificate and private key. Only commands that make certificates need ca.key; the server does not.
    server.crt, server.key:    The server's certificate and private key.
    clients/0.toml ...:        The enrolment file of each client (enrolment.py).
    relays/0.toml ...:         The enrolment file of each relay, if there are relays.
    registry.toml:             The public keys of the clients and relays, whether each is revoked, and when it expires (registry.py).

A new folder is written under a temporary name and renamed once it is complete. Later `fedcomp keys` commands replace whole files, and
registry.toml last. If a command is killed, run it again. Files with private keys have mode 0600 and folders have mode 0700.

A renewed client or relay gets a new key, so that nobody can use its old enrolment file.
"""

import fcntl
import os
import shlex
import shutil
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from .. import durable_files
from ..config import keys_command
from ..durable_files import flush, write_new
from ..errors import KeysError, os_errors
from . import certificates
from .certificates import CURVE, certificate_pem, private_key_pem, read_certificate
from .connection import join_address
from .enrolment import Enrolment, format_time, openssh, utc_now, validity_problem
from .registry import ENROLLED, REVOKED, Registry, RegistryEntry, read_file, registry_text

CA_CRT = "ca.crt"
CA_KEY = "ca.key"
SERVER_CRT = "server.crt"
SERVER_KEY = "server.key"
REGISTRY = "registry.toml"
CLIENTS, RELAYS = "clients", "relays"
# Default validity of a certificate, and minimum validity of a new CA's certificate, in days.
DAYS, CA_DAYS = 365, 3650
NEW_KEYS = "make new keys in another folder: fedcomp keys init --out DIR --clients N"


def make(
    folder: str | Path, clients: int, hosts: Sequence[str] = (), days: int = DAYS, port: int = 8080
) -> list[str]:
    """Make a new folder of keys for a server at `hosts` and `port`, and `clients` clients. Return the hosts of the server's certificate.

    The certificates are valid for `days` days. Raises KeysError, and makes no folder, if the folder exists or cannot be written, or if a
    host is not valid.
    """
    folder = Path(folder)
    names = certificates.certificate_hosts(hosts)
    if folder.exists() or folder.is_symlink():
        raise KeysError(
            f"--out {folder} exists and is not overwritten; give another name, or add clients to it with: "
            f"{keys_command(folder, 'add')}"
        )
    with os_errors(
        KeysError, f"--out {folder} cannot be written", "give a folder that can be written"
    ):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(".new", f".{folder.name}.", folder.parent))
        try:
            now, ca_key = utc_now(), ec.generate_private_key(CURVE())
            ends = now + timedelta(days=max(days, CA_DAYS))
            ca = certificates.ca_certificate(ca_key, now, ends)
            write_new(partial / CA_KEY, [private_key_pem(ca_key)], 0o600)
            write_new(partial / CA_CRT, [certificate_pem(ca)], 0o644)
            issuer = _Issuer(partial, ca, ca_key, days, join_address(names[0], port))
            issuer.certify_server(names)
            (partial / CLIENTS).mkdir(0o700)
            entries = [issuer.enrol(id) for id in range(clients)]
            write_new(partial / REGISTRY, [registry_text(entries, issuer.server).encode()], 0o644)
            # Fails if another process has made the folder in the meantime.
            os.rename(partial, folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        flush(folder.parent)
    return names


def add(folder: str | Path, count: int = 1, days: int = DAYS) -> list[int]:
    """Enrol `count` new clients. Return their ids. Raises KeysError, for example if ca.key is missing."""
    with _locked(folder) as state:
        issuer, first = state.issuer(days), state.next_id(relay=False)
        new = [issuer.enrol(id) for id in range(first, first + count)]
        state.write([*state.entries, *new])
    return [entry.id for entry in new]


def add_relay(folder: str | Path, hosts: Sequence[str], days: int = DAYS) -> tuple[int, list[str]]:
    """Enrol a relay that clients reach at `hosts`. Return the relay's id and the hosts of its certificate.

    Raises KeysError, for example if a host is not valid or ca.key is missing.
    """
    names = certificates.certificate_hosts(hosts)
    with _locked(folder) as state:
        id = state.next_id(relay=True)
        (state.folder / RELAYS).mkdir(0o700, exist_ok=True)
        state.write([*state.entries, state.issuer(days).enrol(id, names)])
    return id, names


def revoke(folder: str | Path, *holders: int | str) -> None:
    """Revoke the keys of clients and relays. A holder is the id of a client, or a text such as "relay-0".

    Raises KeysError, and revokes no key, if one of the holders is not in the registry.
    """
    with _locked(folder) as state:
        revoked = {state.entry(holder).holder for holder in holders}
        state.write(
            [replace(e, state=REVOKED) if e.holder in revoked else e for e in state.entries]
        )


def renew(
    folder: str | Path, holder: int | str, days: int = DAYS, hosts: Sequence[str] = ()
) -> datetime:
    """Write a new enrolment file, with a new key, for a client or relay. Return the new certificate's expiry time.

    The server then refuses the old key. A client or relay that was revoked is accepted again with the new key. A relay's new certificate is
    for `hosts` and for the hosts of its old certificate. Raises KeysError, for example if `holder` is not in the registry or ca.key is
    missing.
    """
    with _locked(folder) as state:
        old = state.entry(holder)
        names = None
        if old.relay:
            file = state.folder / old.file
            if not file.exists() and not hosts:
                raise KeysError(
                    f"{file} with the hosts of {old.name} is missing; restore this file, or give the hosts with --host HOST"
                )
            old_hosts = (
                certificates.hosts_of(Enrolment.read(file).x509_certificate)
                if file.exists()
                else []
            )
            names = certificates.certificate_hosts([*old_hosts, *hosts])
        new = state.issuer(days).enrol(old.id, names)
        new = replace(new, replaced=(*old.replaced, old.public_key))
        state.write([new if e is old else e for e in state.entries])
    return new.not_after


def renew_server(
    folder: str | Path, hosts: Sequence[str] = (), days: int = DAYS
) -> tuple[list[str], datetime]:
    """Write a new key and certificate for the server. Return the certificate's hosts and expiry time.

    The new certificate is for the hosts of the old certificate and for `hosts`. The enrolment files of clients stay valid. Raises
    KeysError, for example if ca.key is missing.
    """
    with _locked(folder) as state:
        issuer, file = state.issuer(days), state.folder / SERVER_CRT
        old_hosts = certificates.hosts_of(read_certificate(file)) if file.exists() else []
        names = certificates.certificate_hosts([*old_hosts, *hosts])
        ends = issuer.certify_server(names)
    return names, ends


def expiring(folder: str | Path, within_days: int) -> list[int | str]:
    """Return the holders of certificates that have expired or will expire within `within_days` days.

    A holder is "server", the id of a client, or a text such as "relay-0". Revoked clients and relays are omitted. Raises KeysError if a
    file of the folder cannot be read.
    """
    folder = keys_folder(folder)
    limit = utc_now() + timedelta(days=within_days)
    content = read_file(folder / REGISTRY)
    entries = (*content.clients, *content.relays)
    holders = [e.holder for e in entries if e.state == ENROLLED and e.not_after <= limit]
    server_ends = read_certificate(folder / SERVER_CRT).not_valid_after_utc
    return ["server"] * (server_ends <= limit) + holders


@dataclass(frozen=True)
class _Issuer:
    """The CA of a folder of keys. Its certificates are valid for `days` days, but not longer than the CA's own certificate."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    days: int
    server: str | None  # the server's address, for enrolment files

    def certify_server(self, hosts: Sequence[str]) -> datetime:
        """Write a new key and certificate for the server. Return the certificate's expiry time."""
        key = ec.generate_private_key(CURVE())
        now, ends = self._validity()
        certificate = certificates.server_certificate(key.public_key(), hosts, self.key, now, ends)
        durable_files.replace(self.folder / SERVER_KEY, [private_key_pem(key)], 0o600)
        durable_files.replace(self.folder / SERVER_CRT, [certificate_pem(certificate)], 0o644)
        return ends

    def enrol(self, id: int, relay_hosts: Sequence[str] | None = None) -> RegistryEntry:
        """Write the enrolment file of a client or relay, with a new key. Return the entry for the registry, without writing the registry.

        `relay_hosts`: the hosts of a relay, or None for a client.
        """
        key = ec.generate_private_key(CURVE())
        public, relay = key.public_key(), relay_hosts is not None
        ca_key, (now, ends) = self.key, self._validity()
        if relay_hosts is None:
            issued = certificates.client_certificate(public, ca_key, now, ends)
        else:
            issued = certificates.server_certificate(public, relay_hosts, ca_key, now, ends, relay)
        parts = certificate_pem(issued), private_key_pem(key), certificate_pem(self.certificate)
        certificate, private, ca = (pem.decode() for pem in parts)
        enrolment = Enrolment(id, certificate, private, ca, self.server)
        entry = RegistryEntry(id, openssh(public), ENROLLED, ends, relay=relay)
        durable_files.replace(self.folder / entry.file, [enrolment.text().encode()], 0o600)
        return entry

    def _validity(self) -> tuple[datetime, datetime]:
        """Return the start and the end of the validity of a new certificate."""
        now = utc_now()
        ends = min(now + timedelta(days=self.days), self.certificate.not_valid_after_utc)
        return now, ends.replace(microsecond=0)


@dataclass(frozen=True)
class _LockedFolder:
    """The registry of a folder of keys, while this process holds the folder's lock."""

    folder: Path
    entries: tuple[RegistryEntry, ...]  # clients and relays
    server: str | None

    def issuer(self, days: int) -> _Issuer:
        """Read the CA's certificate and key. Raises KeysError, for example if the certificate has expired."""
        certificate = read_certificate(self.folder / CA_CRT)
        key = certificates.read_private_key(
            self.folder / CA_KEY, "restore it, because this command needs it to sign a certificate"
        )
        if key.public_key() != certificate.public_key():
            raise KeysError(
                f"{self.folder / CA_KEY} is not the key of {self.folder / CA_CRT}; restore the right key"
            )
        if utc_now() >= (ended := certificate.not_valid_after_utc):
            raise KeysError(
                f"the CA certificate of {self.folder} expired on {format_time(ended)}; {NEW_KEYS}"
            )
        return _Issuer(self.folder, certificate, key, days, self.server)

    def entry(self, holder: int | str) -> RegistryEntry:
        """Return the entry of a client or relay. Raises KeysError if the registry has no such entry."""
        for entry in self.entries:
            if entry.holder == holder:
                return entry
        relay = isinstance(holder, str)
        ids = [str(entry.holder) for entry in self.entries if entry.relay == relay]
        known = " to ".join(dict.fromkeys(ids[:1] + ids[-1:]))
        add = keys_command(self.folder, "add", *(["--relay", "--host", "HOST"] if relay else []))
        none = f"no {'relays' if relay else 'clients'} yet; add one with"
        raise KeysError(
            f"{holder if relay else f'client {holder}'} is not in {self.folder / REGISTRY}, which has "
            f"{f'{known}; give one of these, or add one with' if ids else none}: {add}"
        )

    def next_id(self, relay: bool) -> int:
        """Return the highest id of the relays or clients, plus 1."""
        return max((entry.id for entry in self.entries if entry.relay == relay), default=-1) + 1

    def write(self, entries: Sequence[RegistryEntry]) -> None:
        text = registry_text(entries, self.server)
        durable_files.replace(self.folder / REGISTRY, [text.encode()], 0o644)


@contextmanager
def _locked(folder: str | Path) -> Iterator[_LockedFolder]:
    """Lock a folder of keys and yield its registry. Raises KeysError if a file cannot be read or written."""
    folder = keys_folder(folder)
    with os_errors(KeysError, f"--keys {folder} cannot be written", "make it writable"):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            content = read_file(folder / REGISTRY)
            yield _LockedFolder(folder, (*content.clients, *content.relays), content.server)
        finally:
            os.close(lock)


def read_registry(folder: str | Path) -> Registry:
    """Return the registry of a folder of keys. Raises KeysError if the registry is missing or malformed."""
    return Registry(keys_folder(folder) / REGISTRY)


def keys_folder(folder: str | Path) -> Path:
    """Return a folder of keys as a path. Raises KeysError if the folder has no registry.toml."""
    folder = Path(folder)
    if not (folder / REGISTRY).is_file():
        raise KeysError(
            f"--keys {folder} is not a folder of keys: it has no {REGISTRY}; give another folder, or make one with: "
            f"fedcomp keys init --out {shlex.quote(str(folder))} --clients N"
        )
    return folder


def check_server_files(folder: str | Path) -> x509.Certificate:
    """Return the server's certificate, even if it has expired. Raises KeysError if certificate, key or CA are damaged or do not match."""
    folder = Path(folder)
    renew = keys_command(folder, "renew", "server")
    ca, certificate = read_certificate(folder / CA_CRT), read_certificate(folder / SERVER_CRT)
    if not certificates.is_signed_by(certificate, ca):
        raise KeysError(
            f"{folder / SERVER_CRT} is not signed by {folder / CA_CRT}; restore the CA that signed it, or make a new certificate: "
            f"{renew}"
        )
    key = certificates.read_private_key(folder / SERVER_KEY, f"make a new one: {renew}")
    if key.public_key() != certificate.public_key():
        raise KeysError(
            f"{folder / SERVER_KEY} is not the key of {folder / SERVER_CRT}; make a new key and certificate: {renew}"
        )
    # TLS libraries reject some files that can be parsed, such as indented PEM.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(folder / CA_CRT)
        context.load_cert_chain(folder / SERVER_CRT, folder / SERVER_KEY)
    except ssl.SSLError as error:
        raise KeysError(
            f"TLS cannot use {folder / CA_CRT}, {folder / SERVER_CRT} or {folder / SERVER_KEY} (damaged PEM); restore them from copies, "
            f"or make a new key and certificate: {renew}"
        ) from error
    return certificate


def serving_files(folder: str | Path, now: datetime | None = None) -> tuple[Path, Path]:
    """Return the paths of the server's certificate and private key. Raises KeysError if they cannot be used at the time `now`."""
    folder, now = keys_folder(folder), now or utc_now()
    remedy = f"run: {keys_command(folder, 'renew', 'server')}"
    if problem := validity_problem(check_server_files(folder), now, remedy):
        raise KeysError(f"{folder / SERVER_CRT} {problem}")
    return folder / SERVER_CRT, folder / SERVER_KEY
