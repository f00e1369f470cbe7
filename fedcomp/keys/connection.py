"""Check that a fedcomp server can be reached; if not, raise an error that names the cause and the fix in one sentence.

`contact` resolves the name, connects, performs a TLS 1.3 handshake with the client's certificate and waits for the first HTTP/2 frame,
all within one deadline. gRPC itself reports a failure of any of these steps as an unavailable server. If the handshake fails, a second
connection without verification finds the cause: another host name, another CA, no TLS, or a wrong clock.
"""

import os
import queue
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from cryptography import x509

from ..errors import ConfigError, KeysError, UnreachableError
from .certificates import hosts_of, is_relay
from .enrolment import Enrolment, iso, one_certificate, utc_now

ENDED, NOT_BEGUN = 10, 9  # OpenSSL's codes for what is wrong with a certificate
OTHER_HOST = (62, 64)
ALPN = "h2"
HANDSHAKE = 0.6  # share of the time for the TLS handshake; the rest is for finding why it failed
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # empty SETTINGS
FRAME_HEAD, SETTINGS = 9, 4  # bytes; the type of a frame


@dataclass(frozen=True)
class Contact:
    """The answer of a fedcomp server that was reached."""

    certificate: x509.Certificate | None  # None without TLS
    seconds: float  # from the look-up of the name to the answer


def address(text: str, name: str = "--server") -> tuple[str, int]:
    """Return host and port of `host:port` or `[::1]:port`. Raises ConfigError, which begins with `name`."""
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host[:1] + host[-1:] == "[]" else host
    if (
        not bare
        or not bare.isprintable()
        or "/" in bare
        or (":" in bare and bare == host)
        or not (port.isascii() and port.isdigit())
    ):
        raise ConfigError(f"{name} cannot be '{text}'; give host:port, such as server.example:8080")
    if not 0 < int(port[:6]) < 65536:
        raise ConfigError(f"{name} cannot be '{text}'; give a port from 1 to 65535")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, or `[::1]:port` for an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_server(
    host: str, port: int, trust: Enrolment | bytes | str | None, timeout_s: float = 5.0
) -> None:
    """Check that a trusted server can be reached and accepts the client's certificate. Arguments and errors are those of `contact`."""
    contact(host, port, trust, timeout_s)


def contact(
    host: str, port: int, trust: Enrolment | bytes | str | None, timeout_s: float = 5.0
) -> Contact:
    """Connect to a server and check its certificate. With an enrolment, also check that the server accepts the client's certificate.

    `trust`: an enrolment; or the CA as PEM, to check the server's certificate only; or None for a server without TLS (--insecure).

    Raises UnreachableError within `timeout_s` seconds, and KeysError if the CA is not a certificate.
    """
    return _Probe(host, port, trust, timeout_s).contact()


class _Deadline:
    def __init__(self, timeout_s: float):
        self.timeout_s, self.end = timeout_s, monotonic() + timeout_s

    def left(self, share: float = 1.0) -> float:
        """Return the seconds left. Raises TimeoutError if there are none."""
        if (left := self.end - monotonic()) <= 0:
            raise TimeoutError
        return left * share


