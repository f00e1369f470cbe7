"""A TCP proxy between a client and its server, whose connections can be cut."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, as after the loss of a route


class TcpProxy:
    """A port that forwards connections to another port. Cut connections can be opened again."""

    def __init__(self, port: int):
        self.to, self._lock, self._open = port, threading.Lock(), set()
        self.bytes_down = 0
        self._remaining: int | None = None  # bytes to the server before the connections are cut
        self._then: Callable[[], None] = lambda: None
        self.flows_down = threading.Event()  # until this is set, nothing is sent to clients
        self.flows_down.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.target = f"localhost:{self.port}"
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut_after(self, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Cut all connections after `count` more bytes to the server, and call `then`."""
        self._remaining, self._then = count, then

    def cut_now(self) -> None:
        with self._lock:
            for end in self._open:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    end.shutdown(socket.SHUT_RDWR)
            self._open.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flows_down.set()
        self.cut_now()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(
                    target=self._relay, args=(client,), name="proxy", daemon=True
                ).start()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.to)) as server:
            ends = {client, server}
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            with self._lock:
                self._open |= ends
            down = threading.Thread(
                target=self._forward, args=(server, client, False), name="proxy", daemon=True
            )
            down.start()
            self._forward(client, server, True)
            down.join()
            with self._lock:
                self._open -= ends

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if up and self._remaining is not None:
                    if len(data) > self._remaining:
                        sink.sendall(data[: self._remaining])
                        self._remaining = None
                        self._then()
                        self.cut_now()
                        break
                    self._remaining -= len(data)
                if not up:
                    self.flows_down.wait()
                    self.bytes_down += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
