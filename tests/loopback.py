"""Real servers on loopback to put behind a guard, and raw sockets to speak to it."""

import hashlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PIECE = bytes(64 << 10)


@dataclass
class Arrived:
    """A request that an upstream heard to its end, or to where its client broke it off."""

    method: str
    path: str
    headers: list[tuple[bytes, bytes]]
    body_bytes: int = 0
    sha256: str = ""
    whole: bool = False


@dataclass
class Upstream:
    """What stands in for a SuperLink: uvicorn, as it does. `statuses` says what a path answers, 200 else.

    pull-object streams as many zeros as its body says, in chunks; everything else answers the SHA-256 of its body.
    """

    port: int = 0
    arrived: list[Arrived] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)

    async def __call__(self, scope, receive, send) -> None:
        request = Arrived(scope["method"], scope["raw_path"].decode(), scope["headers"])
        self.arrived.append(request)
        digest, kept = hashlib.sha256(), b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            digest.update(message.get("body", b""))
            kept = (kept + message.get("body", b""))[:20]
            request.body_bytes += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        request.whole, request.sha256 = True, digest.hexdigest()
        if request.path.endswith("pull-object"):
            await self.stream(int(kept), send)
            return
        body = b"" if request.method == "GET" else request.sha256.encode()
        headers = [
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"x-inner"),
            (b"x-inner", b"1"),
            (b"keep-alive", b"timeout=5"),
        ]
        await send(
            {
                "type": "http.response.start",
                "status": self.statuses.get(request.path, 200),
                "headers": headers,
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def stream(self, count: int, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while count:
            await send({"type": "http.response.body", "body": PIECE[:count], "more_body": True})
            count -= min(count, len(PIECE))
        await send({"type": "http.response.body"})


@contextmanager
def uvicorn_upstream() -> Iterator[Upstream]:
    upstream = Upstream()
    server = uvicorn.Server(
        uvicorn.Config(
            upstream,
            port=0,
            log_level="error",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    upstream.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield upstream
    finally:
        server.should_exit = True
        thread.join(10)


@contextmanager
def raw_upstream(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where every connection is given to `answer` and then closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


@contextmanager
def counting_relay(port: int) -> Iterator[tuple[int, list[int]]]:
    """A port that passes one connection after the other on, and the bytes that went up and down through it."""
    carried = [0, 0]

    def pump(source: socket.socket, sink: socket.socket, way: int) -> None:
        try:
            while data := source.recv(1 << 16):
                carried[way] += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def relay(client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", port)) as server:
            up = threading.Thread(target=pump, args=(client, server, 0))
            up.start()
            pump(server, client, 1)
            up.join()

    with raw_upstream(relay) as own:
        yield own, carried


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def head(method: str = "POST", path: str = "/v1/fleet/get-run", *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: h", *lines, "", ""]).encode("latin-1")


def post(body: bytes = b"", *lines: str, path: str = "/v1/fleet/get-run") -> bytes:
    return head("POST", path, f"Content-Length: {len(body)}", *lines) + body


def until_closed(connection: socket.socket) -> bytes:
    """Everything that comes before the other side closes; it has to within the socket's timeout."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def ask(port: int, data: bytes) -> bytes:
    """Send these bytes and no more; whatever comes back until the other side closes."""
    with connect(port) as connection:
        connection.sendall(data)
        return until_closed(connection)


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer
    return int(answer[9:12])


def answer_on(connection: socket.socket) -> tuple[int, bytes]:
    """One answer, and nothing beyond it."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)


def make_certificate(folder: Path, name: str, hosts: list[str]) -> tuple[Path, Path]:
    """A certificate that is its own CA, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [
        x509.IPAddress(ip_address(host)) if host[0].isdigit() else x509.DNSName(host)
        for host in hosts
    ]
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(
            subject,
            subject,
            key.public_key(),
            x509.random_serial_number(),
            now,
            now + timedelta(days=1),
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
