"""Counts of the bytes that TCP connections carry, read from the kernel.

The counts include TLS, handshakes, HTTP/2 and keepalive, but no TCP and IP headers.
"""

import contextlib
import ctypes
import functools
import ipaddress
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

if TYPE_CHECKING:
    from .streams import Stream

DESCRIPTORS = "/dev/fd"
# Offsets in bytes of the counters tcpi_bytes_acked, tcpi_bytes_received and tcpi_bytes_sent in Linux's struct tcp_info.
ACKED, RECEIVED, SENT = 120, 128, 200
SIZE = SENT + 8
U64 = struct.Struct("=Q")
# The server cuts a connection on which it receives more than FLOOD_BYTES + 2 × (bytes of received messages) + (bytes sent) / 8 bytes.
# Until a client has joined, NEW_FLOOD_BYTES replaces FLOOD_BYTES. NEW_FLOOD_BYTES is low, because gRPC needs up to 30 bytes of memory for
# a byte of HTTP/2 headers.
FLOOD_BYTES, NEW_FLOOD_BYTES = 4 << 20, 16 << 10
# If there are many connections on which no client has joined, they share NEW_BYTES bytes, so that their headers do not fill the memory. But
# each may send at least MIN_NEW_FLOOD_BYTES bytes. To join, client and server together send about 6,000 bytes.
NEW_BYTES, MIN_NEW_FLOOD_BYTES = 1 << 20, 6 << 10
# The server cuts a connection on which it receives more than ENDED_FLOOD_BYTES bytes after the end of its stream.
ENDED_FLOOD_BYTES = 1 << 20
JOINED_READS = 32  # number of joined connections whose counters are read in one check for floods
FROZEN_S, MAX_FROZEN, MAX_FROZEN_BYTES = 10.0, 32, 1 << 18  # see `PortTraffic.cut_frozen`
# Linux's socket options that add a packet filter to a socket and remove it, and a filter of one instruction that drops all packets.
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
Peer = tuple[str, int]  # IP address and port of the other end of a connection


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
        # Connections in `_live` that were cut.
        self._cut: set[Peer] = set()
        # Frozen connections, the oldest first: the time when the connection was frozen, and the number of bytes that gRPC may keep for it.
        self._frozen: dict[Peer, tuple[float, int]] = {}
        self._accepting = True
        self._turn = 0  # position in `_live` of the first joined connection that `floods` reads
        # The number of connections on which no client had joined when `floods` was last called, and the half-open connections among them
        # (without a stream, for example during the TLS handshake), the oldest first.
        self.new_connections, self._half_open = 0, list[Peer]()

    @property
    def connections(self) -> int | None:
        """The number of open TCP connections, with or without a gRPC stream, or None on platforms that do not list connections."""
        if self.port is None:
            return None
        self.read_all()
        return len(self._live)

    def find(self, peer: Peer | None) -> None:
        """Look for a connection if it is unknown, and read its byte counters."""
        if self.read(peer) is None:
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
        self, streams: Iterable["Stream"], ended: Mapping[Peer, int]
    ) -> list[tuple[Peer, "Stream | None", int]]:
        """Return the connections on which the server receives far more bytes than messages need, such as a flood of HTTP/2 pings.

        Each connection is a tuple: the peer, the stream (or None), and the number of bytes received. Connections that were frozen or cut
        are not returned again. Each call reads the byte counters of the connections on which no client has joined, and of JOINED_READS
        other connections in turn. `ended`: by peer of a connection whose stream has ended, the number of bytes received until then.
        """
        if self.port is None:
            return []
        by_peer, floods = {stream.peer: stream for stream in streams}, []
        self._find()
        share = NEW_BYTES // max(self.new_connections, 1)
        new_limit = max(MIN_NEW_FLOOD_BYTES, min(NEW_FLOOD_BYTES, share))
        self.new_connections, self._half_open = 0, []
        live = [*self._live.items()]
        self._turn += JOINED_READS
        for number, (peer, (_, last)) in enumerate(live):
            stream = by_peer.get(peer)
            in_use = stream is not None and stream.joined
            if not in_use or (number - self._turn) % len(live) < JOINED_READS:
                last = self.read(peer) or last
            if peer in self._cut or peer in self._frozen or peer not in self._live:
                continue
            received_bytes, sent_bytes = last
            if peer in ended:
                limit = ended[peer] + ENDED_FLOOD_BYTES
            else:
                self.new_connections += not in_use
                messages = 0 if stream is None else stream.received_bytes
                limit = FLOOD_BYTES if in_use else new_limit
                limit += 2 * messages + sent_bytes // 8
            if received_bytes > limit:
                floods.append((peer, stream, received_bytes))
            elif stream is None and peer not in ended:
                self._half_open.append(peer)
        return floods

    def cut_half_open(self, allowed: int) -> int:
        """Cut half-open connections that `floods` has found, if there are more than `allowed`. Return how many were cut.

        The oldest half-open connections of one host are cut, the host with most of them, so that clients on other hosts can join.
        """
        excess = len(self._half_open) - allowed
        if excess <= 0:
            return 0
        ((host, _),) = Counter(host for host, _ in self._half_open).most_common(1)
        cut = [peer for peer in self._half_open if peer[0] == host][:excess]
        for peer in cut:
            self.cut(peer)
        return len(cut)

    def cut(self, peer: Peer | None) -> None:
        """Shut down a connection immediately, and discard received data that gRPC has not read."""
        self.find(peer)
        if peer in self._live:
            self._frozen.pop(peer, None)
            self._cut.add(peer)
            self._discard(peer, _shut_down)
        elif peer is not None:  # the connection has ended before it was found
            self._clients.pop(peer, None)

    def freeze(self, peer: Peer | None, kept_bytes: int = 0) -> None:
        """Discard all packets that arrive on a connection from now on, but do not shut the connection down.

        `kept_bytes` is the number of received bytes that gRPC may still keep in memory, such as unfinished headers.

        When a connection ends, gRPC converts its unfinished request headers to Python objects, which blocks the event loop. If many
        connections with large headers ended at once, the event loop would be blocked for so long that `floods` would find other floods too
        late. Therefore, frozen connections are cut one by one, and the packet with which a client ends its connection is discarded, too.
        """
        self.find(peer)
        if peer in self._live:
            self._frozen[peer] = time.monotonic(), kept_bytes
            self._discard(peer, _drop_packets)

    def cut_frozen(self) -> bool:
        """Cut the oldest frozen connection if it has been frozen for FROZEN_S seconds. Return whether a connection was cut.

        There are too many frozen connections if their number is at least MAX_FROZEN, or if gRPC may keep at least MAX_FROZEN_BYTES bytes
        for them. While there are too many, no connections are accepted, and the oldest frozen connection is cut earlier unless there are
        open connections on which no client has joined.
        """
        kept_bytes = sum(kept for _, kept in self._frozen.values())
        too_many = len(self._frozen) >= MAX_FROZEN or kept_bytes >= MAX_FROZEN_BYTES
        if too_many == self._accepting:
            self._accept(not too_many)
        if not self._frozen:
            return False
        peer, (began, _) = next(iter(self._frozen.items()))
        if not too_many or self.new_connections:
            if time.monotonic() < began + FROZEN_S:
                return False
        self.cut(peer)
        return True

    def _accept(self, accepting: bool) -> None:
        """Let the kernel accept new connections or ignore them. A client whose packets are ignored sends them again a few times."""
        for descriptor in _descriptors():
            with contextlib.suppress(OSError), _borrowed(descriptor) as listening:
                if self._has_port(listening) and listening.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                ):
                    if accepting:
                        listening.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
                    else:
                        _attach_drop_filter(listening)
        self._accepting = accepting

    def _discard(self, peer: Peer, stop: Callable[[socket.socket], None]) -> None:
        """Call `stop` with the socket of a connection, so that no more data arrive. Then discard the data that gRPC has not read yet."""
        descriptor, _ = self._live[peer]
        with contextlib.suppress(OSError), self._connection(descriptor) as (connection, found):
            if found == peer:
                stop(connection)
                while connection.recv(1 << 20, socket.MSG_DONTWAIT):
                    pass

    def _forget(self, peer: Peer) -> WireBytes:
        """Count a connection as ended, and return the last reading of its byte counters."""
        _, last = self._live.pop(peer)
        self._cut.discard(peer)
        self._frozen.pop(peer, None)
        self._ended = self._ended.plus(last)
        if (client := self._clients.pop(peer, None)) is not None:
            before = self._ended_by_client.get(client, WireBytes())
            self._ended_by_client[client] = before.plus(last)
        return last

    def _find(self) -> None:
        """Look for new connections and read their byte counters, unless the platform does not count bytes."""
        if self.port is None or not (now := _descriptors()):
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
        with _borrowed(descriptor) as connection:
            peer = None
            if self._has_port(connection):
                host, remote = connection.getpeername()[:2]
                peer = _normalized(host), remote
            yield connection, peer

    def _has_port(self, connection: socket.socket) -> bool:
        """Return whether a socket is a connection of the port or listens at the port."""
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if connection.type != socket.SOCK_STREAM:
            return False
        return bool(connection.getsockname()[1] == self.port)


def _descriptors() -> set[int]:
    """Return the file descriptors of this process, or an empty set if the process has reached its limit of open files."""
    try:
        return {int(name) for name in os.listdir(DESCRIPTORS)}
    except OSError:
        return set()


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of a file descriptor that stays open. Raises OSError if the file descriptor does not belong to a socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _counters(connection: socket.socket) -> WireBytes | None:
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(data) < RECEIVED + 8:
        return None
    sent = SENT if len(data) >= SENT + 8 else ACKED
    return WireBytes(U64.unpack_from(data, RECEIVED)[0], U64.unpack_from(data, sent)[0])


def _shut_down(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def _drop_packets(connection: socket.socket) -> None:
    """Let the kernel drop the packets that arrive, or shut the connection down if the kernel has no packet filters."""
    try:
        _attach_drop_filter(connection)
    except OSError:
        _shut_down(connection)


def _attach_drop_filter(connection: socket.socket) -> None:
    program = struct.pack("HP", 1, ctypes.addressof(DROP))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
