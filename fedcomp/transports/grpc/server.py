"""The transport of `fedcomp server start`: gRPC streams over mutual TLS, served in a background thread."""

import asyncio
import queue
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

from ...callbacks import PortFigures
from ...messages import UPDATE, Assignment, Farewell, Presence, Report
from ...server.transport import Clock, Delivery, Lost
from ..relays import RELAY
from .events import Answered, AnsweredLate, Event, Joined, Left, Stopped, Summed, Warned
from .io_loop import io_loop
from .pending_assignments import PendingAssignment
from .port import Port
from .settings import PortSettings
from .traffic import TrafficReport

WAIT_S = 60.0  # longest wait for one event; `SimpleQueue.get` does not accept inf as its timeout
# Relays wait for this fraction of the time limit of a phase (exchange of messages), and then add the updates received so far.
RELAY_FRACTION = 0.8
STOP_S = 10.0  # time limit for the port to close; other requests to the gRPC thread may take twice this time
T = TypeVar("T")


def _ignore(*_: object) -> None: ...


class GrpcTransport:
    """A `Transport` that serves the clients of a run on a port.

    The callbacks run in the thread that calls the methods of `Transport`. `on_poll` is called at the start of each call of `clients` and
    `receive`. `on_joined` is called for each client that joins or reconnects, `on_left` for each client whose connection ended,
    `on_late_answer` for each answer that comes too late, and `warn` with each warning.

    If a client loses its connection before it answers and reconnects within `settings.grace_s` seconds, it receives its assignment again.
    If it does not reconnect in this time, the assignment counts as lost.
    """

    def __init__(
        self,
        settings: PortSettings,
        *,
        on_joined: Callable[[int, Presence], None] = _ignore,
        on_left: Callable[[int], None] = _ignore,
        on_late_answer: Callable[[int], None] = _ignore,
        on_poll: Callable[[], None] = _ignore,
        warn: Callable[[str], None] = _ignore,
    ):
        self.clock = Clock()
        self.invitation, self.port = settings.invitation, settings.port
        self.on_joined, self.on_left, self.on_late_answer = on_joined, on_left, on_late_answer
        self.on_poll, self.warn = on_poll, warn
        self._settings = settings
        self._connected: set[int] = set()
        self._pending: dict[int, int] = {}  # by client: sequence number of the open assignment
        self._public_keys: dict[int, bytes] = {}
        self._sequence = 0
        self._deliveries: list[Delivery] = []
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._last_traffic: TrafficReport | None = None
        self._last_figures = PortFigures()
        self._task: Future[None] | None = None

    def open(self) -> None:
        """Open the port and set `port` to its number. Raises ConfigError if the port cannot be opened."""
        started: Future[int] = Future()
        self._task = asyncio.run_coroutine_threadsafe(self._serve(started), io_loop())
        self.port = started.result()

    @property
    def _serving(self) -> bool:
        return self._task is not None and not self._task.done()

    # Transport.

    def clients(self) -> list[int]:
        self.on_poll()
        self._handle_events(0.0)
        return sorted(self._connected)

    def send(self, assignments: Sequence[Assignment]) -> None:
        pending, clock = [], self.clock
        due_s = None if clock.limit_s is None else clock.started_s + RELAY_FRACTION * clock.limit_s
        self._drop_deliveries({assignment.client for assignment in assignments})
        for assignment in assignments:
            self._sequence += 1
            pending.append(PendingAssignment(self._sequence, assignment, due_s))
            self._pending[assignment.client] = self._sequence
        self._call(lambda: self._port.assign(pending))

    def receive(self, timeout_s: float) -> list[Delivery]:
        self.on_poll()
        deadline = monotonic() + timeout_s
        while not self._deliveries and (remaining_s := deadline - monotonic()) > 0:
            self._handle_events(min(remaining_s, WAIT_S))
        self._handle_events(0.0)
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def cancel(self, clients: Collection[int]) -> None:
        withdrawn = [(c, self._pending.pop(c)) for c in clients if c in self._pending]
        self._drop_deliveries({*clients})
        self._call(lambda: self._port.cancel(withdrawn))

    def close(self) -> None:
        if self._serving and self._task is not None:
            self._last_traffic, self._last_figures = self.traffic(), self.figures()
            self._call(self._port.stop)
            wait([self._task], STOP_S)

    def _drop_deliveries(self, clients: set[int]) -> None:
        queued = self._deliveries
        self._deliveries = [delivery for delivery in queued if delivery.client not in clients]
        self._lose_sums(clients)
        for delivery in queued:
            if delivery.client in clients and isinstance(delivery.answer, Report):
                self.on_late_answer(delivery.client)

    def _lose_sums(self, withdrawn: set[int], first: int = 0) -> None:
        """Replace queued updates by `Lost` if a relay may have added them to the update of a client in `withdrawn`.

        The server no longer waits for the updates of the clients in `withdrawn`. It cannot subtract such an update from a relay's sum, so
        it uses none of the updates in the sum. `first`: index in `_deliveries` of the first delivery to check.
        """
        for i, delivery in enumerate(self._deliveries[first:], first):
            if summed := withdrawn.intersection(delivery.summed):
                reason = f"a relay has added this client's update to that of client {min(summed)}, for which the server no longer waits"
                self._deliveries[i] = replace(delivery, answer=Lost(reason, RELAY), summed=())

    # Methods that the Transport protocol does not have.

    def public_key(self, client: int) -> bytes:
        """Return the public key with which a client joined (compressed P-384 point). Raises KeyError if the client gave no key."""
        return self._public_keys[client]

    def recheck_keys(self) -> None:
        """Disconnect the clients and relays whose keys are no longer accepted."""
        self._call(lambda: self._port.recheck_keys())

    def send_farewell(self, round: int) -> None:
        """Tell all clients and relays that the run is over, and wait until they have left, up to 10 s."""
        self._await(lambda: self._port.send_farewell(Farewell(self.invitation.run, round)))

    def traffic(self) -> TrafficReport | None:
        """Return the port's byte counts, or None if the platform does not count bytes."""
        if not self._serving:
            return self._last_traffic
        return self._await(lambda: self._port.read_traffic())

    def figures(self) -> PortFigures:
        """Return the port's figures, or its last figures after it was closed. Any thread may call this method."""
        return self._await(lambda: self._port.figures()) if self._serving else self._last_figures

    # Threads.

    async def _serve(self, started: "Future[int]") -> None:
        self._port = Port(self._settings, self._events.put)
        try:
            await self._port.serve(started.set_result)
        except BaseException as error:
            if started.done():
                self._events.put(Stopped(error))
            else:
                started.set_exception(error)

    def _call(self, function: Callable[[], None]) -> None:
        if self._serving:
            io_loop().call_soon_threadsafe(function)

    def _await(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(function(), io_loop()).result(2 * STOP_S)

    def _handle_events(self, timeout_s: float) -> None:
        """Handle all queued events. Wait up to `timeout_s` seconds for the first event."""
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
            while True:
                self._handle(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return

    def _handle(self, event: Event) -> None:
        match event:
            case Joined(client, presence, public_key):
                self._connected.add(client)
                if key := public_key or presence.key:
                    self._public_keys[client] = key
                self.on_joined(client, presence)
            case Left(client):
                self._connected.discard(client)
                self.on_left(client)
            case AnsweredLate(client):
                self.on_late_answer(client)
            case Warned(sentence):
                self.warn(sentence)
            case Answered():
                self._deliver(event)
            case Summed(answers, closed):
                self._handle_sum(answers, closed)
            case Stopped(error):
                raise error

    def _deliver(self, answered: Answered, summed: tuple[int, ...] = ()) -> None:
        """Queue an answer for `receive` if the server still waits for it. `summed`: clients whose updates a relay may have added to it."""
        if self._pending.get(answered.client) == answered.sequence:
            del self._pending[answered.client]
            delivery = Delivery(answered.client, answered.answer, answered.arrived_s, summed)
            self._deliveries.append(delivery)
        elif isinstance(answered.answer, Report):
            self.on_late_answer(answered.client)

    def _handle_sum(self, answers: Sequence[Answered], closed: Sequence[int]) -> None:
        """Queue a relay's reports for `receive`. If the server no longer waits for an update in their sum, all updates in the sum are lost.

        `closed`: clients whose updates may be in the sum, but whose assignments are no longer open.
        """
        late = {a.client for a in answers if self._pending.get(a.client) != a.sequence}
        updates = [a.client for a in answers if getattr(a.answer, "kind", "") == UPDATE]
        first = len(self._deliveries)
        for answered in answers:
            self._deliver(answered, (*updates, *closed) if answered.client in updates else ())
        self._lose_sums(late.union(closed), first)
