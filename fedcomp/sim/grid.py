"""Flower's Grid inside one process: the strategy's messages reach virtual clients as calls, in cohorts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..clients.flower import (
    Run,
    addressed,
    carried,
    empty_run,
    from_records,
    identify_process,
    name_messages,
    replied,
    to_records,
)
from ..messages import Assignment, Report
from ..profiling import timed
from ..strategies.cohort import Numbered

FIRST_NODE = 2  # Flower gives 1 to the SuperLink


class Population(Protocol):
    """Whoever answers: virtual clients with the logical ids 0..clients-1."""

    clients: int
    at_once: int  # assignments that it likes to get together

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]: ...


class LocalGrid(Grid):
    """A Grid whose nodes are the clients of a population. A pull works on the messages that were pushed, `at_once` of them at a time."""

    def __init__(self, population: Population):
        identify_process()
        self.population = population
        self._run = empty_run()
        self._pushed: dict[str, Message] = {}
        self._last: tuple[tuple, Message] | None = (
            None  # what messages are made like, and one that was
        )
        self._packed: dict[
            type, tuple[int, str]
        ] = {}  # by kind of message, the round and phase of which one was packed

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        alike = message_type, group_id, ttl
        if self._last is None or self._last[0] != alike:
            self._last = (
                alike,
                Message(RecordDict(), dst_node_id, message_type, ttl=ttl, group_id=group_id),
            )
        return addressed(self._last[1], content, dst_node_id)

    def content_of(self, message: Assignment | Report) -> RecordDict:
        """Of a message that stays in this process. What cannot travel shows here all the same: one of a kind and a phase is packed, and
        so is each that tells its client something else than bytes."""
        kind, phase = type(message), (message.round, message.phase)
        if self._packed.get(kind) == phase and all(
            type(part) is bytes for part in getattr(message, "announced", ())
        ):
            return carried(message)
        self._packed[kind] = phase
        return to_records(message)

    def get_node_ids(self) -> range:
        return range(FIRST_NODE, FIRST_NODE + self.population.clients)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        names = name_messages(messages)
        self._pushed |= dict(zip(names, messages, strict=True))
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = [name for name in message_ids if name in self._pushed][: self.population.at_once]
        messages = [self._pushed.pop(name) for name in wanted]
        assignments = [from_records(message.content, Assignment) for message in messages]
        with timed("clients", asked=len(assignments)):
            reports = self.population.handle(assignments)
        replies = [
            replied(message, self.content_of(report))
            for message, report in zip(messages, reports, strict=True)
        ]
        name_messages(replies)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        names = self.push_messages(messages)
        while replies := self.pull_messages(names):
            yield from replies


def by_index(grid: Grid) -> Mapping[int, int]:
    """The roster of a simulation: a client's logical id is its index."""
    return Numbered(grid.get_node_ids())
