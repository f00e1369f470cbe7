"""Keys: a CA, the server's certificate, a key for each client, and the registry of which key speaks for whom.

    ca.crt  ca.key            EC P-384; ca.key signs certificates of the server and is needed for nothing else
    server.crt  server.key    for the hosts that were named, and for localhost and 127.0.0.1
    clients/0.toml ...        what each client is given (keys/enrolment.py)
    registry.toml             logical id → public key, state, end; what the server reads

A new folder is made under another name and renamed when it is whole; a file that changes is replaced by a whole one, the registry
last: a kill at any moment leaves what was there, and the same command again does the rest. Private files are 0600 and folders 0700
from the moment they exist.

A key that Flower has unregistered cannot be registered in the same database again: whoever is renewed gets a new key.
"""

import fcntl
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..config import keys_command
from ..errors import KeysError
from . import certificates
from .certificates import read_certificate, read_private_key
from .connection import check_server, hosts_of
from .enrolment import CURVE, LARGEST_ID, Enrolment, iso, openssh, pem, utc_now, write_new
from .registry import ENROLLED, REVOKED, Entry, Registry, read_entries, read_file, text_of

__all__ = [
    "Enrolment",
    "Entry",
    "Registry",
    "add",
    "check_server",
    "check_server_files",
    "due",
    "make",
    "pem",
    "read_registry",
    "renew",
    "renew_server",
    "revoke",
    "serving_files",
]

CA_CRT = "ca.crt"
CA_KEY = "ca.key"
SERVER_CRT = "server.crt"
SERVER_KEY = "server.key"
REGISTRY = "registry.toml"
CLIENTS = "clients"
INCOMPLETE = "INCOMPLETE.txt"
DAYS, CA_DAYS = 365, 3650


def make(
    folder: str | Path, clients: int, hosts: Sequence[str] = (), days: int = DAYS, port: int = 8080
) -> list[str]:
    """A new folder of keys, made whole or not at all. Returns the hosts that its certificate is for.

    Raises KeysError when something is in the way or cannot be written, or a host is none.
    """
    folder = Path(folder)
    names = certificates.hosts(hosts)
    if folder.exists() or folder.is_symlink():
        raise KeysError(
            f"--out {folder} exists and nothing in it is overwritten; give another name, or add clients to it with: "
            f"{keys_command(folder, 'add')}"
        )
    now = utc_now()
    with _writing(f"--out {folder}", "give a folder that can be"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        half = Path(
            tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".new", dir=folder.parent)
        )  # 0700
        try:
            _mark(half, folder)
            ca_key = ec.generate_private_key(CURVE())
            ca = certificates.authority(ca_key, now, now + timedelta(days=max(days, CA_DAYS)))
            write_new(half / CA_KEY, certificates.key_pem(ca_key), 0o600)
            write_new(half / CA_CRT, certificates.pem(ca), 0o644)
            _write_server(half, ca, ca_key, names, now, days)
            (half / CLIENTS).mkdir(0o700)
            server = f"[{names[0]}]:{port}" if ":" in names[0] else f"{names[0]}:{port}"
            entries = [_enrol(half, id, ca, now, days, server) for id in range(clients)]
            write_new(half / REGISTRY, text_of(entries, server).encode(), 0o644)
            (half / INCOMPLETE).unlink()
            os.rename(half, folder)  # refused where another process was faster
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise
        _flush_folder(folder.parent)
    return names


def add(folder: str | Path, count: int = 1, days: int = DAYS) -> list[int]:
    """Enrol `count` new clients; returns their ids, which follow the highest there is. Raises KeysError."""
    with _changing(folder) as state:
        first = max((entry.id for entry in state.entries), default=-1) + 1
        new = [
            _enrol(state.folder, id, state.ca, utc_now(), days, state.server)
            for id in range(first, first + count)
        ]
        state.write([*state.entries, *new])
    return [entry.id for entry in new]


def revoke(folder: str | Path, *ids: int) -> None:
    """Let the keys of clients in no more: all of them, or none and KeysError for an id that is not there. A revoked one stays so."""
    with _changing(folder) as state:
        gone = [state.entry(id).id for id in ids]
        state.write(
            [
                replace(entry, state=REVOKED) if entry.id in gone else entry
                for entry in state.entries
            ]
        )


