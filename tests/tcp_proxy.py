"""A line between a client and its server, that can be cut: a relay of TCP connections."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closed by a reset, as where a route is lost


class TcpProxy:
    """A port that passes connections on to another, until it is told to cut what goes through it. New ones pass again."""

    def __init__(self, port: int):
        self.to, self._lock, self._open = port, threading.Lock(), set()
        self.bytes_down = 0
        self._left: int | None = None  # bytes that may go up before the line is cut
        self._then: Callable[[], None] = lambda: None
        self.flows_down = threading.Event()  # while it is not set, nothing goes down
        self.flows_down.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="line", daemon=True).start()

    def cut_after(self, count: int, then: Callable[[], None] = lambda: None) -> None:
        """Cut when so many more bytes have gone up the line, in the middle of a message, and call `then`."""
        self._left, self._then = count, then

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
                    target=self._relay, args=(client,), name="line", daemon=True
                ).start()

    def _relay(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self.to)) as server:
            ends = {client, server}
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
            with self._lock:
                self._open |= ends
            down = threading.Thread(
                target=self._pass, args=(server, client, False), name="line", daemon=True
            )
            down.start()
            self._pass(client, server, True)
            down.join()
            with self._lock:
                self._open -= ends

    def _pass(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if up and self._left is not None:
                    if len(data) > self._left:
                        sink.sendall(data[: self._left])
                        self._left = None
                        self._then()
                        self.cut_now()
                        break
                    self._left -= len(data)
                if not up:
                    self.flows_down.wait()
                    self.bytes_down += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
