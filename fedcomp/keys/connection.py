"""Check that a fedcomp server can be reached; if not, raise an error that names the cause and the fix.

`contact` resolves the host name, connects, performs a TLS 1.3 handshake with the client's certificate and waits for the first HTTP/2 frame,
all within one time limit. If a step fails, `contact` connects again to find the cause, such as a certificate for another host, another CA,
a server without TLS, or a wrong clock. gRPC would only report that the server is unavailable.
"""

import os
import socket
import ssl
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from cryptography import x509

from ..errors import ConfigError, KeysError, UnreachableError
from .certificates import holder_of, hosts_of, parse_certificate
from .enrolment import Enrolment, utc_now, validity_problem

# OpenSSL's error codes for a certificate that is not valid now.
OUT_OF_DATE = {9: "not yet valid", 10: "expired"}
# OpenSSL's error codes for a certificate that is not for the given host name (62) or IP address (64).
OTHER_HOST = (62, 64)
ALPN = "h2"
# Fraction of the time limit for the TLS handshake or, without TLS, for the first frame. The remaining time is for finding the cause of a
# failure.
HANDSHAKE = 0.6
# The first bytes that an HTTP/2 client sends: the preface and an empty SETTINGS frame.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
FRAME_HEAD = 9  # bytes in the header of an HTTP/2 frame
SETTINGS = b"\x04"  # type of a SETTINGS frame

ERRORS = {  # UnreachableError.cause → message
    "unknown host": "the host '{host}' cannot be resolved; correct --server, or check this machine's DNS settings",
    "closed": "nothing listens on {where}; start the server or relay there (fedcomp server start or fedcomp relay, with "
    "--port {port}{insecure}), or correct --server",
    "network": "{where} cannot be reached ({why}); check this machine's network, or correct --server",
    "silent": "{where} does not answer within {timeout_s:g} s ({why}); check that the server runs and that no firewall blocks port {port}",
    "host name": "the certificate of {where} is {names}; correct --server, or run on the server: fedcomp keys renew {holder} --host {host}",
    "ca": "the certificate of {where} is not signed by the CA that this client trusts; give the enrolment file that was made with this "
    "server's keys, or correct --server",
    "no tls": "{where} answers without TLS; start the server with --keys, or correct --server",
    # Possible causes: the server is stopping, has reached its limit of connections, or has no TLS.
    "starting": "{where} closes the connection during the TLS handshake; try again and check the server's output, or correct --server",
    "other tls": "{where} does not speak TLS 1.3 ({why}); correct --server, or install the same version of fedcomp on both sides",
    "tls": "{where} requires TLS; leave --insecure out and give the enrolment file",
    "refused": "{where} refuses the certificate of {name} ({why}); check the clocks of both machines, and if they are right, "
    "run on the server: fedcomp keys renew {holder}",
    "not fedcomp": "{where} is not a fedcomp server: it does not speak HTTP/2; correct --server",
}


@dataclass(frozen=True)
class Contact:
    """The result of `contact`."""

    certificate: x509.Certificate | None  # None without TLS
    seconds: float  # time from the start of the DNS look-up to the server's first answer


def address(text: str, name: str = "--server") -> tuple[str, int]:
    """Return host and port from a text such as `server.example:8080` or `[::1]:8080`.

    Raises ConfigError for any other text. `name`: the option or field that the error message names.
    """
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    is_host = bare and bare.isprintable() and "/" not in bare and (":" not in bare or bare != host)
    if not is_host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"{name} cannot be '{text}'; give host:port, such as server.example:8080")
    if not 0 < int(port[:6]) < 65536:
        raise ConfigError(f"{name} cannot be '{text}'; give a port from 1 to 65535")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def contact(host: str, port: int, trust: Enrolment | str | None, timeout_s: float = 5.0) -> Contact:
    """Check that a fedcomp server can be reached.

    `trust` determines what is checked:

    - An enrolment (of a client or relay): the server's certificate, and whether the server accepts the certificate in the enrolment.
    - The CA's certificate as PEM: only the server's certificate.
    - None: a server without TLS (--insecure).

    Raises UnreachableError within `timeout_s` seconds if a check fails, and KeysError if the CA in `trust` is not a certificate.
    """
    probe, answer = _Probe(host, port, trust, timeout_s), Future[Contact]()

    def run() -> None:
        try:
            answer.set_result(probe.contact())
        except Exception as error:
            answer.set_exception(error)

    # In a thread, because the system's DNS resolver has no timeout.
    threading.Thread(target=run, daemon=True, name="contact").start()
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        raise probe.silent() from None


