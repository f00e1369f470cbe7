"""Counts of the bytes that TCP connections carry, read from the kernel.

The counts include TLS, handshakes, HTTP/2 and keepalive, but no TCP and IP headers.
"""

import contextlib
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from .streams import Stream

DESCRIPTORS = "/dev/fd"
# Byte offsets of counters in the kernel's struct tcp_info.
ACKED, RECEIVED, SENT = 120, 128, 200
SIZE = SENT + 8
U64 = struct.Struct("=Q")
# The server cuts a connection on which it receives more than FLOOD_BYTES + 2 × (bytes of received messages) + (bytes sent) / 8 bytes. Until
# a client has joined, NEW_FLOOD_BYTES replaces FLOOD_BYTES. NEW_FLOOD_BYTES is low, because gRPC needs up to 30 bytes of memory for a byte
# of HTTP/2 headers.
FLOOD_BYTES, NEW_FLOOD_BYTES = 4 << 20, 16 << 10
Peer = tuple[str, int]  # address and port


class WireBytes(NamedTuple):
    """Bytes that a server received and sent."""

    bytes_in: int = 0
    bytes_out: int = 0

    def plus(self, other: "WireBytes") -> "WireBytes":
        return WireBytes(self.bytes_in + other.bytes_in, self.bytes_out + other.bytes_out)

    def minus(self, other: "WireBytes") -> "WireBytes":
        return WireBytes(self.bytes_in - other.bytes_in, self.bytes_out - other.bytes_out)


class TrafficReport(NamedTuple):
    """Bytes received and sent by a port, in total and by client."""

    total: WireBytes
    by_client: dict[int, WireBytes]


def counts_bytes() -> bool:
    """Return whether this platform counts the bytes of TCP connections and lists the file descriptors of a process."""
    return hasattr(socket, "TCP_INFO") and os.path.isdir(DESCRIPTORS)


def peer_of(text: str) -> Peer | None:
    """Parse a peer's address from gRPC, such as `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`.

    Return None for a peer that does not use TCP.
    """
    family, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _normalized(host.strip("[]")), int(port)