def renew(folder: str | Path, id: int, days: int = DAYS) -> datetime:
    """Give a client a new key in a new enrolment file, and let in the old one no more; one that was revoked is let in again.

    Returns its end. Raises KeysError for an id that is not there.
    """
    with _changing(folder) as state:
        old = state.entry(id)
        new = _enrol(state.folder, id, state.ca, utc_now(), days, state.server)
        new = replace(new, replaced=(*old.replaced, old.public_key))
        state.write([new if e is old else e for e in state.entries])
    return new.not_after


def renew_server(
    folder: str | Path, hosts: Sequence[str] = (), days: int = DAYS
) -> tuple[list[str], datetime]:
    """Give the server a new key and certificate, for the hosts it had and those that are named; returns them and the end.

    Clients need nothing new. Raises KeysError, also where ca.key is kept elsewhere or the CA ends.
    """
    with _changing(folder) as state:
        ca_key = read_private_key(
            state.folder / CA_KEY, "bring it back for this command, which alone needs it"
        )
        if ca_key.public_key() != state.ca.public_key():
            raise KeysError(
                f"{state.folder / CA_KEY} is not the key of {state.folder / CA_CRT}; bring the one back that is"
            )
        now = utc_now()
        if now >= state.ca.not_valid_after_utc:
            raise KeysError(
                f"the CA of {state.folder} ended on {iso(state.ca.not_valid_after_utc)}; make new keys in "
                "another folder: fedcomp keys init --out DIR --clients N"
            )
        had = (
            hosts_of(read_certificate(state.folder / SERVER_CRT))
            if (state.folder / SERVER_CRT).exists()
            else []
        )
        names = certificates.hosts([*had, *hosts])
        ends = _write_server(state.folder, state.ca, ca_key, names, now, days)
    return names, ends


def due(folder: str | Path, within_days: int) -> list[int | str]:
    """Whose end has come or comes within so many days: "server", and the ids of enrolled clients."""
    folder = keys_folder(folder)
    limit = utc_now() + timedelta(days=within_days)
    server: list[int | str] = (
        ["server"] if read_certificate(folder / SERVER_CRT).not_valid_after_utc <= limit else []
    )
    return server + [
        entry.id
        for entry in read_entries(folder / REGISTRY)
        if entry.state == ENROLLED and entry.not_after <= limit
    ]


@dataclass(frozen=True)
class _State:
    """A folder of keys that this process alone changes."""

    folder: Path
    ca: x509.Certificate
    entries: tuple[Entry, ...]
    server: str | None

    def entry(self, id: int) -> Entry:
        for entry in self.entries:
            if entry.id == id:
                return entry
        ids = f"0 to {self.entries[-1].id}" if self.entries else "none yet"
        raise KeysError(
            f"client {id} is not in {self.folder / REGISTRY}, which has {ids}; give one of these, or: "
            f"{keys_command(self.folder, 'add')}"
        )

    def write(self, entries: Sequence[Entry]) -> None:
        _replace(self.folder / REGISTRY, text_of(entries, self.server).encode(), 0o644)


@contextmanager
def _changing(folder: str | Path) -> Iterator[_State]:
    folder = keys_folder(folder)
    with _writing(f"--keys {folder}", "make it writable"):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for leftover in [
                *folder.glob(".*.new"),
                *(folder / CLIENTS).glob(".*.new"),
            ]:  # of a process that was killed
                leftover.unlink()
            yield _State(folder, read_certificate(folder / CA_CRT), *read_file(folder / REGISTRY))
        finally:
            os.close(lock)


def read_registry(folder: str | Path) -> Registry:
    """The registry of a folder of keys. Raises KeysError."""
    return Registry(keys_folder(folder) / REGISTRY)


def keys_folder(folder: str | Path) -> Path:
    """A folder that `make` made. Raises KeysError where it is none, or was not finished."""
    folder = Path(folder)
    if (folder / INCOMPLETE).exists():
        raise KeysError(
            f"--keys {folder} was not finished, {folder / INCOMPLETE} says what is missing; delete it and make it anew with: "
            f"{_init(folder)}"
        )
    if not (folder / REGISTRY).is_file():
        raise KeysError(
            f"--keys {folder} is no folder of keys, it has no {REGISTRY}; give another, or make one with: "
            f"{_init(folder)}"
        )
    return folder


