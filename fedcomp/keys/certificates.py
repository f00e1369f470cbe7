"""Certificates of a private CA, of the server, of relays and of clients, all EC P-384.

Server, relays and clients trust this CA only. Clients and relays are identified by their public keys; the names in their certificates are
ignored.
"""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import KeysError

SERIAL_BITS = 64  # random
EARLIER = timedelta(hours=1)  # certificates are backdated by this, for clocks that are slow
ISSUER, RELAY = "fedcomp CA", "fedcomp relay"
USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
ALWAYS = ("localhost", "127.0.0.1")
LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


def hosts(given: Sequence[str]) -> list[str]:
    """Return the hosts that a certificate is for: those given, then localhost and 127.0.0.1, each once.

    Raises KeysError for a text that is no host.
    """
    return list(dict.fromkeys([*map(_host, given), *ALWAYS]))


def _host(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text[1:-1] if text[:1] + text[-1:] == "[]" else text))
    except ValueError:
        pass
    try:
        name = text.encode("idna").decode().removesuffix(".").lower()
    except UnicodeError:
        name = ""
    labels = name.split(".")
    if len(name) > 253 or not all(map(LABEL.fullmatch, labels)) or labels[-1].isdigit():
        raise KeysError(
            f"--host '{text}' is no host; give a name such as server.example or an address such as 10.0.0.5, without a port"
        )
    return name


def authority(key: ec.EllipticCurvePrivateKey, now: datetime, ends: datetime) -> x509.Certificate:
    """Return a self-signed CA certificate, which may sign servers and clients but no further CA."""
    return (
        _builder(ISSUER, key.public_key(), now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def of_server(
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    ca_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    ends: datetime,
) -> x509.Certificate:
    """Return a certificate by the CA for a server at these hosts."""
    leaf = _leaf("fedcomp server", key, [ExtendedKeyUsageOID.SERVER_AUTH], now, ends)
    return _at_hosts(leaf, hosts, ca_key)


def of_relay(
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    ca_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    ends: datetime,
) -> x509.Certificate:
    """Return a certificate by the CA for a relay, with which it is a TLS server at `hosts` and a TLS client of the server."""
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return _at_hosts(_leaf(RELAY, key, purposes, now, ends), hosts, ca_key)


def _at_hosts(
    leaf: x509.CertificateBuilder, hosts: Sequence[str], ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """Return the certificate of a TLS server at `hosts`, signed by the CA."""
    names = x509.SubjectAlternativeName(list(map(_name, hosts)))
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(names, critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def of_client(
    key: ec.EllipticCurvePublicKey,
    ca_key: ec.EllipticCurvePrivateKey,
    now: datetime,
    ends: datetime,
) -> x509.Certificate:
    """Return a certificate by the CA for a client. It does not say which client: the registry maps keys to ids.

    It is as short as TLS allows: a client that joins sends it, and the server returns it twice in session tickets.
    """
    builder = _leaf("fedcomp client", key, [ExtendedKeyUsageOID.CLIENT_AUTH], now, ends)
    return builder.sign(ca_key, hashes.SHA384())


def _leaf(
    subject: str,
    key: ec.EllipticCurvePublicKey,
    purposes: Sequence[x509.ObjectIdentifier],
    now: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    builder = _builder(subject, key, now, ends)
    return builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)


def _builder(
    subject: str, key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    named = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, ISSUER)
    ]
    return (
        x509.CertificateBuilder()
        .subject_name(named[0])
        .issuer_name(named[1])
        .public_key(key)
        .serial_number(secrets.randbits(SERIAL_BITS) | 1)
        .not_valid_before(now - EARLIER)
        .not_valid_after(ends)
    )


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in USAGES})


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the names and addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]


def is_relay(certificate: x509.Certificate) -> bool:
    """Return whether a certificate is that of a relay, for messages only."""
    return certificate.subject == x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, RELAY)])


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate file. Raises KeysError."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise KeysError(
            f"{path} cannot be read ({error.strerror}); restore it from a copy"
        ) from error
    except ValueError as error:
        raise KeysError(f"{path} is no certificate; restore it from a copy") from error


def read_private_key(
    path: Path, remedy: str = "restore it from a copy"
) -> ec.EllipticCurvePrivateKey:
    """Read a private key file. Raises KeysError, which ends with `remedy`."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise KeysError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise KeysError(f"{path} is no private key without a password; {remedy}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise KeysError(f"{path} is no EC key; {remedy}")
    return key


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
