"""Raw sockets that speak HTTP to a port of loopback."""

import socket
import time
from collections.abc import Callable


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def head(method: str = "POST", path: str = "/v1/fleet/get-run", *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: h", *lines, "", ""]).encode("latin-1")


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


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.005)
