"""Raw sockets that connect to a port of loopback."""

import socket
import time
from collections.abc import Callable


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def until_closed(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes the connection, which must happen within the socket's timeout."""
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the condition did not become true in time"
        time.sleep(0.005)
