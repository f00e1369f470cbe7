"""The enrolment file: one TOML file with all that a client needs to be itself.

    id = 3                                       its logical id
    server = "server.example:8080"               where the server is, when that was known
    not_after = "2027-11-21T16:33:08Z"           until when the server lets the key in
    public_key = "ecdsa-sha2-nistp384 AAAA..."   in OpenSSH form
    private_key = "-----BEGIN OPENSSH..."        EC P-384, as Flower's --auth-supernode-private-key takes it
    ca = "-----BEGIN CERTIFICATE..."             the CA that signed the server's certificate

Whoever reads the file can be the client, so it is made readable by its owner alone.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import tomli_w
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ..errors import KeysError

CURVE = ec.SECP384R1
LARGEST = 16 << 20  # bytes of a file that is read
LARGEST_ID = 2**31 - 1
T = TypeVar("T")


def utc_now() -> datetime:
    return datetime.now(UTC)


def iso(moment: datetime) -> str:
    """`2027-11-21T16:33:08Z`."""
    return f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


def moment(text: Any) -> datetime:
    """What `iso` wrote, or any ISO date with a time and an offset. Raises ValueError."""
    read = text if isinstance(text, datetime) else datetime.fromisoformat(_text(text))
    if read.tzinfo is None:
        raise ValueError("no offset from UTC")
    return read.astimezone(UTC)


def public_key(data: bytes | str) -> ec.EllipticCurvePublicKey:
    """An EC P-384 key from its OpenSSH line or its PEM. Raises ValueError on anything else."""
    raw = data.encode() if isinstance(data, str) else bytes(data)
    load = (
        serialization.load_pem_public_key
        if raw.lstrip().startswith(b"-----")
        else serialization.load_ssh_public_key
    )
    try:
        key = load(raw.strip())
    except (TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVE):
        raise ValueError("not an EC P-384 key")
    return key


def openssh(key: ec.EllipticCurvePublicKey) -> str:
    """One line without a comment: equal for equal keys, however they were written."""
    return key.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    ).decode()


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """What Flower registers, is sent and compares, byte by byte."""
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """A TOML file as a table. Raises KeysError, which ends with `remedy`, when it is absent or malformed."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise KeysError(f"{path} is larger than {LARGEST} bytes; {remedy}")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise KeysError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise KeysError(f"{path} is not TOML: {error}; {remedy}") from error


def take(
    table: Mapping[str, Any],
    name: str,
    read: Callable[[Any], T],
    expected: str,
    where: str,
    remedy: str,
) -> T:
    """A field of a table, as `read` reads it. Raises KeysError naming the place `where` and the field."""
    if name not in table:
        raise KeysError(f"{where}: '{name}' is missing; {remedy}")
    try:
        return read(table[name])
    except (ValueError, OverflowError):
        raise KeysError(f"{where}: '{name}' is not {expected}; {remedy}") from None


def logical_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_ID:
        raise ValueError("no id")
    return value


@dataclass(frozen=True)
class Enrolment:
    """A client's logical id with its keys."""

    id: int
    public_key: str  # OpenSSH, one line
    private_key: str = field(repr=False)  # OpenSSH, PEM armour
    ca: str = field(repr=False)  # PEM
    not_after: datetime  # UTC
    server: str | None = None  # host:port

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Raises KeysError, naming file and line or field, unless it is whole and its keys are a pair. An expired one is read."""
        remedy = "copy it anew from the folder of keys on the server"
        table = read_toml(Path(path), remedy)

        def one(name: str, read: Callable[[Any], T], expected: str) -> T:
            return take(table, name, read, expected, str(path), remedy)

        enrolment = cls(
            id=one("id", logical_id, f"a whole number from 0 to {LARGEST_ID}"),
            public_key=one(
                "public_key",
                lambda value: openssh(public_key(_text(value))),
                "an EC P-384 public key in OpenSSH form",
            ),
            private_key=one(
                "private_key", _private_text, "an EC P-384 private key without a password"
            ),
            ca=one("ca", _certificate_text, "a certificate"),
            not_after=one("not_after", moment, "a date such as 2027-11-21T16:33:08Z"),
            server=one("server", _text, "a text such as server.example:8080")
            if "server" in table
            else None,
        )
        if openssh(enrolment.pair[1]) != enrolment.public_key:
            raise KeysError(f"{path}: 'private_key' and 'public_key' are not a pair; {remedy}")
        return enrolment

    @property
    def pair(self) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
        """Both keys, as Flower's connection takes them."""
        private = _private_key(self.private_key)
        return private, private.public_key()

    def refuse_expired(self, now: datetime | None = None) -> None:
        """Raise KeysError when the key has ended by this machine's clock."""
        if (now := now or utc_now()) >= self.not_after:
            raise KeysError(
                f"the key of client {self.id} ended on {iso(self.not_after)}, and it is {iso(now)} by this machine's clock; "
                f"correct the clock if it is wrong, else on the server: fedcomp keys renew {self.id}"
            )

    def text(self) -> str:
        """The file's content."""
        values = {
            "id": self.id,
            "server": self.server,
            "not_after": iso(self.not_after),
            "public_key": self.public_key,
            "private_key": self.private_key,
            "ca": self.ca,
        }
        given = {name: value for name, value in values.items() if value is not None}
        return (
            f"# fedcomp: what client {self.id} needs to join. It holds a private key: keep it readable by its owner alone.\n"
            + tomli_w.dumps(given, multiline_strings=True)
        )

    def unpack(self, folder: Path) -> tuple[Path, Path]:
        """The CA's certificate and the private key as files, for programs that want files: flower-supernode's
        --root-certificates and --auth-supernode-private-key. Raises FileExistsError rather than overwrite."""
        ca, key = folder / "ca.crt", folder / "client.key"
        write_new(ca, self.ca.encode(), 0o644)
        write_new(key, self.private_key.encode(), 0o600)
        return ca, key


def write_new(path: Path, data: bytes, mode: int) -> None:
    """A file that was not there, whose permissions are never wider than `mode`, on the disk when this returns."""
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb"
    ) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isascii():
        raise ValueError("no ASCII text")
    return value


def _private_text(value: Any) -> str:
    _private_key(value)
    return value


def _certificate_text(value: Any) -> str:
    x509.load_pem_x509_certificate(_text(value).encode())
    return value


def _private_key(value: Any) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_ssh_private_key(_text(value).encode(), None)
    except (TypeError, UnsupportedAlgorithm) as error:  # TypeError: it has a password
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVE):
        raise ValueError("not an EC P-384 key")
    return key