def _init(folder: Path) -> str:
    return f"fedcomp keys init --out {shlex.quote(str(folder))} --clients N"


def check_server_files(folder: str | Path) -> x509.Certificate:
    """The server's certificate, when the CA signed it and server.key belongs to it. Raises KeysError; an expired one is returned."""
    folder = Path(folder)
    renew = keys_command(folder, "renew", "server")
    ca, certificate = read_certificate(folder / CA_CRT), read_certificate(folder / SERVER_CRT)
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise KeysError(
            f"{folder / SERVER_CRT} is not signed by {folder / CA_CRT}; bring back the one that signed it, or make it anew: "
            f"{renew}"
        ) from None
    if (
        read_private_key(folder / SERVER_KEY, f"make a new one: {renew}").public_key()
        != certificate.public_key()
    ):
        raise KeysError(
            f"{folder / SERVER_KEY} is not the key of {folder / SERVER_CRT}; make both anew: {renew}"
        )
    return certificate


def serving_files(folder: str | Path, now: datetime | None = None) -> tuple[Path, Path]:
    """The files of the certificate and its key, for a server that is about to start.

    Raises KeysError where they do not go together or the certificate is not of this time: clients would only be turned away.
    """
    folder, now = keys_folder(folder), now or utc_now()
    certificate = check_server_files(folder)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= now < ends:
        when = f"begins on {iso(begins)}" if now < begins else f"ended on {iso(ends)}"
        raise KeysError(
            f"{folder / SERVER_CRT} {when}, and it is {iso(now)} by this machine's clock; correct the clock if it is wrong, "
            f"else: {keys_command(folder, 'renew', 'server')}"
        )
    return folder / SERVER_CRT, folder / SERVER_KEY


def _write_server(
    folder: Path,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    now: datetime,
    days: int,
) -> datetime:
    """A new key and certificate for the server, which end no later than the CA. Returns when."""
    key = ec.generate_private_key(CURVE())
    ends = min(now + timedelta(days=days), ca.not_valid_after_utc)
    certificate = certificates.of_server(key.public_key(), hosts, ca_key, now, ends)
    _replace(folder / SERVER_KEY, certificates.key_pem(key), 0o600)
    _replace(folder / SERVER_CRT, certificates.pem(certificate), 0o644)
    return ends


def _enrol(
    folder: Path, id: int, ca: x509.Certificate, now: datetime, days: int, server: str | None
) -> Entry:
    """A new key for a client, in its enrolment file, which nobody has been given yet. Its entry is still to be written."""
    if id > LARGEST_ID:
        raise KeysError(
            f"{folder / REGISTRY} has ids up to {LARGEST_ID}, and no more fit; make new keys in another "
            "folder: fedcomp keys init --out DIR --clients N"
        )
    key = ec.generate_private_key(CURVE())
    line = openssh(key.public_key())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    ).decode()
    ends = (now + timedelta(days=days)).replace(microsecond=0)
    enrolment = Enrolment(id, line, private, certificates.pem(ca).decode(), ends, server)
    _replace(folder / CLIENTS / f"{id}.toml", enrolment.text().encode(), 0o600)
    return Entry(id, line, ENROLLED, ends)


# Files.


def _mark(half: Path, folder: Path) -> None:
    text = (
        f"This folder was to become {folder.name} and was not finished. Missing is whatever of these is not here:\n"
        f"{CA_CRT} {CA_KEY} {SERVER_CRT} {SERVER_KEY} {CLIENTS}/ {REGISTRY}\n"
        "Nothing in it is in use: delete it and run fedcomp keys init again.\n"
    )
    write_new(half / INCOMPLETE, text.encode(), 0o644)


@contextmanager
def _writing(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeysError(f"{what} cannot be written ({error.strerror}); {remedy}") from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    """A whole file in the place of what was there, flushed before it takes the name and after."""
    temporary = path.with_name(f".{path.name}.new")
    write_new(temporary, data, mode)
    os.replace(temporary, path)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
