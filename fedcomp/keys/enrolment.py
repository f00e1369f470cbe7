"""The enrolment file: one TOML file with everything that a client or a relay needs to join a run.

    id = 3                                       # a client and a relay may have the same id
    certificate = "-----BEGIN CERTIFICATE..."    # its public key identifies the client or relay
    private_key = "-----BEGIN PRIVATE KEY..."    # of the certificate, EC P-384 in PKCS8
    ca = "-----BEGIN CERTIFICATE..."             # the CA that signed this certificate and the server's
    server = "server.example:8080"               # the server's address, if it is known

Whoever can read the file can act as the client or relay, so only its owner may read it.
"""

import hashlib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import tomli_w
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from ..config import expand_home
from ..durable_files import write_new
from ..errors import KeysError
from .certificates import CURVE, hosts_of, is_signed_by, parse_certificate, parse_private_key

VARIABLE, DEFAULT_PATH = "FEDCOMP_ENROLMENT", "~/.config/fedcomp/enrolment.toml"
MAX_ID = 2**31 - 1
ID_VALUES = f"a whole number from 0 to {MAX_ID}"
PRIVATE_KEY = "an EC P-384 private key as PEM without a password"
RESTORE = "copy it again from the folder of keys on the server"
T = TypeVar("T")


def utc_now() -> datetime:
    return datetime.now(UTC)


def format_time(time: datetime) -> str:
    """Return a time in ISO format, such as `2027-11-21T16:33:08Z`."""
    return f"{time.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def validity_problem(certificate: x509.Certificate, now: datetime, remedy: str) -> str:
    """Return "" if a certificate is valid at the time `now`, and otherwise the predicate of an error message ("expired on …").

    `remedy`: what to do if this machine's clock is right, such as "run: " with a command that replaces the certificate.
    """
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begins <= now < ends:
        return ""
    when = f"begins on {format_time(begins)}" if now < begins else f"expired on {format_time(ends)}"
    return f"{when}, and it is {format_time(now)} by this machine's clock; correct the clock if it is wrong, else {remedy}"


def parse_time(text: Any) -> datetime:
    """Parse an ISO 8601 time with an offset from UTC, or raise ValueError."""
    time = text if isinstance(text, datetime) else datetime.fromisoformat(ascii_text(text))
    if time.tzinfo is None:
        raise ValueError("no offset from UTC")
    return time.astimezone(UTC)


def parse_public_key(text: str) -> ec.EllipticCurvePublicKey:
    """Parse an EC P-384 public key from its OpenSSH line, or raise ValueError."""
    try:
        key = serialization.load_ssh_public_key(text.strip().encode())
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVE):
        raise ValueError("the key must be an EC P-384 key")
    return key


