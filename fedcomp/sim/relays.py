"""Simulated relays: each adds the frames of its clients and passes on one (transports/relays.py)."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..codecs import Codec
from ..layout import Layout
from ..messages import UPDATE, Assignment, Report
from ..transports.inprocess import Population
from ..transports.relays import add_frames


@dataclass
class Relayed:
    """What relays received since they were last asked."""

    client_bytes: int = 0  # of frames that came from clients
    empty: int = 0  # clients that had nothing to send


class Relays:
    """A population behind relays. Client i is at relay i mod `relays`. Downloads reach clients as they would without relays."""

    def __init__(self, population: Population, relays: int, codec: Codec, layout: Layout):
        self.population, self.relays, self.codec, self.layout = population, relays, codec, layout
        self._received = Relayed()

    @property
    def clients(self) -> int:
        return self.population.clients

    @property
    def at_once(self) -> int:
        return self.clients  # a relay waits for all of its clients

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        each = self.population.at_once
        pieces = [assignments[start : start + each] for start in range(0, len(assignments), each)]
        reports = [report for piece in pieces for report in self.population.handle(piece)]
        self._received.client_bytes += sum(len(report.frame) for report in reports)
        self._received.empty += sum(
            report.kind == UPDATE and not report.frame for report in reports
        )
        at: dict[int, list[int]] = {}
        for i in sorted(range(len(reports)), key=lambda i: reports[i].client):
            at.setdefault(reports[i].client % self.relays, []).append(i)
        for own in at.values():
            own_assignments, own_reports = [assignments[i] for i in own], [reports[i] for i in own]
            passed = add_frames(self.codec, self.layout, own_assignments, own_reports)
            for i, report in zip(own, passed, strict=True):
                reports[i] = report
        return reports

    def take(self) -> Relayed:
        """Return what the relays received since the last call."""
        received, self._received = self._received, Relayed()
        return received
