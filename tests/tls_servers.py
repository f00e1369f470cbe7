"""Small servers on loopback that end with their test: without TLS, or with a certificate for chosen dates and hosts."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fedcomp.keys import certificates
from fedcomp.keys.certificates import CURVE
from fedcomp.keys.enrolment import Enrolment, utc_now

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # the first frame of a server that speaks HTTP/2


class Authority:
    """A CA that signs the certificates that a test needs."""

    def __init__(self, begins_days: float = -900, ends_days: float = 900):
        self.key = ec.generate_private_key(CURVE())
        now = utc_now()
        self.certificate = certificates.ca_certificate(
            self.key, now + timedelta(days=begins_days), now + timedelta(days=ends_days)
        )
        self.pem = certificates.certificate_pem(self.certificate)

    def context(
        self,
        folder: Path,
        hosts: Sequence[str] = ("localhost", "127.0.0.1"),
        begins_days: float = 0,
        ends_days: float = 90,
        make: Callable[..., x509.Certificate] = certificates.server_certificate,
    ) -> ssl.SSLContext:
        """Return an SSL context for a server with a certificate for `hosts`, valid from `begins_days` to `ends_days` from now."""
        key, now = ec.generate_private_key(CURVE()), utc_now()
        begins, ends = now + timedelta(days=begins_days), now + timedelta(days=ends_days)
        made = make(key.public_key(), hosts, self.key, begins, ends)
        (folder / "its.crt").write_bytes(certificates.certificate_pem(made))
        (folder / "its.key").write_bytes(certificates.private_key_pem(key))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "its.crt", folder / "its.key")
        context.load_verify_locations(cadata=self.pem.decode())
        context.verify_mode = ssl.CERT_OPTIONAL
        context.set_alpn_protocols(["h2"])
        return context

    def enrolment(
        self, id: int = 3, begins_days: float = 0, ends_days: float = 90, ca: bytes | None = None
    ) -> Enrolment:
        """Return a client's enrolment, valid from `begins_days` to `ends_days` from now. `ca`: PEM of another CA that the client trusts."""
        key, now = ec.generate_private_key(CURVE()), utc_now()
        begins, ends = now + timedelta(days=begins_days), now + timedelta(days=ends_days)
        certificate = certificates.client_certificate(key.public_key(), self.key, begins, ends)
        return Enrolment(
            id,
            certificates.certificate_pem(certificate).decode(),
            certificates.private_key_pem(key).decode(),
            (ca or self.pem).decode(),
        )


@contextmanager
def serving(
    answer: bytes | None = SETTINGS,
    context: ssl.SSLContext | None = None,
    family: int = socket.AF_INET,
    until: bytes = b"",
) -> Iterator[int]:
    """Yield the port of a server that sends `answer` on each connection; None: it sends nothing.

    With TLS it sends at once, else after it has received bytes that contain `until`.
    """
    listener = socket.create_server(
        ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family
    )
    done, threads = threading.Event(), []

    def one(plain: socket.socket) -> None:
        try:
            plain.settimeout(10)
            with context.wrap_socket(plain, server_side=True) if context else plain as connection:
                heard = b"" if context else connection.recv(4096)
                while until not in heard and (more := connection.recv(4096)):
                    heard += more
                if answer is None:
                    done.wait()
                else:
                    connection.sendall(answer)
        except OSError:
            plain.close()  # the client has closed the connection

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        done.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in [accepting, *threads]:
            thread.join(12)


@contextmanager
def grpc_serving(keys: Path | None) -> Iterator[int]:
    """Yield the port of a gRPC server with the server's certificate of a folder of keys; None: without TLS.

    It accepts clients with a certificate of the folder's CA.
    """
    server = grpc.server(ThreadPoolExecutor(1))
    if keys is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = tuple((keys / name).read_bytes() for name in ("server.key", "server.crt"))
        credentials = grpc.ssl_server_credentials(
            [pair], (keys / "ca.crt").read_bytes(), require_client_auth=True
        )
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return trial.getsockname()[1]
