"""Whether a server can be reached and is the one that it should be; where not, one sentence that says why and what to do.

A name is resolved, a connection made, the certificate checked against the CA and the name, and /health asked, all of it within
one deadline. A wrong name, a wrong CA, no TLS and a wrong clock are told apart by a second look that trusts nothing.
"""

import http.client
import io
import queue
import socket
import ssl
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic

from cryptography import x509

from ..errors import ConfigError, KeysError, UnreachableError
from .enrolment import iso, utc_now

ENDED, NOT_BEGUN = 10, 9  # OpenSSL's codes for what is wrong with a certificate
OTHER_HOST = (62, 64)
BUSY = (
    429,
    502,
    503,
    504,
)  # status where the server behind the port is not up, or this client asks too often
LARGEST_ANSWER = 64 << 10  # bytes; that of /health is empty
HANDSHAKE = 0.6  # share of the time that TLS may take, so that some is left to find out why it did not come about


@dataclass(frozen=True)
class Contact:
    """A server that answered as it should."""

    asked: datetime  # by this machine's clock, half-way between question and answer
    date: datetime | None  # by the server's, in whole seconds; None where it does not say
    certificate: x509.Certificate | None  # None without TLS
    seconds: float  # that the whole took


def address(text: str, name: str = "--server") -> tuple[str, int]:
    """Host and port of `host:port` or `[::1]:port`. Raises ConfigError, which begins with `name`."""
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


def check_server(host: str, port: int, ca_pem: bytes | str | None, timeout_s: float = 5.0) -> None:
    """Return when a fedcomp server is there whose certificate the CA signed for `host`; None means that it has none (--insecure).

    Raises UnreachableError, one sentence that names the fix, within `timeout_s` seconds; KeysError when `ca_pem` is no certificate.
    """
    contact(host, port, ca_pem, timeout_s)


def contact(host: str, port: int, ca_pem: bytes | str | None, timeout_s: float = 5.0) -> Contact:
    """The same, with what is learned on the way."""
    return _Visit(host, port, ca_pem, timeout_s).contact()


class _Deadline:
    def __init__(self, timeout_s: float):
        self.timeout_s, self.end = timeout_s, monotonic() + timeout_s

    def left(self, share: float = 1.0) -> float:
        """Seconds. Raises TimeoutError when there are none."""
        if (left := self.end - monotonic()) <= 0:
            raise TimeoutError
        return left * share


class _Answer(io.RawIOBase):
    """What a socket says until a deadline, and no more than may be said."""

    def __init__(self, connection: socket.socket, deadline: _Deadline):
        self.connection, self.deadline, self.size = connection, deadline, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        self.connection.settimeout(self.deadline.left())
        count = self.connection.recv_into(buffer)
        self.size += count
        if self.size > LARGEST_ANSWER:
            raise http.client.HTTPException("too long")
        return count

    def makefile(self, mode: str) -> io.BufferedReader:  # what http.client asks of a socket
        return io.BufferedReader(self)


