"""The record of a deployment's connected clients. A round waits until enough clients are connected.

Callbacks are told which clients have joined, have left, or are missing.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ..callbacks import Callback
from ..formatting import named_clients
from ..server.availability import Availability, Quota
from ..server.transport import Transport

PAUSE_S = 0.05  # time between two polls of the connected clients
MAX_PAUSE_ROUNDS = 64  # longest pause of a client that reconnects, in rounds


class ConnectedClients(Availability):
    """The clients that have joined a run. `waited_s`: total time for which rounds have waited for clients, in seconds.

    A client misses a deadline if its answer does not arrive in time. After k missed deadlines in a row, a client that reconnects may take
    part again min(2^(k − 1), 64) rounds after the round of the last deadline. This limits the number of rounds that are delayed by a
    client that crashes in every round.
    """

    def __init__(self, transport: Transport, quota: Quota, callback: Callable[[], Callback]):
        super().__init__()
        self.transport, self.quota, self.callback = transport, quota, callback
        self.waited_s = 0.0
        self._rounds = 0  # rounds that have begun
        self._misses: Counter[int] = Counter()  # by client: missed deadlines since its last answer
        # By client that has missed a deadline: the first round in which it may take part if it has reconnected.
        self._readmission: dict[int, int] = {}
        # Clients that have reconnected but must still skip rounds.
        self._reconnected: set[int] = set()
        self._last_cohort: Sequence[int] = ()  # the clients from which the last cohort was drawn
        self._joined: set[int] = set()  # clients that have joined since the server started
        self._connected: set[int] = set()  # connected clients, as last reported
        self._missing: list[int] = []  # missing clients, as last reported
        # Connected clients, as last reported while a round waited for more. None if the last report said that enough are connected.
        self._reported_waiting: list[int] | None = None

    def gather(self) -> Sequence[int]:
        """Wait until enough clients are connected. Return the clients from which the round draws its participants."""
        began = time.monotonic()
        while True:
            connected, waited_s = self.transport.clients(), time.monotonic() - began
            if self.quota.patience_s is not None and waited_s >= self.quota.patience_s:
                self.mark_silent(set(self._last_cohort).difference(connected))
            self._readmit()
            wanted = self.wanted(self.quota)
            cohort = self.cohort_of(connected, self.quota, waited_s)
            if cohort is not None:
                self._rounds, self._last_cohort = self._rounds + 1, cohort
                self.waited_s += waited_s
                self._report_waiting(min(len(connected), wanted))
                self._report_missing(cohort)
                return cohort
            self._report_waiting(wanted)
            time.sleep(PAUSE_S)

    def mark_silent(self, clients: Iterable[int]) -> None:
        """Record that clients missed a deadline, or did not reconnect while a round waited for them."""
        for client in (new := set(clients) - self.silent):
            self._misses[client] += 1
            pause = min(1 << self._misses[client] - 1, MAX_PAUSE_ROUNDS)
            self._readmission[client] = self._rounds + pause
            self._reconnected.discard(client)
        super().mark_silent(new)

    def mark_responsive(self, client: int) -> None:
        """Record that a client answered."""
        del self._misses[client]
        self._reconnected.discard(client)
        super().mark_responsive(client)

    def _readmit(self) -> None:
        """Let reconnected clients take part in the next round if they have skipped enough rounds."""
        for client in [*self._reconnected]:
            if self._rounds + 1 >= self._readmission[client]:
                self._reconnected.discard(client)
                super().mark_responsive(client)

    def join(self, client: int) -> None:
        """Record that a client joined or reconnected, and report the client to the callback."""
        self._joined.add(client)
        if client in self.silent:
            self._reconnected.add(client)
            self._readmit()
        if client not in self._connected:
            self._connected.add(client)
            self.callback().on_client_joined(client)

    def leave(self, client: int) -> None:
        """Record that a client's connection ended, and report the client to the callback."""
        if client in self._connected:
            self._connected.discard(client)
            self.callback().on_client_left(client)

    def on_poll(self) -> None:
        """Report the connected clients during a round if the next round would wait for more clients without a time limit."""
        if self.quota.patience_s is None:
            self._report_waiting(self.quota.wanted)

    def _report_waiting(self, wanted: int) -> None:
        """Report changes of the connected clients while fewer than `wanted` are connected, and once more when enough are connected."""
        waits, connected = len(self._connected) < wanted, sorted(self._connected)
        reports = waits or self._reported_waiting is not None
        if reports and connected != self._reported_waiting:
            self.callback().on_waiting(connected, max(wanted, len(connected)))
            self._reported_waiting = connected if waits else None

    def _report_missing(self, cohort: Sequence[int]) -> None:
        """Warn if fewer clients than wanted can take part in a round, once for each set of missing clients."""
        short = len(cohort) < self.quota.wanted
        missing = sorted(self._joined - set(cohort)) if short else []
        if missing and missing != self._missing:
            self.callback().on_warning(
                f"rounds continue with {len(cohort)} clients instead of {self.quota.wanted}, without {named_clients(missing)} "
                "(disconnected, or missed a deadline); a client takes part again after its late answer arrives, or some rounds after it "
                "reconnects"
            )
        self._missing = missing