@functools.lru_cache(4096)
def _normalized(host: str) -> str:
    """Normalize the text of an IP address. An IPv4-mapped IPv6 address becomes an IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


class PortTraffic:
    """The numbers of bytes that TCP connections to a listening port of this process have carried, in total and by client.

    For an ended connection, the last reading of its kernel counters is used. `port`, the number of the port, is None until the port is
    open, and always None on a platform that does not count bytes. Not thread-safe.
    """

    port: int | None = None

    def __init__(self) -> None:
        # Open connections by peer: the file descriptor and the last byte counts.
        self._live: dict[Peer, tuple[int, WireBytes]] = {}
        # By peer: the client that has joined on the connection. A new connection may not be in `_live` yet, because `_find` runs only now
        # and then.
        self._clients: dict[Peer, int] = {}
        # Sums of the bytes of ended connections, in total and by client.
        self._ended, self._ended_by_client = WireBytes(), dict[int, WireBytes]()
        # Connections that `cut` has shut down but that are still in `_live`.
        self._cut: set[Peer] = set()
        # The number of connections on which no client had joined when `floods` was last called.
        self.new_connections = 0

    @property
    def connections(self) -> int | None:
        """The number of open TCP connections, with or without a gRPC stream, or None on platforms that do not list connections."""
        if self.port is None:
            return None
        self.read_all()
        return len(self._live)

    def find(self, peer: Peer | None) -> None:
        """Look for a connection if it is unknown, and read its byte counters."""
        if self.port is not None and peer is not None and self.read(peer) is None:
            self._find()

    def assign(self, peer: Peer | None, client: int) -> None:
        """Attribute the bytes of a connection to a client."""
        if self.port is not None and peer is not None:
            self._clients[peer] = client

    def read(self, peer: Peer | None) -> WireBytes | None:
        """Read the byte counters of a connection. Return None if `peer` is unknown.

        If the connection has just ended, return the last reading. Bytes sent between the last reading and the end are not counted.
        """
        if peer is None or peer not in self._live:
            return None
        descriptor, last = self._live[peer]
        with contextlib.suppress(OSError), self._connection(descriptor) as (connection, found):
            if found == peer:
                reading = _counters(connection) or last
                self._live[peer] = descriptor, reading
                return reading
        return self._forget(peer)

    def report(self, streams: Iterable["Stream"]) -> TrafficReport | None:
        """Return the bytes that went through the port since it was opened, or None if the platform does not count bytes.

        For connections without a stream, the last reading is used, so that many idle connections do not slow down the rounds of a run.
        """
        if self.port is None:
            return None
        peers = [stream.peer for stream in streams if stream.peer is not None]
        for peer in peers:
            self.read(peer)
        if not self._live.keys() >= set(peers):
            self.read_all()
        by_client = dict(self._ended_by_client)
        for peer, client in self._clients.items():
            if peer in self._live:
                by_client[client] = by_client.get(client, WireBytes()).plus(self._live[peer][1])
        return TrafficReport(self._total(), by_client)

    def floods(
        self, streams: Iterable["Stream"], ended: Collection[Peer]
    ) -> list[tuple[Peer, "Stream | None", int]]:
        """Return the connections on which the server receives far more bytes than messages need, such as a flood of HTTP/2 pings.

        Each connection is a tuple: the peer, the stream (or None), and the number of bytes received. For connections on which no client has
        joined, the byte counters are read again; for other connections, the last reading is used. Connections that were cut are not
        returned again. `ended`: peers of connections that are not checked, because their streams have ended.
        """
        if self.port is None:
            return []
        by_peer, floods = {stream.peer: stream for stream in streams}, []
        self._find()
        self.new_connections = 0
        for peer, (_, last) in [*self._live.items()]:
            stream = by_peer.get(peer)
            in_use = stream is not None and stream.joined
            if not in_use:
                last = self.read(peer) or last
            if peer in ended or peer in self._cut or peer not in self._live:
                continue
            self.new_connections += not in_use
            received_bytes, sent_bytes = last
            messages = 0 if stream is None else stream.received_bytes
            limit = FLOOD_BYTES if in_use else NEW_FLOOD_BYTES
            if received_bytes > limit + 2 * messages + sent_bytes // 8:
                floods.append((peer, stream, received_bytes))
        return floods

    def cut(self, peer: Peer | None) -> None:
        """Shut down a connection immediately, and discard received data that gRPC has not read."""
        if self.port is None or peer is None:
            return
        if self.read(peer) is None:
            self._find()
        if peer in self._live:
            descriptor, _ = self._live[peer]
            with contextlib.suppress(OSError), self._connection(descriptor) as (connection, found):
                if found == peer:
                    self._cut.add(peer)
                    connection.shutdown(socket.SHUT_RDWR)
                    while connection.recv(1 << 20, socket.MSG_DONTWAIT):
                        pass
        else:  # the connection has ended before it was found
            self._clients.pop(peer, None)

    def _forget(self, peer: Peer) -> WireBytes:
        """Count a connection as ended, and return the last reading of its byte counters."""
        _, last = self._live.pop(peer)
        self._cut.discard(peer)
        self._ended = self._ended.plus(last)
        if (client := self._clients.pop(peer, None)) is not None:
            before = self._ended_by_client.get(client, WireBytes())
            self._ended_by_client[client] = before.plus(last)
        return last

    def _find(self) -> None:
        """Look for new connections and read their byte counters."""
        try:
            now = {int(name) for name in os.listdir(DESCRIPTORS)}
        except OSError:  # the process has reached its limit of open files
            return
        for known, (descriptor, _) in [*self._live.items()]:
            if descriptor not in now:
                self._forget(known)
        for descriptor in now.difference(descriptor for descriptor, _ in self._live.values()):
            with contextlib.suppress(OSError), self._connection(descriptor) as (connection, peer):
                if peer is not None:
                    if peer in self._live:  # an ended connection used the same address
                        self._forget(peer)
                    self._live[peer] = descriptor, _counters(connection) or WireBytes()

    def read_all(self) -> None:
        """Read the byte counters of all connections, including new connections."""
        if self.port is None:
            return
        # `read` also forgets ended connections, even if new connections already use their file descriptors.
        for peer in [*self._live]:
            self.read(peer)
        self._find()

    def _total(self) -> WireBytes:
        """Return the bytes of all open and ended connections, according to the last readings."""
        readings = [self._ended, *(last for _, last in self._live.values())]
        return WireBytes(*map(sum, zip(*readings)))

    @contextlib.contextmanager
    def _connection(self, descriptor: int) -> Iterator[tuple[socket.socket, Peer | None]]:
        """Yield (socket, peer) for a file descriptor. `peer` is None if the socket is not a connection of the port.

        Raises OSError if the file descriptor does not belong to a socket.
        """
        borrowed = socket.socket(fileno=descriptor)
        try:
            yield borrowed, self._peer_at(borrowed)
        finally:
            borrowed.detach()

    def _peer_at(self, connection: socket.socket) -> Peer | None:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        if connection.type != socket.SOCK_STREAM or connection.getsockname()[1] != self.port:
            return None
        host, remote = connection.getpeername()[:2]
        return _normalized(host), remote


def _counters(connection: socket.socket) -> WireBytes | None:
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(data) < RECEIVED + 8:
        return None
    sent = SENT if len(data) >= SENT + 8 else ACKED
    return WireBytes(U64.unpack_from(data, RECEIVED)[0], U64.unpack_from(data, sent)[0])