class _Probe:
    def __init__(
        self, host: str, port: int, trust: Enrolment | bytes | str | None, timeout_s: float
    ):
        self.host, self.port, self.deadline = host, port, _Deadline(timeout_s)
        self.where = join_address(host, port)
        self.enrolment = trust if isinstance(trust, Enrolment) else None
        ca = trust.ca if isinstance(trust, Enrolment) else trust
        self.ca = None if ca is None else _authority(ca)
        self.context = None if ca is None else _context(ca, self.enrolment)

    def contact(self) -> Contact:
        begun = monotonic()
        if self.context is None:
            with self._connected() as plain:
                self._expect_http2(plain)
            return Contact(None, monotonic() - begun)
        with self._connected() as plain, self._secured(plain, self.context) as connection:
            if connection.selected_alpn_protocol() != ALPN:
                raise self._foreign("it does not speak HTTP/2")
            if self.enrolment:  # without one, the server closes the connection
                self._expect_http2(connection)
            return Contact(_certificate(connection), monotonic() - begun)

    # A connection.

    def _connected(self) -> socket.socket:
        try:
            found = self._addresses()
        except TimeoutError:
            raise self._silent("its name is not resolved") from None
        last: OSError = OSError("it has no address")
        for i, (family, kind, protocol, _, where) in enumerate(found):
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(self.deadline.left(1 / (len(found) - i)))
                connection.connect(where)
                return connection
            except OSError as error:
                connection.close()
                last = error if not isinstance(last, ConnectionRefusedError) else last
        if isinstance(last, ConnectionRefusedError):
            raise UnreachableError(
                f"nothing listens on {self.where}; start the server or relay there (fedcomp server start or fedcomp relay, with "
                f"--port {self.port}{' --insecure' * (self.ca is None)}), or correct --server",
                "closed",
            ) from last
        if isinstance(last, TimeoutError):
            raise self._silent("no connection is made") from last
        raise UnreachableError(
            f"{self.where} cannot be reached ({last.strerror or last}); check this machine's network, or correct "
            "--server",
            "network",
        ) from last

    def _addresses(self) -> list:
        """Resolve the name in a thread, since the system's resolver takes no deadline."""
        answer: queue.SimpleQueue = queue.SimpleQueue()

        def ask() -> None:
            try:
                answer.put(
                    socket.getaddrinfo(self.host.encode("idna"), self.port, type=socket.SOCK_STREAM)
                )
            except (OSError, ValueError) as error:
                answer.put(error)

        threading.Thread(target=ask, daemon=True, name="resolve").start()
        try:
            found = answer.get(timeout=self.deadline.left())
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(found, Exception):
            raise UnreachableError(
                f"the host '{self.host}' cannot be resolved; correct --server, or check this machine's DNS settings",
                "unknown host",
            ) from found
        return found

    def _silent(self, what: str) -> UnreachableError:
        return UnreachableError(
            f"{self.where} does not answer within {self.deadline.timeout_s:g} s ({what}); check that the server runs "
            f"and that no firewall blocks port {self.port}",
            "silent",
        )

    # TLS.

    def _secured(self, plain: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            plain.settimeout(self.deadline.left(HANDSHAKE))
            return context.wrap_socket(plain, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise self._untrusted(error) from error
        except (OSError, ValueError) as error:
            raise self._no_tls(error) from error

    def _untrusted(self, error: ssl.SSLCertVerificationError) -> UnreachableError:
        shown = self._shown()
        if error.verify_code in OTHER_HOST:
            names = (
                f"is for {', '.join(hosts_of(shown)) or 'no host'} and not for {self.host}"
                if shown
                else f"is not for {self.host}"
            )
            return UnreachableError(
                f"the certificate of {self.where} {names}; correct --server, or on the server: "
                f"fedcomp keys renew {_name_of(shown)} --host {self.host}",
                "host name",
            )
        if error.verify_code in (ENDED, NOT_BEGUN):
            return self._untimely(shown)
        return UnreachableError(
            f"the certificate of {self.where} is not signed by the CA that this client trusts; give the enrolment file "
            "that was made with this server's keys, or correct --server",
            "ca",
        )

    def _untimely(self, shown: x509.Certificate | None) -> UnreachableError:
        """Return the error for a certificate, the server's or the CA's, that is not valid now by this machine's clock."""
        now = utc_now()
        wrong = [
            c
            for c in (shown, self.ca)
            if c and not c.not_valid_before_utc <= now < c.not_valid_after_utc
        ]
        if not wrong:
            return UnreachableError(
                f"the certificate of {self.where} is not valid now, and it is {iso(now)} by this machine's clock; "
                "correct the clock if it is wrong, else on the server: fedcomp keys renew server",
                "expired",
            )
        begins = now < wrong[0].not_valid_before_utc
        when = (
            f"begins on {iso(wrong[0].not_valid_before_utc)}"
            if begins
            else f"ended on {iso(wrong[0].not_valid_after_utc)}"
        )
        renew = f"renew {_name_of(shown)}"
        whose, remedy = ("certificate", renew) if wrong[0] is shown else ("CA", "init")
        return UnreachableError(
            f"the {whose} of {self.where} {when}, and it is {iso(now)} by this machine's clock; correct the clock "
            f"if it is wrong, else on the server: fedcomp keys {remedy}",
            "not yet valid" if begins else "expired",
        )

    def _no_tls(self, error: Exception) -> UnreachableError:
        """Return the error for a failed handshake, after a second connection without TLS."""
        with suppress(OSError, UnreachableError), self._connected() as connection:
            connection.settimeout(self.deadline.left())
            if _speaks_http2(connection, self.deadline):
                return UnreachableError(
                    f"{self.where} has no certificate, it answers without TLS; start the server with --keys, or correct "
                    "--server",
                    "no tls",
                )
        if isinstance(error, TimeoutError):
            return self._silent("no TLS is spoken")
        if isinstance(error, ConnectionError | ssl.SSLEOFError | ssl.SSLZeroReturnError):
            return UnreachableError(  # the server is stopping, is at its limit, or has no TLS
                f"{self.where} closes the connection without TLS; try again and check the server's output, or correct "
                "--server",
                "starting",
            )
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return UnreachableError(
            f"{self.where} speaks no TLS 1.3 ({why}); correct --server, or give server and client the same version "
            "of fedcomp",
            "no tls",
        )

    def _shown(self) -> x509.Certificate | None:
        """Return the server's certificate without checking it."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols([ALPN])
        with suppress(OSError, ValueError, UnreachableError), self._connected() as plain:
            plain.settimeout(self.deadline.left())
            with context.wrap_socket(plain, server_hostname=self.host) as connection:
                return _certificate(connection)
        return None

    # HTTP/2.

    def _expect_http2(self, connection: socket.socket) -> None:
        """Wait for the server's first frame. In TLS 1.3, a refusal of the client's certificate arrives only now, after the handshake."""
        share = 1.0 if self.enrolment else HANDSHAKE
        try:
            if _speaks_http2(connection, _Deadline(self.deadline.left(share))):
                return
            error: OSError | None = None
        except OSError as raised:
            error = raised
        if self.enrolment is not None:
            if isinstance(error, TimeoutError):
                raise self._silent("HTTP/2 is not answered")
            with self._connected():  # raises if the server has ended just now
                raise self._refused(self.enrolment, error) from error
        if self._shown():
            raise UnreachableError(
                f"{self.where} has a certificate; leave --insecure out and give the enrolment file",
                "tls",
            ) from error
        if isinstance(error, TimeoutError):
            raise self._silent("HTTP/2 is not answered")
        raise self._foreign("it does not speak HTTP/2") from error

    def _refused(self, enrolment: Enrolment, error: OSError | None) -> UnreachableError:
        """Return the error for a server that closed the connection after the client's certificate was sent.

        A gRPC server gives no reason; other servers send a TLS alert.
        """
        try:
            enrolment.refuse_expired()
        except KeysError as mine:
            return UnreachableError(str(mine), "refused")
        alert = (getattr(error, "reason", None) or "").partition("ALERT_")[2]
        why = alert.replace("_", " ").lower() or "it closes the connection"
        return UnreachableError(
            f"{self.where} refuses the certificate of client {enrolment.id} ({why}); check the clocks of both machines, "
            f"else on the server: fedcomp keys renew {enrolment.id}",
            "refused",
        )

    def _foreign(self, said: str) -> UnreachableError:
        return UnreachableError(
            f"{self.where} is not a fedcomp server: {said}; correct --server", "not fedcomp"
        )


def _speaks_http2(connection: socket.socket, deadline: _Deadline) -> bool:
    """Return whether the server's first frame is SETTINGS, as HTTP/2 begins. Raises OSError; TimeoutError at the deadline.

    With TLS the client sends nothing. A server that refuses the client's certificate has closed the connection: it would answer further
    bytes with a reset, which can discard the alert that names the reason.
    """
    if not isinstance(connection, ssl.SSLSocket):
        connection.settimeout(deadline.left())
        connection.sendall(PREFACE)
    head = b""
    while len(head) < FRAME_HEAD:
        connection.settimeout(deadline.left())
        if not (more := connection.recv(FRAME_HEAD - len(head))):
            return False
        head += more
    return head[3] == SETTINGS and head[5:] == bytes(4)


def _authority(ca: bytes | str) -> x509.Certificate:
    try:
        return one_certificate(ca)
    except ValueError as error:
        raise KeysError(
            "the certificate of the CA cannot be read; copy it anew from the folder of keys on the server"
        ) from error


def _context(ca: bytes | str, enrolment: Enrolment | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    context.load_verify_locations(cadata=ca.decode("ascii") if isinstance(ca, bytes) else ca)
    if enrolment is not None:
        certificate, key = map(_readable, (enrolment.certificate, enrolment.private_key))
        try:
            context.load_cert_chain(f"/dev/fd/{certificate}", f"/dev/fd/{key}")
        finally:
            os.close(certificate), os.close(key)
    return context


def _readable(text: str) -> int:
    """Return the reading end of a pipe that holds a short text: the ssl module reads keys from files only."""
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write(text)
    return reading


def _name_of(shown: x509.Certificate | None) -> str:
    """Return the name of a certificate's owner for `fedcomp keys renew`."""
    return "relay-ID" if shown and is_relay(shown) else "server"


def _certificate(connection: ssl.SSLSocket) -> x509.Certificate:
    return x509.load_der_x509_certificate(connection.getpeercert(True) or b"")
