"""The round loop's transport over Flower's `Grid`."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from ...errors import ProtocolError
from ...messages import Assignment, Report
from ...server.transport import Clock, Delivery, Lost, Transport
from .records import from_records, to_records

# Logical client id → Flower node id, of the clients that can be reached now.
Roster = Callable[[Grid], Mapping[int, int]]

POLL_S = 0.1  # between polls for replies


def by_node(grid: Grid) -> dict[int, int]:
    """Return the roster of a plain Flower deployment: a client's logical id is its node id."""
    return {node: node for node in grid.get_node_ids()}


class GridTransport(Transport):
    """Sends assignments as Flower messages of type "train". `roster` returns the node of each client that can be reached."""

    def __init__(self, grid: Grid, roster: Roster = by_node):
        self.grid, self.roster = grid, roster
        self.clock = Clock()
        self._nodes: dict[int, int] = {}
        self._open: dict[str, int] = {}  # message id → client
        self._unsent: list[Delivery] = []

    def clients(self) -> list[int]:
        self._nodes |= (here := self.roster(self.grid))
        return sorted(here)

    def send(self, assignments: Sequence[Assignment]) -> None:
        self.cancel([assignment.client for assignment in assignments])
        names = self.grid.push_messages([self.message(assignment) for assignment in assignments])
        for assignment, name in zip(assignments, names, strict=True):
            if name:
                self._open[name] = assignment.client
            else:
                lost = Lost("the message could not be sent", "send")
                self._unsent.append(Delivery(assignment.client, lost, self.clock.now()))

    def receive(self, timeout_s: float) -> list[Delivery]:
        unsent, self._unsent = self._unsent, []
        replies = list(self.grid.pull_messages(list(self._open)))
        if not replies and not unsent:
            time.sleep(min(timeout_s, POLL_S))
        pairs = [(self._open.pop(r.metadata.reply_to_message_id, None), r) for r in replies]
        return unsent + self._deliveries(pairs)

    def cancel(self, clients: Collection[int]) -> None:
        gone = set(clients)
        self._open = {name: client for name, client in self._open.items() if client not in gone}

    def close(self) -> None:
        self._open.clear()

    def message(self, assignment: Assignment) -> Message:
        """Return the Flower message of an assignment, for a caller that sends it itself."""
        node = self._nodes[assignment.client]
        return self.grid.create_message(
            to_records(assignment), "train", node, str(assignment.round)
        )

    def deliveries(self, replies: Iterable[Message]) -> list[Delivery]:
        """Return the answers in replies to messages that other code sent. The first reply of each node counts."""
        clients = {node: client for client, node in self._nodes.items()}
        first = {
            clients.get(reply.metadata.src_node_id): reply for reply in reversed(list(replies))
        }
        return self._deliveries(first.items())

    def _deliveries(self, replies: Iterable[tuple[int | None, Message]]) -> list[Delivery]:
        return [
            Delivery(client, _answer(reply), self.clock.now())
            for client, reply in replies
            if client is not None
        ]


def _answer(reply: Message) -> Report | Lost:
    if reply.has_error():
        return Lost(f"Flower error {reply.error.code}: {reply.error.reason}")
    try:
        return from_records(reply.content, Report)
    except ProtocolError as error:
        return Lost(str(error))
