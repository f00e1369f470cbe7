"""Bytes of TCP connections as the kernel counts them: TLS, handshakes, HTTP/2 and keepalive included, without TCP and IP headers."""

import contextlib
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
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
    return _plain(host.strip("[]")), int(port)


@functools.lru_cache(4096)
def _plain(host: str) -> str:
    """Return an address in one form, with IPv4 addresses that are mapped into IPv6 as IPv4."""
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
    return _plain(host), remote


def _read(borrowed: socket.socket) -> Traffic | None:
    data = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(data) < RECEIVED + 8:
        return None
    sent = SENT if len(data) >= SENT + 8 else ACKED
    return Traffic(U64.unpack_from(data, RECEIVED)[0], U64.unpack_from(data, sent)[0])


def available() -> bool:
    """Return whether this platform counts bytes of connections and lists the descriptors of a process."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir(DESCRIPTORS)


class PortTraffic:
    """Counters of all connections to a listening port of this process, including those that have ended.

    A connection that ended counts with the bytes of its last reading. Not thread-safe.
    """

    def __init__(self, port: int):
        self.port = port
        self._ended = Traffic()
        self._seen: dict[int, Peer] = {}  # by descriptor
        self._live: dict[Peer, tuple[int, Traffic]] = {}  # descriptor and last reading

    @property
    def connections(self) -> int:
        return len(self._live)

    def peers(self) -> Collection[Peer]:
        """Return the peers of the open connections, as of the last search."""
        return self._live.keys()

    def find(self) -> None:
        """Look for new connections."""
        try:
            now = {int(name) for name in os.listdir(DESCRIPTORS)}
        except OSError:  # the limit of open files is reached
            return
        for descriptor in self._seen.keys() - now:
            self._forget(descriptor, self._seen[descriptor])
        for descriptor in now - self._seen.keys():
            with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
                if (peer := _peer_at(borrowed, self.port)) is not None:
                    if peer in self._live:  # an earlier connection from the same port
                        self._forget(self._live[peer][0], peer)
                    self._seen[descriptor] = peer
                    self._live[peer] = descriptor, Traffic()

    def _forget(self, descriptor: int, peer: Peer) -> None:
        if self._seen.get(descriptor) == peer:
            del self._seen[descriptor]
        if peer in self._live and self._live[peer][0] == descriptor:
            self._ended = self._ended.plus(self._live.pop(peer)[1])

    def of(self, peer: Peer) -> Traffic | None:
        """Read a connection now. Returns its last reading if it has just ended, None if it is not known."""
        if peer not in self._live:
            return None
        descriptor, last = self._live[peer]
        with contextlib.suppress(OSError), _borrowed(descriptor) as borrowed:
            if _peer_at(borrowed, self.port) == peer:
                last = _read(borrowed) or last
                self._live[peer] = descriptor, last
                return last
        self._forget(descriptor, peer)
        return last

    def search(self, peer: Peer) -> Traffic | None:
        """Read a connection that `find` has missed because its descriptor number belonged to another connection before."""
        for other in [*self._live]:
            self.of(other)
        self.find()
        return self.of(peer)

    def last(self, peer: Peer) -> Traffic | None:
        """Return the last reading of an open connection, None for others."""
        return self._live[peer][1] if peer in self._live else None

    def total(self) -> Traffic:
        """Read all connections."""
        for peer in [*self._live]:
            self.of(peer)  # and forget those that have ended, whose descriptors may be in use again
        known = {*self._live}
        self.find()
        for peer in self._live.keys() - known:
            self.of(peer)
        total = self._ended
        for _, last in self._live.values():
            total = total.plus(last)
        return total

    def cut(self, peer: Peer) -> bool:
        """Shut a connection down without waiting for its unsent data. Return whether it was found."""
        self.find()
        self.of(peer)
        if peer not in self._live:
            return False
        with contextlib.suppress(OSError), _borrowed(self._live[peer][0]) as borrowed:
            if _peer_at(borrowed, self.port) == peer:
                borrowed.shutdown(socket.SHUT_RDWR)
        return True
