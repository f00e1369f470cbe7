"""A transport over Flower's `Grid`, through which a ServerApp exchanges messages with nodes (connected SuperNodes)."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from ...errors import ProtocolError
from ...messages import Assignment, Report, WireMessage
from ...server.transport import Clock, Delivery, Lost, Transport
from .records import M, from_records, to_records

# A function that returns the Flower node id of each client that can be reached now, by logical id (number of the client in the run).
NodeIds = Callable[[Grid], Mapping[int, int]]

POLL_S = 0.1  # time between two polls for replies


def by_node(grid: Grid) -> dict[int, int]:
    """Return a mapping from each connected node's id to the same id, for runs in which a client's logical id is its node id."""
    return {node: node for node in grid.get_node_ids()}


class GridTransport(Transport):
    """A transport whose assignments (requests to clients) are Flower messages of type "train"."""

    def __init__(self, grid: Grid, node_ids: NodeIds = by_node):
        self.grid, self.node_ids = grid, node_ids
        self.clock = Clock()
        self._nodes: dict[int, int] = {}
        self._open: dict[str, int] = {}  # by message id: client of an unanswered assignment
        self._unsent: list[Delivery] = []

    def clients(self) -> list[int]:
        connected = self.node_ids(self.grid)
        self._nodes |= connected
        return sorted(connected)

    def send(self, assignments: Sequence[Assignment]) -> None:
        self.cancel([assignment.client for assignment in assignments])
        nodes = self._nodes
        message_ids = self.grid.push_messages(
            [self._message(a, "train", nodes[a.client], str(a.round)) for a in assignments]
        )
        for assignment, message_id in zip(assignments, message_ids, strict=True):
            if message_id:
                self._open[message_id] = assignment.client
            else:
                lost = Lost("Flower did not accept the message for this client", "send")
                self._unsent.append(Delivery(assignment.client, lost, self.clock.now()))

    def receive(self, timeout_s: float) -> list[Delivery]:
        unsent, self._unsent = self._unsent, []
        replies = list(self.grid.pull_messages(list(self._open)))
        if not replies and not unsent:
            time.sleep(min(timeout_s, POLL_S))
        pairs = [(self._open.pop(r.metadata.reply_to_message_id, None), r) for r in replies]
        now_s = self.clock.now()
        return unsent + [
            Delivery(client, _answer(reply), now_s) for client, reply in pairs if client is not None
        ]

    def cancel(self, clients: Collection[int]) -> None:
        cancelled = set(clients)
        self._open = {
            name: client for name, client in self._open.items() if client not in cancelled
        }

    def close(self) -> None:
        self._open.clear()

    def _message(self, message: WireMessage, kind: str, node: int, group: str = "0") -> Message:
        return self.grid.create_message(to_records(message), kind, node, group)


def message_in(reply: Message, kind: type[M]) -> M:
    """Return the fedcomp message in a Flower reply. Raises ProtocolError for a Flower error, or if there is no message of this kind."""
    if reply.has_error():
        raise ProtocolError(f"Flower error {reply.error.code}: {reply.error.reason}")
    return from_records(reply.content, kind)


def _answer(reply: Message) -> Report | Lost:
    try:
        return message_in(reply, Report)
    except ProtocolError as error:
        return Lost(str(error))
