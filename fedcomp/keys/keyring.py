"""The keys with which clients sign sealed ballots (strategies/sealed_election.py), and verify each other's signatures.

The server announces the public keys of the clients. A client *pins* the first key that the server announces for another client in a run:
during this run, it accepts no other key for that client. Therefore, a server cannot replace true keys by false keys during a run. It could
announce false keys from the start, unless the client has `--roster`, a list of public keys: the client then accepts only the keys in this
list. Pins are stored on the client's disk (signature_log.py), and stay valid if the client joins another run and returns.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_256
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ..errors import ProtocolError
from .certificates import CURVE
from .enrolment import parse_public_key
from .registry import read_file
from .signature_log import SignatureLog

PIN = "key/"  # entry "key/<client>" in the signature log: the pinned public key of a client


class UnknownKey(ProtocolError):
    """An error of a client: it does not accept the public key that the server announces for another client.

    The round may continue without the client whose key is not accepted.
    """


class Keyring(Protocol):
    """The keys that a server or client knows. `run` is the name of the run, which is part of every signed message."""

    run: str

    def signer(self, client: int) -> ec.EllipticCurvePrivateKey:
        """Return the private key of a client. Raises ProtocolError if the key is not known."""

    def key(self, client: int, announced: bytes = b"") -> bytes:
        """Return a client's public key as a point of the elliptic curve P-384 in compressed form [49 bytes].

        `announced`: the key that the server announces for the client, or b"" for none. Raises UnknownKey if the announced key is not
        accepted, because the known key differs or is missing.
        """


def point_of(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


@lru_cache(4096)
def verifier(point: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key that a compressed point [49 bytes] encodes. Raises ProtocolError if the bytes are not a point of P-384."""
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(CURVE(), point)
    except ValueError as error:
        raise ProtocolError(
            "a public key in the message is not a point of the elliptic curve P-384; server and clients need the same version of fedcomp"
        ) from error


class DerivedKeys:
    """The keys of the virtual clients of a simulation, derived from a seed and not secret."""

    def __init__(self, seed: int):
        self.seed, self.run = seed, f"simulation {seed}"
        self._keys: dict[int, tuple[ec.EllipticCurvePrivateKey, bytes]] = {}

    def signer(self, client: int) -> ec.EllipticCurvePrivateKey:
        return self._pair(client)[0]

    def key(self, client: int, announced: bytes = b"") -> bytes:
        return self._pair(client)[1]

    def _pair(self, client: int) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
        if client not in self._keys:
            name = f"fedcomp client {self.seed} {client}".encode()
            number = int.from_bytes(shake_256(name).digest(47)) + 1  # below P-384's group order
            private = ec.derive_private_key(number, CURVE())
            self._keys[client] = private, point_of(private.public_key())
        return self._keys[client]


@dataclass
class ServerKeys:
    """The keys that a server knows: the public keys with which clients joined."""

    run: str
    key_of: Callable[[int], bytes]  # returns a client's public key as a compressed point

    def signer(self, client: int) -> ec.EllipticCurvePrivateKey:
        raise ProtocolError(
            "a server cannot sign for a client, since it has no private keys of clients"
        )

    def key(self, client: int, announced: bytes = b"") -> bytes:
        return self.key_of(client)


@dataclass
class PinnedKeys:
    """The keys that client `client_id` knows: its own private key, and the public keys of other clients, pinned or from --roster."""

    run: str
    client_id: int
    own: ec.EllipticCurvePrivateKey
    # The public keys in --roster as compressed points, by client id. None without --roster: the client pins keys.
    roster: Mapping[int, bytes] | None = None
    log: SignatureLog = field(default_factory=SignatureLog)
    _pins: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stored = self.log.entries(self.run).items()
        self._pins = {
            int(name.removeprefix(PIN)): point for name, point in stored if name.startswith(PIN)
        }
        own = point_of(self.own.public_key())
        for client, point in self._pins.items():
            if point == own and client != self.client_id:
                raise ProtocolError(
                    f"the server treats this client as client {self.client_id}, but this client was client {client} earlier in this run"
                )

    def signer(self, client: int) -> ec.EllipticCurvePrivateKey:
        if client != self.client_id:
            raise ProtocolError(
                f"the server treats this client as client {client}, but this client has the id {self.client_id}"
            )
        return self.own

    def key(self, client: int, announced: bytes = b"") -> bytes:
        if client == self.client_id:
            source = "the key of this client"
            known = self._pin(client, point_of(self.own.public_key()))
        elif self.roster is not None:
            if client not in self.roster:
                raise UnknownKey(
                    f"--roster contains no key of client {client}; give a newer --roster file to accept client {client}"
                )
            known, source = self.roster[client], "the key in --roster"
        else:
            known = self._pins.get(client) or self._pin_announced(client, announced)
            source = "the key from earlier in this run"
        if announced and announced != known:
            kind = ProtocolError if client == self.client_id else UnknownKey
            raise kind(f"the server announces a key of client {client} that differs from {source}")
        return known

    def _pin_announced(self, client: int, announced: bytes) -> bytes:
        if not announced:
            raise ProtocolError(f"the server did not announce a key of client {client}")
        verifier(announced)  # raises ProtocolError if the bytes are not a key
        return self._pin(client, announced)

    def _pin(self, client: int, point: bytes) -> bytes:
        """Pin the key `point` of a client, and return it."""
        if self._pins.get(client) != point:
            self.log.add(self.run, {f"{PIN}{client}": point})
            self._pins[client] = point
        return point


def read_roster(path: Path) -> dict[int, bytes]:
    """Return the public keys of all clients in a registry.toml as compressed points, by client id. Raises KeysError if it is malformed."""
    clients = read_file(path).clients
    return {entry.id: point_of(parse_public_key(entry.public_key)) for entry in clients}