class _Visit:
    def __init__(self, host: str, port: int, ca_pem: bytes | str | None, timeout_s: float):
        self.host, self.port, self.deadline = host, port, _Deadline(timeout_s)
        self.where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.context = None if ca_pem is None else _trusting(ca_pem)
        self.ca = (
            None
            if ca_pem is None
            else x509.load_pem_x509_certificate(
                ca_pem.encode() if isinstance(ca_pem, str) else ca_pem
            )
        )

    def contact(self) -> Contact:
        begun = monotonic()
        with self._connected() as plain, self._secured(plain) as connection:
            certificate = (
                _certificate(connection) if isinstance(connection, ssl.SSLSocket) else None
            )
            asked = utc_now()
            status, body, date = self._health(connection)
            middle = asked + (utc_now() - asked) / 2
        if status in BUSY:
            raise UnreachableError(
                f"{self.where} is there and does not serve now (status {status}); try again, or look at the server's "
                "screen",
                "starting",
            )
        if status != 200 or body:
            said = f"with status {status}" if status != 200 else "with a text"
            raise self._foreign(said)
        return Contact(middle, date, certificate, monotonic() - begun)

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
                f"nothing listens on {self.where}; start the server there with fedcomp server start --port {self.port}"
                f"{' --insecure' * (self.ca is None)}, or correct --server",
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
        """Resolving a name knows no deadline, so that it is done beside."""
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
                f"the host '{self.host}' is not known here; correct --server, or see that this machine can resolve "
                "names",
                "unknown host",
            ) from found
        return found

    def _silent(self, what: str) -> UnreachableError:
        return UnreachableError(
            f"{self.where} does not answer within {self.deadline.timeout_s:g} s ({what}); see that the server is up "
            f"and that no firewall shuts port {self.port}",
            "silent",
        )

    # TLS.

    def _secured(self, plain: socket.socket) -> socket.socket:
        """The same connection, encrypted where a CA is given."""
        if self.context is None:
            return plain
        try:
            plain.settimeout(self.deadline.left(HANDSHAKE))
            return self.context.wrap_socket(plain, server_hostname=self.host)
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
                f"fedcomp keys renew server --host {self.host}",
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
        """Whichever of both certificates is not of this time, by a clock that may be wrong."""
        now = utc_now()
        wrong = [
            c
            for c in (shown, self.ca)
            if c and not c.not_valid_before_utc <= now < c.not_valid_after_utc
        ]
        if not wrong:
            return UnreachableError(
                f"the certificate of {self.where} is not of this time, and it is {iso(now)} by this machine's clock; "
                "correct the clock if it is wrong, else on the server: fedcomp keys renew server",
                "expired",
            )
        begins = now < wrong[0].not_valid_before_utc
        when = (
            f"begins on {iso(wrong[0].not_valid_before_utc)}"
            if begins
            else f"ended on {iso(wrong[0].not_valid_after_utc)}"
        )
        whose, remedy = ("certificate", "renew server") if wrong[0] is shown else ("CA", "init")
        return UnreachableError(
            f"the {whose} of {self.where} {when}, and it is {iso(now)} by this machine's clock; correct the clock "
            f"if it is wrong, else on the server: fedcomp keys {remedy}",
            "not yet valid" if begins else "expired",
        )

    def _no_tls(self, error: Exception) -> UnreachableError:
        """Why a handshake came to nothing, with what time is left."""
        with (
            suppress(OSError, http.client.HTTPException, UnreachableError),
            self._connected() as connection,
        ):
            self._ask(connection)
            return UnreachableError(
                f"{self.where} has no certificate, it answers without TLS; start the server with --keys, or correct "
                "--server",
                "no tls",
            )
        if isinstance(error, TimeoutError):
            return self._silent("no TLS is spoken")
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        return UnreachableError(
            f"{self.where} speaks no TLS that is understood here ({why}); correct --server, or give server and client "
            "the same version of fedcomp",
            "no tls",
        )

    def _shown(self) -> x509.Certificate | None:
        """The certificate that the server shows, which nobody has checked."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with suppress(OSError, ValueError, UnreachableError), self._connected() as plain:
            plain.settimeout(self.deadline.left())
            with context.wrap_socket(plain, server_hostname=self.host) as connection:
                return _certificate(connection)
        return None

    # /health.

    def _health(self, connection: socket.socket) -> tuple[int, bytes, datetime | None]:
        try:
            return self._ask(connection)
        except TimeoutError:
            if self.context is None and self._shown():
                raise self._has_tls() from None
            raise self._silent("/health is not answered") from None
        except (OSError, http.client.HTTPException) as error:
            if self.context is None and self._shown():
                raise self._has_tls() from error
            raise self._foreign("with something else") from error

    def _ask(self, connection: socket.socket) -> tuple[int, bytes, datetime | None]:
        """Status, body and date of /health. Raises TimeoutError, another OSError or HTTPException."""
        plain = self.context is None or not isinstance(connection, ssl.SSLSocket)
        connection.settimeout(self.deadline.left(HANDSHAKE if plain else 1.0))
        connection.sendall(
            f"GET /health HTTP/1.1\r\nHost: {self._as_header()}\r\nConnection: close\r\n\r\n".encode()
        )
        share = _Deadline(self.deadline.left(HANDSHAKE if plain else 1.0))
        with http.client.HTTPResponse(_Answer(connection, share), method="GET") as response:  # type: ignore[arg-type]
            response.begin()
            return response.status, response.read(), _date(response.headers.get("Date"))

    def _as_header(self) -> str:
        return (
            self.where if ":" in self.host else f"{self.host.encode('idna').decode()}:{self.port}"
        )

    def _foreign(self, said: str) -> UnreachableError:
        return UnreachableError(
            f"{self.where} is no fedcomp server, it answers /health {said}; correct --server",
            "not fedcomp",
        )

    def _has_tls(self) -> UnreachableError:
        return UnreachableError(
            f"{self.where} has a certificate; leave --insecure out and give the enrolment file",
            "tls",
        )


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return []
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]


def _trusting(ca_pem: bytes | str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(
            cadata=ca_pem.decode("ascii") if isinstance(ca_pem, bytes) else ca_pem
        )
    except (ssl.SSLError, ValueError) as error:
        raise KeysError(
            "the certificate of the CA cannot be read; copy it anew from the folder of keys on the server"
        ) from error
    return context


def _certificate(connection: ssl.SSLSocket) -> x509.Certificate:
    return x509.load_der_x509_certificate(connection.getpeercert(True) or b"")


def _date(header: str | None) -> datetime | None:
    with suppress(TypeError, ValueError):
        return parsedate_to_datetime(header or "").astimezone(UTC)
    return None
