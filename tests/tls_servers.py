"""Small servers on loopback, without TLS or with certificates of any dates and hosts, which end with their test."""

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
    """A CA that signs whatever a test needs."""

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
        """What a server needs to show a certificate for `hosts` that begins and ends so many days from now."""
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
        """A client whose certificate begins and ends so many days from now. `ca`: another CA that it trusts."""
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
    """The port of a server that gives `answer` (None: never) on each connection until left: with TLS at once, else after bytes that
    hold `until`."""
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
            plain.close()  # the other side did not like it

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
    """The port of a gRPC server with the certificate of a folder of keys, for clients of its CA; None: without TLS."""
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
