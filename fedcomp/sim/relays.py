"""Simulated relays: each relay adds up the encoded updates of its clients and sends the sum to the server (transports/relays.py)."""

from collections.abc import Sequence

from ..codecs import Codec
from ..layout import Layout
from ..messages import UPDATE, Assignment, Report
from ..transports.inprocess import Population
from ..transports.relays import add_frames


class Relays:
    """The clients of `population`, connected through `relays` relays. Client i sends its updates to relay i modulo `relays`.

    Relays do not change downloads.
    """

    def __init__(self, population: Population, relays: int, codec: Codec, layout: Layout):
        self.population, self.relays, self.codec, self.layout = population, relays, codec, layout
        self._client_bytes, self._empty = 0, 0

    @property
    def clients(self) -> int:
        return self.population.clients

    @property
    def at_once(self) -> int:
        """The maximum number of assignments in a call of `handle`: all clients, since a relay waits for each of its clients."""
        return self.clients

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        """Return the reports that the server receives from the relays, in the order of the assignments."""
        size = self.population.at_once
        chunks = [assignments[start : start + size] for start in range(0, len(assignments), size)]
        reports = [report for chunk in chunks for report in self.population.handle(chunk)]
        self._client_bytes += sum(len(report.frame) for report in reports)
        self._empty += sum(report.kind == UPDATE and not report.frame for report in reports)
        by_relay: dict[int, list[int]] = {}  # maps a relay to positions in `reports`
        for i in sorted(range(len(reports)), key=lambda i: reports[i].client):
            by_relay.setdefault(reports[i].client % self.relays, []).append(i)
        for positions in by_relay.values():
            received = [assignments[i] for i in positions], [reports[i] for i in positions]
            forwarded = add_frames(self.codec, self.layout, *received)
            for i, report in zip(positions, forwarded, strict=True):
                reports[i] = report
        return reports

    def take(self) -> tuple[int, int]:
        """Return the numbers of bytes and of empty updates (of zero bytes) that the clients have sent since the last call of `take`."""
        traffic = self._client_bytes, self._empty
        self._client_bytes, self._empty = 0, 0
        return traffic
