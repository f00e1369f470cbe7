"""Certificates for mutual TLS, and the identity of a client: the hash of its public key."""

import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ...keys.keyring import verifier


@dataclass(frozen=True)
class Credentials:
    """The certificate and key that one end of a connection presents, and the CA that it trusts. All are PEM."""

    certificate: bytes
    key: bytes
    ca: bytes  # must have signed the certificate of the other end


@dataclass(frozen=True)
class PeerKey:
    """The public key of a certificate."""

    pem: bytes
    hash: bytes  # SHA-256 of the DER SubjectPublicKeyInfo


def peer_key(certificate_pem: bytes) -> PeerKey:
    """Return the public key of a certificate."""
    return _peer_key(x509.load_pem_x509_certificate(certificate_pem).public_key())


def point_key(point: bytes) -> PeerKey:
    """Return the public key of a compressed P-384 point [49 bytes]. Raises ProtocolError if the bytes are not one."""
    return _peer_key(verifier(point))


def _peer_key(key: CertificatePublicKeyTypes) -> PeerKey:
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return PeerKey(pem, hashlib.sha256(der).digest())
