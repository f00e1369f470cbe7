"""One gRPC stream of a client or relay: its state, and the queue of its outgoing messages."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import grpc

from ...messages import Invitation
from . import wire
from .credentials import PeerKey
from .tcp_info import Peer, Traffic, peer_of
from .wire import Refused

if TYPE_CHECKING:
    from .relay_stream import ConnectedRelay


class EndStream(Exception):
    """Ends a stream. `refused` is sent as its last message if it is not None."""

    def __init__(self, refused: Refused | None = None):
        self.refused = refused


class Stream:
    """One stream of a client or a relay, from its HELLO to its end. It is the only one of its connection."""

    timer: asyncio.TimerHandle  # closes it unless it joins or ends in time

    def __init__(self, context: grpc.aio.ServicerContext):
        self.context = context
        self.task = asyncio.current_task()
        self.peer: Peer | None = peer_of(context.peer())
        self.key: PeerKey | None = None
        self.client = -1  # logical id; -1: not known yet, or a relay
        self.relay_id: int | None = None  # if its key is a relay's
        self.relay: ConnectedRelay | None = None  # once a relay has joined
        self.invitation: Invitation | None = None  # once it is sent
        self.joined = False
        self.assembly = wire.Assembly(0)
        # Newest sequence numbers of assignments and of reports.
        self.last_sent = self.last_answered = 0
        self.n_assignments = 0  # number sent; each allows one report in parts
        self.silent_ticks = 0
        self.pinged = False
        self.closing = False
        self.searched = False  # whether `StreamTraffic` has looked for its connection
        self.traffic = Traffic()  # of its connection
        self.received_bytes = 0  # of messages, with an allowance for the frames around each
        self._queue: deque[bytes] = deque()  # messages that are sent before the assignment
        self._assignment: Iterator[bytes] = iter(())  # the rest of the newest assignment
        self._writer: asyncio.Task[None] | None = None

    @property
    def identity(self) -> object:
        """The hash of the client's key, without TLS the claimed id; None if it has claimed none."""
        return self.key.hash if self.key else self.client if self.client >= 0 else None

    @property
    def relay_identity(self) -> object:
        """The id of the relay that has this stream, without TLS its address."""
        return "relay", self.peer if self.relay_id is None else self.relay_id

    @property
    def n_queued(self) -> int:
        """The number of messages that wait to be sent, without those of an assignment to a client."""
        return len(self._queue)

    def put(self, messages: Iterable[bytes]) -> None:
        """Send messages ahead of the queued assignment."""
        self._queue += messages
        self._start()

    def assign(self, messages: Iterator[bytes]) -> None:
        """Send an assignment. The unsent rest of an older one is dropped."""
        self._assignment = messages
        self._start()

    def withdraw(self) -> None:
        """Drop the unsent rest of an assignment."""
        self._assignment = iter(())

    def close(self, refused: Refused | None = None) -> None:
        """End the stream after its last message, `refused` if it is not None."""
        if self.closing:
            return
        self.closing = True
        self.withdraw()
        if refused is not None:
            self._queue.append(wire.encode_refused(refused))
        self._start()

    def _start(self) -> None:
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())

    def _next(self) -> bytes | None:
        if not self._queue and self.relay is not None and not self.closing:
            self._queue += self.relay.next_messages()
        return self._queue.popleft() if self._queue else next(self._assignment, None)

    async def _write(self) -> None:
        """Send the queued messages one at a time, as gRPC requires."""
        try:
            while message := self._next():
                await self.context.write(message)
                if len(message) >= wire.PART_BYTES:
                    self.silent_ticks = 0  # flow control: the client is reading
        except Exception:  # the stream has ended; its reader handles that
            self._queue.clear()
            self.withdraw()
        self._writer = None
        if self.closing and self.task is not None:
            self.task.cancel()
