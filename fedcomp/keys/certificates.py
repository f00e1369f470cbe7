"""X.509 certificates of the federation's own CA (certificate authority), its server, relays and clients. All keys are on the curve P-384.

The server, relays and clients trust only this CA. A client or relay is identified by the public key in its certificate, not by the name in
its certificate.
"""

import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import KeysError

T = TypeVar("T")

CURVE = ec.SECP384R1
PrivateKey = ec.EllipticCurvePrivateKey
# The validity of a certificate begins this long before it is made, so that machines whose clocks are slow accept it.
BACKDATED_BY = timedelta(hours=1)
ISSUER, RELAY = "fedcomp CA", "fedcomp relay"  # common names (CN) in certificates
USAGES = """
    digital_signature content_commitment key_encipherment data_encipherment key_agreement key_cert_sign crl_sign
    encipher_only decipher_only
""".split()
DEFAULT_HOSTS = ("localhost", "127.0.0.1")
LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.IGNORECASE)


def certificate_hosts(hosts: Sequence[str]) -> list[str]:
    """Return `hosts`, localhost and 127.0.0.1 without duplicates. Raises KeysError for a text that is not a host name or IP address."""
    return list(dict.fromkeys([*map(_host, hosts), *DEFAULT_HOSTS]))


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
            f"--host '{text}' is not a host; give a name such as server.example or an address such as 10.0.0.5, without a port"
        )
    return name


def ca_certificate(key: PrivateKey, now: datetime, ends: datetime) -> x509.Certificate:
    """Return a self-signed CA certificate. The CA may not sign certificates of other CAs."""
    return (
        _builder(ISSUER, key.public_key(), now, ends)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def server_certificate(
    key: ec.EllipticCurvePublicKey,
    hosts: Sequence[str],
    ca_key: PrivateKey,
    now: datetime,
    ends: datetime,
    relay: bool = False,
) -> x509.Certificate:
    """Return a certificate for a server or relay that clients reach at `hosts`. It is valid until `ends`.

    A relay's certificate is also valid for a TLS client, because the relay connects to the server.
    """
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH] + [ExtendedKeyUsageOID.CLIENT_AUTH] * relay
    names = x509.SubjectAlternativeName(list(map(_name, hosts)))
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    return (
        _builder(RELAY if relay else "fedcomp server", key, now, ends)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(issuer, critical=False)
        .add_extension(names, critical=False)
        .sign(ca_key, hashes.SHA384())
    )


def client_certificate(
    key: ec.EllipticCurvePublicKey, ca_key: PrivateKey, now: datetime, ends: datetime
) -> x509.Certificate:
    """Return a certificate for a client, without the client's id: the registry (registry.py) maps keys to ids.

    The certificate is as short as TLS allows, because each join transfers it three times: the client sends it, and the server sends it back
    in two TLS session tickets.
    """
    purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = _builder("fedcomp client", key, now, ends).add_extension(purpose, critical=False)
    return builder.sign(ca_key, hashes.SHA384())


def _builder(
    subject: str, key: ec.EllipticCurvePublicKey, now: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(subject))
        .issuer_name(_common_name(ISSUER))
        .public_key(key)
        .serial_number(secrets.randbits(64) | 1)
        .not_valid_before(now - BACKDATED_BY)
        .not_valid_after(ends)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{name: name in allowed for name in USAGES})


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """Return the host names and IP addresses in a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    addresses = map(str, names.get_values_for_type(x509.IPAddress))
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def holder_of(certificate: x509.Certificate | None) -> str:
    """Return the argument for `fedcomp keys renew`: "server", or "relay-ID" for a relay.

    The user must replace ID, because a relay's certificate does not contain the relay's id.
    """
    relay = certificate is not None and certificate.subject == _common_name(RELAY)
    return "relay-ID" if relay else "server"


def is_signed_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Return whether `ca` issued and signed a certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def parse_certificate(text: str) -> x509.Certificate:
    """Parse a PEM text with exactly one certificate, or raise ValueError."""
    (certificate,) = x509.load_pem_x509_certificates(text.encode())
    return certificate


def parse_private_key(text: bytes) -> PrivateKey:
    """Parse an EC P-384 private key from its PEM, or raise ValueError."""
    try:
        key = load_pem_private_key(text, None)
    except (TypeError, UnsupportedAlgorithm) as error:  # TypeError if the key has a password
        raise ValueError(str(error)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, CURVE):
        raise ValueError("the key must be an EC P-384 key")
    return key


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate file. Raises KeysError if the file cannot be read or has no certificate."""
    return _read(path, x509.load_pem_x509_certificate, "a certificate", "restore it from a copy")


def read_private_key(path: Path, remedy: str = "restore it from a copy") -> PrivateKey:
    """Read a private key file. Raises KeysError, with `remedy` at the end, if the file cannot be read or has no valid key."""
    return _read(path, parse_private_key, "an EC P-384 private key without a password", remedy)


def _read(path: Path, parse: Callable[[bytes], T], expected: str, remedy: str) -> T:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise KeysError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise KeysError(f"{path} is not {expected}; {remedy}") from error


def private_key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)