class _Probe:
    """The steps of `contact`, and the search for the cause of a failure."""

    def __init__(self, host: str, port: int, trust: Enrolment | str | None, timeout_s: float):
        self.host, self.port, self.timeout_s = host, port, timeout_s
        self.where = join_address(host, port)
        self.enrolment = trust if isinstance(trust, Enrolment) else None
        ca = trust.ca if isinstance(trust, Enrolment) else trust
        try:
            self.ca = None if ca is None else parse_certificate(ca)
        except ValueError as error:
            raise KeysError(
                "the certificate of the CA cannot be read; copy it again from the folder of keys on the server"
            ) from error
        self.context = None if ca is None else _context(ca, self.enrolment)
        # Reported as the reason if the current step times out.
        self.timeout_reason = "the host name is not resolved"

    def contact(self) -> Contact:
        started = monotonic()
        try:
            socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise self._error("unknown host") from error
        self.timeout_reason = "no connection is made"
        with self._connect() as raw_socket:
            if self.context is None:
                self._expect_http2(raw_socket)
                return Contact(None, monotonic() - started)
            self.timeout_reason = "no answer to the TLS handshake"
            with self._handshake(raw_socket, self.context) as connection:
                if connection.selected_alpn_protocol() != ALPN:
                    raise self._error("not fedcomp")
                # Without a client certificate, the server now closes the connection.
                if self.enrolment:
                    self._expect_http2(connection)
                return Contact(_certificate(connection), monotonic() - started)

    def silent(self) -> UnreachableError:
        """Return the error for a timeout of the current step."""
        return self._error("silent", why=self.timeout_reason)

    def _error(self, cause: str, **values: object) -> UnreachableError:
        insecure = " --insecure" if self.ca is None else ""
        sentence = ERRORS[cause].format(**vars(self), insecure=insecure, **values)
        return UnreachableError(sentence, cause)

    # A connection.

    def _connect(self) -> socket.socket:
        address = self.host, self.port
        try:
            return socket.create_connection(address, self.timeout_s, all_errors=True)
        except ExceptionGroup as group:  # one error for each address of the host
            errors = group.exceptions
        refused = [error for error in errors if isinstance(error, ConnectionRefusedError)]
        if refused:
            raise self._error("closed") from refused[0]
        if isinstance(errors[-1], TimeoutError):
            raise self.silent() from errors[-1]
        why = getattr(errors[-1], "strerror", None) or errors[-1]
        raise self._error("network", why=why) from errors[-1]

    # TLS.

    def _handshake(self, raw_socket: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            raw_socket.settimeout(HANDSHAKE * self.timeout_s)
            return context.wrap_socket(raw_socket, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise self._untrusted(error) from error
        except (OSError, ValueError) as error:
            raise self._no_tls(error) from error

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> UnreachableError:
        certificate = self._server_certificate()
        if error.verify_code in OTHER_HOST:
            names = f"not for {self.host}"
            if certificate:
                names = f"for {', '.join(hosts_of(certificate)) or 'no host'} and {names}"
            return self._error("host name", names=names, holder=holder_of(certificate))
        if cause := OUT_OF_DATE.get(error.verify_code):
            renew = f"renew {holder_of(certificate)}"
            dated = ("certificate", certificate, renew), ("CA", self.ca, "init")
            for kind, checked, command in dated:
                remedy = f"run on the server: fedcomp keys {command}"
                if checked and (problem := validity_problem(checked, utc_now(), remedy)):
                    return UnreachableError(f"the {kind} of {self.where} {problem}", cause)
        return self._error("ca")

    def _no_tls(self, error: Exception) -> UnreachableError:
        """Return the error for a failed TLS handshake. Connect again to find out whether the server uses TLS."""
        with suppress(OSError, UnreachableError), self._connect() as connection:
            if _speaks_http2(connection):
                return self._error("no tls")
        if isinstance(error, TimeoutError):
            return self.silent()
        if isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return self._error("starting")
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return self._error("other tls", why=why)

    def _server_certificate(self) -> x509.Certificate | None:
        """Return the server's certificate without checking it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols([ALPN])
        with suppress(OSError, ValueError, UnreachableError), self._connect() as raw_socket:
            with context.wrap_socket(raw_socket, server_hostname=self.host) as connection:
                return _certificate(connection)
        return None

    # HTTP/2.

    def _expect_http2(self, connection: socket.socket) -> None:
        """Wait for the server's first HTTP/2 frame, which shows that the server accepts the client's certificate.

        The TLS 1.3 handshake does not show this, because it ends on the client's side before the server checks the certificate.
        """
        self.timeout_reason = "no HTTP/2 frame arrives"
        connection.settimeout((1.0 if self.enrolment else HANDSHAKE) * self.timeout_s)
        try:
            if _speaks_http2(connection):
                return
            error: OSError | None = None
        except OSError as raised:
            error = raised
        if self.enrolment is None and self._server_certificate():
            raise self._error("tls") from error
        if isinstance(error, TimeoutError):
            raise self.silent()
        if self.enrolment is None:
            raise self._error("not fedcomp") from error
        with self._connect():  # raises an error if the server has just ended
            raise self._refused(self.enrolment, error) from error

    def _refused(self, enrolment: Enrolment, error: OSError | None) -> UnreachableError:
        """Return the error for a server that closed the connection after it received the client's certificate."""
        try:
            enrolment.refuse_expired()
        except KeysError as expired:
            return UnreachableError(str(expired), "refused")
        # Only some servers send a TLS alert with the reason; gRPC servers do not.
        alert = (getattr(error, "reason", None) or "").partition("ALERT_")[2]
        why = alert.replace("_", " ").lower() or "it closes the connection"
        return self._error("refused", name=enrolment.name, holder=enrolment.holder, why=why)


def _speaks_http2(connection: socket.socket) -> bool:
    """Return whether the server's first frame is a SETTINGS frame, as HTTP/2 requires. Raises OSError if the connection fails."""
    # Over TLS, send nothing: if the server has closed the connection, sending could discard its TLS alert.
    if not isinstance(connection, ssl.SSLSocket):
        connection.sendall(PREFACE)
    with connection.makefile("rb") as file:
        head = file.read(FRAME_HEAD)
    return head[3:4] == SETTINGS and head[5:] == bytes(4)


def _context(ca: str, enrolment: Enrolment | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.load_verify_locations(cadata=ca)
    if enrolment is not None:
        certificate, key = map(_pipe, (enrolment.certificate, enrolment.private_key))
        try:
            context.load_cert_chain(f"/dev/fd/{certificate}", f"/dev/fd/{key}")
        finally:
            os.close(certificate)
            os.close(key)
    return context


def _pipe(text: str) -> int:
    """Return the file descriptor of a pipe that contains a short text, so that a private key need not be written to disk."""
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write(text)
    return reading


def _certificate(connection: ssl.SSLSocket) -> x509.Certificate:
    return x509.load_der_x509_certificate(connection.getpeercert(True) or b"")