def openssh(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as one OpenSSH line without a comment. Equal keys give equal lines."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def key_hash(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the identity of a client or relay [32 bytes]: the SHA-256 of its public key (DER SubjectPublicKeyInfo)."""
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


def default_enrolment() -> Path:
    """Return the path in FEDCOMP_ENROLMENT if it is set, else ~/.config/fedcomp/enrolment.toml.

    Raises ConfigError if FEDCOMP_ENROLMENT begins with the ~ of a user that does not exist.
    """
    if path := os.environ.get(VARIABLE):
        return expand_home(path, VARIABLE)
    # If the user has no home folder, `expanduser` leaves `~` in the path.
    return Path(os.path.expanduser(DEFAULT_PATH))


@dataclass(frozen=True)
class TomlTable:
    """A table of a TOML file. Error messages about its fields begin with `where` (file or entry) and end with `remedy` (what to do)."""

    table: Mapping[str, Any]
    where: str
    remedy: str

    @classmethod
    def of_file(cls, path: Path, remedy: str) -> Self:
        """Read a TOML file. Raises KeysError if the file cannot be read or is not TOML."""
        try:
            return cls(tomllib.loads(path.read_bytes().decode()), str(path), remedy)
        except OSError as error:
            raise KeysError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
        except (ValueError, RecursionError) as error:
            raise KeysError(f"{path} is not TOML: {error}; {remedy}") from error

    def take(self, name: str, read: Callable[[Any], T], expected: str) -> T:
        """Return the field `name`, parsed by `read`. Raises KeysError if the field is missing or malformed.

        `expected`: what the field should be, for the error message, such as "a certificate as PEM".
        """
        if name not in self.table:
            raise KeysError(f"{self.where}: '{name}' is missing; {self.remedy}")
        try:
            return read(self.table[name])
        except (ValueError, OverflowError):
            raise KeysError(f"{self.where}: '{name}' is not {expected}; {self.remedy}") from None

    @property
    def server(self) -> str | None:
        """The field `server`, an address, or None if it is missing. Raises KeysError if it is not ASCII text."""
        if "server" not in self.table:
            return None
        return self.take("server", ascii_text, "a text such as server.example:8080")


def parse_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise ValueError("not an id")
    return value


@dataclass(frozen=True)
class Enrolment:
    """The content of an enrolment file."""

    id: int
    certificate: str = field(repr=False)  # PEM
    private_key: str = field(repr=False)  # PEM, PKCS8
    ca: str = field(repr=False)  # PEM
    server: str | None = None  # host:port

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read and check an enrolment file. An expired certificate is not an error.

        Raises KeysError if a field is missing or malformed, if the private key does not match the certificate, or if the CA did not sign
        the certificate.
        """
        fields = TomlTable.of_file(Path(path), RESTORE)
        enrolment = cls(
            fields.take("id", parse_id, ID_VALUES),
            fields.take("certificate", _certificate_text, "a certificate as PEM"),
            fields.take("private_key", _private_text, PRIVATE_KEY),
            fields.take("ca", _certificate_text, "a certificate as PEM"),
            fields.server,
        )
        if enrolment.key_pair[1] != enrolment.x509_certificate.public_key():
            raise KeysError(f"{path}: 'private_key' is not the key of 'certificate'; {RESTORE}")
        if not is_signed_by(enrolment.x509_certificate, parse_certificate(enrolment.ca)):
            raise KeysError(f"{path}: 'certificate' is not signed by 'ca'; {RESTORE}")
        return enrolment

    @cached_property
    def x509_certificate(self) -> x509.Certificate:
        """The parsed certificate."""
        return parse_certificate(self.certificate)

    @cached_property
    def key_pair(self) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
        """The private and the public key. A client also signs its sealed ballots with the private key (keyring.py)."""
        private = parse_private_key(self.private_key.encode())
        return private, private.public_key()

    @property
    def relay(self) -> bool:
        """Whether this enrolment belongs to a relay: the certificate of a relay contains hosts, that of a client does not."""
        return bool(hosts_of(self.x509_certificate))

    @property
    def name(self) -> str:
        """The name in messages, such as "client 3"."""
        return f"relay {self.id}" if self.relay else f"client {self.id}"

    @property
    def holder(self) -> int | str:
        """The argument of `fedcomp keys renew`: a client's id, or a text such as "relay-0"."""
        return f"relay-{self.id}" if self.relay else self.id

    @property
    def key_hash(self) -> bytes:
        """The identity of the client or relay [32 bytes]; see the function `key_hash`."""
        return key_hash(self.key_pair[1])

    @property
    def not_after(self) -> datetime:
        """The end of the certificate's validity, UTC."""
        return self.x509_certificate.not_valid_after_utc

    def refuse_expired(self, now: datetime | None = None) -> None:
        """Raise KeysError if the certificate has expired or is not valid yet, by this machine's clock."""
        remedy = f"run on the server: fedcomp keys renew {self.holder}"
        if problem := validity_problem(self.x509_certificate, now or utc_now(), remedy):
            raise KeysError(f"the certificate of {self.name} {problem}")

    def text(self) -> str:
        """Return the content of the enrolment file."""
        present = {name: value for name, value in asdict(self).items() if value is not None}
        return (
            f"# The enrolment of {self.name}, valid until {format_time(self.not_after)}. This file contains a private key:\n"
            "# only the owner of the file may read it.\n"
            + tomli_w.dumps(present, multiline_strings=True)
        )

    def unpack(self, folder: Path) -> tuple[Path, Path]:
        """Write the CA's certificate to `folder`/ca.crt and the private key to `folder`/client.key, for Flower's flower-supernode.

        Return the two paths. Raises FileExistsError if one of the files exists.
        """
        ca, key = folder / "ca.crt", folder / "client.key"
        write_new(ca, [self.ca.encode()], 0o644)
        private = self.key_pair[0].private_bytes(
            Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()
        )
        write_new(key, [private], 0o600)
        return ca, key


def ascii_text(value: Any) -> str:
    if not isinstance(value, str) or not value.isascii():
        raise ValueError("not ASCII text")
    return value


def _private_text(value: Any) -> str:
    parse_private_key(ascii_text(value).encode())
    return value


def _certificate_text(value: Any) -> str:
    parse_certificate(ascii_text(value))
    return value
