"""The settings of a server's or relay's port, the TLS credentials of a connection, and the public key that identifies a client or relay."""

from dataclasses import dataclass
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from ...keys.enrolment import key_hash
from ...keys.keyring import point_of, verifier
from ...keys.registry import KeyStatus
from ...messages import Invitation
from ...server.transport import GRACE_S
from .wire import RelayTerms


@dataclass(frozen=True)
class Credentials:
    """The TLS credentials of one side of a connection, in PEM: a certificate, the private key of the certificate, and the trusted CA."""

    certificate: bytes
    key: bytes
    ca: bytes  # the CA that must have signed the other side's certificate


@dataclass(frozen=True)
class PeerKey:
    """The public key of a client or relay."""

    point: bytes  # compressed P-384 point [49 bytes], or b"" if the key is not an EC key
    hash: bytes  # SHA-256 of the DER SubjectPublicKeyInfo


def peer_key(certificate_pem: bytes) -> PeerKey:
    """Return the public key of a certificate."""
    key: Any = x509.load_pem_x509_certificate(certificate_pem).public_key()
    point = point_of(key) if isinstance(key, ec.EllipticCurvePublicKey) else b""
    return PeerKey(point, key_hash(key))


def point_key(point: bytes) -> PeerKey:
    """Return the public key that a compressed P-384 point [49 bytes] encodes. Raises ProtocolError for invalid bytes."""
    return PeerKey(point, key_hash(verifier(point)))


class Keys(Protocol):
    """The interface through which a port checks public keys, in the thread of the gRPC event loop.

    `fedcomp.keys.registry.Registry` and `Relay` implement this interface.
    """

    @property
    def problem(self) -> str:
        """The reason why keys cannot be checked now, or "" if they can. Clients that are refused during a problem try again later."""

    def find(self, key_hash: bytes) -> KeyStatus: ...
    def ids_by_hash(self) -> dict[bytes, int]: ...


@dataclass
class PortSettings:
    """Settings of a port on which a server or relay serves the clients of a run.

    Without `credentials` the port has no TLS, and clients choose their ids. With `credentials`, `keys` maps the SHA-256 of a client's
    public key (DER SubjectPublicKeyInfo) to the client's logical id (number in the run).

    A stream is closed if its client does not join within `join_s` seconds, or has an assignment (request to train) and sends nothing for
    `silence_s` seconds. The assignment of a silent client counts as lost at once. If a connection ends, the assignment of its client counts
    as lost unless the client reconnects within `grace_s` seconds. If `grace_s` is inf, neither counts as lost.
    """

    address: str
    port: int  # 0: choose any free port
    invitation: Invitation
    clients: int
    largest_report: int  # size limit of a client's encoded update in bytes
    credentials: Credentials | None = None
    keys: Keys | None = None
    relay_terms: RelayTerms | None = None  # None: refuse all relays
    silence_s: float = 16.0
    join_s: float = 20.0
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        if self.credentials is not None and self.keys is None:
            raise ValueError(
                "a port with TLS credentials also needs `keys`, the keys that it accepts"
            )
