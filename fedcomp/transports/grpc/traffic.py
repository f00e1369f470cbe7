"""The bytes of a port's connections, by stream and by client."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .stream import Stream
from .tcp_info import ConnectionCounters, Peer, Traffic

# A connection is cut if it receives more bytes than FLOOD_BYTES, twice those of its messages, and an eighth of those that it sent.
FLOOD_BYTES = 4 << 20


@dataclass
class TrafficReport:
    """Bytes of all connections of the port, and of each client that has joined."""

    total: Traffic
    by_client: dict[int, Traffic] = field(default_factory=dict)


class StreamTraffic:
    """The bytes of a port's streams. `counters`: those of its connections; None if the platform does not count bytes."""

    def __init__(self, counters: ConnectionCounters | None = None):
        self.counters = counters
        self._ended: dict[int, Traffic] = {}  # by client, of streams that ended

    @property
    def connections(self) -> int | None:
        """The number of open connections, also those without a stream; None if the platform does not count them."""
        if self.counters is None:
            return None
        self.counters.read_all()
        return self.counters.connections

    def read(self, stream: Stream) -> None:
        """Read the counters of a stream's connection. Bytes since the last reading are lost when the connection ends."""
        if self.counters is None or stream.peer is None:
            return
        traffic = self.counters.read(stream.peer)
        if traffic is None and not stream.searched:
            stream.searched = True
            traffic = self.counters.search(stream.peer)
        stream.traffic = traffic or stream.traffic

    def end(self, stream: Stream) -> None:
        """Add the bytes of a stream that has ended to those of its client."""
        self.read(stream)
        if stream.client >= 0:
            before = self._ended.get(stream.client, Traffic())
            self._ended[stream.client] = before.plus(stream.traffic)

    def read_all(self, streams: Iterable[Stream]) -> Traffic:
        """Read the counters of all connections, and return their sum with those that have ended; 0 if they are not counted."""
        if self.counters is None:
            return Traffic()
        total = self.counters.read_all()
        readings = dict(self.counters.last_readings())
        for stream in streams:
            if stream.peer is not None:
                stream.traffic = readings.get(stream.peer, stream.traffic)
        return total

    def report(self, streams: Iterable[Stream]) -> TrafficReport | None:
        """Return the bytes so far; None if the platform does not count them."""
        if self.counters is None:
            return None
        streams = [*streams]
        total, by_client = self.read_all(streams), dict(self._ended)
        for stream in streams:
            if stream.client >= 0:
                before = by_client.get(stream.client, Traffic())
                by_client[stream.client] = before.plus(stream.traffic)
        return TrafficReport(total, by_client)

    def floods(self, streams: Iterable[Stream]) -> Iterator[tuple[Peer, Stream | None, int]]:
        """Yield connections that receive far more bytes than their messages have, such as HTTP/2 pings: peer, stream, bytes received."""
        if self.counters is None:
            return
        by_peer = {stream.peer: stream for stream in streams}
        for peer, (received_bytes, sent_bytes) in self.counters.last_readings():
            stream = by_peer.get(peer)
            messages = 0 if stream is None else stream.received_bytes
            if received_bytes > FLOOD_BYTES + 2 * messages + sent_bytes // 8:
                yield peer, stream, received_bytes

    def cut(self, peer: Peer | None) -> None:
        """Shut a connection down at once."""
        if self.counters is not None and peer is not None:
            self.counters.cut(peer)
