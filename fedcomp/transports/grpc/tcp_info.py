"""Bytes of TCP connections as the kernel counts them: TLS, handshakes, HTTP/2 and keepalive included, without TCP and IP headers."""

import contextlib
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote

DESCRIPTORS = "/dev/fd"
# Offsets in the kernel's struct tcp_info.
ACKED, RECEIVED, SENT = 120, 128, 200
SIZE = SENT + 8
U64 = struct.Struct("=Q")


class Traffic(NamedTuple):
    """Bytes that a server received and sent."""

    bytes_in: int = 0
    bytes_out: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes_in + other.bytes_in, self.bytes_out + other.bytes_out)

    def minus(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes_in - other.bytes_in, self.bytes_out - other.bytes_out)


Peer = tuple[str, int]  # address and port


def peer_of(text: str) -> Peer | None:
    """Return the peer of a name such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`; None if it is no TCP peer."""
    family, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _normalized(host.strip("[]")), int(port)


@functools.lru_cache(4096)
def _normalized(host: str) -> str:
    """Return the normalized text of an address. IPv4 addresses that are mapped into IPv6 become IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use an open descriptor as a socket without owning it. Raises OSError if it is not a socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _peer_at(borrowed: socket.socket, port: int) -> Peer | None:
    """Return the peer of a connection to a local port; None for other sockets."""
    if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    if borrowed.type != socket.SOCK_STREAM or borrowed.getsockname()[1] != port:
        return None
    host, remote = borrowed.getpeername()[:2]
    return _normalized(host), remote


def _read(borrowed: socket.socket) -> Traffic | None:
    data = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(data) < RECEIVED + 8:
        return None
    sent = SENT if len(data) >= SENT + 8 else ACKED
    return Traffic(U64.unpack_from(data, RECEIVED)[0], U64.unpack_from(data, sent)[0])


def available() -> bool:
    """Return whether this platform counts bytes of connections and lists the descriptors of a process."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir(DESCRIPTORS)


class ConnectionCounters:
    """Counters of all connections to a listening port of this process, including those that have ended.

    A connection that ended counts with the bytes of its last reading. Not thread-safe.
    """

    def __init__(self, port: int):
        self.port = port
        self._ended = Traffic()
        self._live: dict[int, tuple[Peer, Traffic]] = {}  # peer and last reading by descriptor
        self._descriptors: dict[Peer, int] = {}  # the inverse: each descriptor of `_live` once

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._live)

    def find(self) -> None:
        """Look for new connections and read them."""
        try:
            now = {int(name) for name in os.listdir(DESCRIPTORS)}
        except OSError:  # the limit of open files is reached
            return
        for descriptor in self._live.keys() - now:
            self._forget(descriptor)
        for descriptor in now - self._live.keys():
            with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
                if (peer := _peer_at(borrowed, self.port)) is not None:
                    reading = _read(borrowed) or Traffic()
                    if peer in self._descriptors:  # an earlier connection from the same port
                        self._forget(self._descriptors[peer])
                    self._descriptors[peer] = descriptor
                    self._live[descriptor] = peer, reading

    def _forget(self, descriptor: int) -> Traffic:
        """Count a connection as ended, and return its last reading."""
        peer, last = self._live.pop(descriptor)
        del self._descriptors[peer]
        self._ended = self._ended.plus(last)
        return last

    def read(self, peer: Peer) -> Traffic | None:
        """Read a connection now. Return its last reading if it has just ended, None if it is unknown."""
        if peer not in self._descriptors:
            return None
        descriptor = self._descriptors[peer]
        with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
            if _peer_at(borrowed, self.port) == peer:
                reading = _read(borrowed) or self._live[descriptor][1]
                self._live[descriptor] = peer, reading
                return reading
        return self._forget(descriptor)

    def last_readings(self) -> list[tuple[Peer, Traffic]]:
        """Return the last readings of the open connections."""
        return [*self._live.values()]

    def search(self, peer: Peer) -> Traffic | None:
        """Look for a connection and read it."""
        self.find()
        if peer not in self._descriptors:  # its descriptor may still count as another connection's
            self.read_all()
        return self.read(peer)

    def read_all(self) -> Traffic:
        """Read all connections, and look for new ones. Return the sum with those that have ended."""
        for peer in [*self._descriptors]:
            self.read(
                peer
            )  # and forget those that have ended, whose descriptors may be in use again
        self.find()
        total = self._ended
        for _, last in self._live.values():
            total = total.plus(last)
        return total

    def cut(self, peer: Peer) -> None:
        """Shut a connection down without waiting for its unsent data."""
        if self.read(peer) is None:
            self.find()
        if peer in self._descriptors:
            with contextlib.suppress(OSError), _borrowed(self._descriptors[peer]) as borrowed:
                if _peer_at(borrowed, self.port) == peer:
                    borrowed.shutdown(socket.SHUT_RDWR)
