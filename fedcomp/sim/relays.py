"""Simulated relays: each relay adds the frames of its clients and forwards the sum (transports/relays.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..codecs import Codec
from ..layout import Layout
from ..messages import UPDATE, Assignment, Report
from ..transports.inprocess import Population
from ..transports.relays import add_frames


@dataclass
class RelayTraffic:
    """Traffic from clients to relays since the last call of `Relays.take`."""

    client_bytes: int = 0  # bytes of frames
    empty: int = 0  # number of updates without a frame


class Relays:
    """A population of clients behind relays. Client i sends to relay i mod `relays`. Relays do not change downloads."""

    def __init__(self, population: Population, relays: int, codec: Codec, layout: Layout):
        self.population, self.relays, self.codec, self.layout = population, relays, codec, layout
        self._traffic = RelayTraffic()

    @property
    def clients(self) -> int:
        return self.population.clients

    @property
    def at_once(self) -> int:
        """The number of assignments to handle together: all, since a relay waits for all of its clients."""
        return self.clients

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        """Return the reports that the server receives, in the order of the assignments."""
        size = self.population.at_once
        chunks = [assignments[start : start + size] for start in range(0, len(assignments), size)]
        reports = [report for chunk in chunks for report in self.population.handle(chunk)]
        self._traffic.client_bytes += sum(len(report.frame) for report in reports)
        self._traffic.empty += sum(report.kind == UPDATE and not report.frame for report in reports)
        by_relay: dict[int, list[int]] = {}  # positions in `reports`
        for i in sorted(range(len(reports)), key=lambda i: reports[i].client):
            by_relay.setdefault(reports[i].client % self.relays, []).append(i)
        for own in by_relay.values():
            own_assignments, own_reports = [assignments[i] for i in own], [reports[i] for i in own]
            forwarded = add_frames(self.codec, self.layout, own_assignments, own_reports)
            for i, report in zip(own, forwarded, strict=True):
                reports[i] = report
        return reports

    def take(self) -> RelayTraffic:
        """Return the traffic since the last call."""
        traffic, self._traffic = self._traffic, RelayTraffic()
        return traffic
