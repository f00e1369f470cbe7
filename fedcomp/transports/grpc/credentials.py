"""Certificates for mutual TLS, and the identity of a client: the hash of its public key."""

import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat


@dataclass(frozen=True)
class Credentials:
    """What one end of a connection shows and trusts, all PEM."""

    certificate: bytes
    key: bytes
    ca: bytes  # that signed the certificate of the other end


@dataclass(frozen=True)
class ShownKey:
    """The public key of a certificate."""

    pem: bytes
    hash: bytes  # SHA-256 of the DER SubjectPublicKeyInfo


def shown_key(certificate_pem: bytes) -> ShownKey:
    key = x509.load_pem_x509_certificate(certificate_pem).public_key()
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return ShownKey(pem, hashlib.sha256(der).digest())
