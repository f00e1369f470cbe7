"""The transport of a simulation. It passes assignments (requests to clients) in batches to virtual clients in this process."""

from collections.abc import Collection, Sequence
from typing import Protocol

from ..messages import Assignment, Report
from ..profiling import timed
from ..server.transport import Clock, Delivery, Transport


class Population(Protocol):
    """The virtual clients of a simulation, with the logical ids 0 to `clients` − 1."""

    @property
    def clients(self) -> int: ...

    @property
    def at_once(self) -> int:
        """The largest number of assignments to pass to one call of `handle`."""

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]: ...


class InProcessTransport(Transport):
    """A transport to virtual (simulated) clients. Each call of `receive` lets up to `Population.at_once` clients train and answer."""

    def __init__(self, population: Population):
        self.population = population
        self.clock = Clock()
        self._open: dict[int, Assignment] = {}

    def clients(self) -> range:
        return range(self.population.clients)

    def send(self, assignments: Sequence[Assignment]) -> None:
        self._open |= {assignment.client: assignment for assignment in assignments}

    def receive(self, timeout_s: float) -> list[Delivery]:
        if not self._open:
            return []
        batch = list(self._open.values())[: self.population.at_once]
        self.cancel([assignment.client for assignment in batch])
        with timed("clients"):
            reports = self.population.handle(batch)
        now_s = self.clock.now()
        return [
            Delivery(assignment.client, report, now_s)
            for assignment, report in zip(batch, reports, strict=True)
        ]

    def cancel(self, clients: Collection[int]) -> None:
        for client in clients:
            self._open.pop(client, None)

    def close(self) -> None:
        self._open.clear()
