"""A transport over Flower's `Grid` whose clients join a run by answering an invitation."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from time import monotonic, sleep

from flwr.serverapp import Grid

from ...callbacks import PortFigures
from ...errors import ProtocolError
from ...keys.keyring import verifier
from ...messages import Farewell, Invitation, Presence
from ...server.transport import Delivery
from .grid_transport import POLL_S, GridTransport, message_in

JOIN, LEAVE = "query.join", "query.leave"  # message types
REFRESH_S = 0.5  # time between two queries for connected nodes
LEAVE_S = 20.0  # time limit for the clients to answer the server's farewell


class JoiningTransport(GridTransport):
    """A transport that sends each connected node an invitation, which the node answers with its client id and the version of its model.

    `port`: the port of the SuperLink (Flower's server program). `enrolled`: by node id, the logical client id and the public key
    (compressed P-384 point) of each node that Flower authenticates, or None if nodes choose their client ids. `invitation` and `clients`:
    the invitation to send, and the number of clients of the run. The callbacks are those of GrpcTransport.
    """

    def __init__(
        self,
        grid: Grid,
        port: int,
        enrolled: Mapping[int, tuple[int, bytes]] | None,
        invitation: Invitation,
        clients: int,
        *,
        on_joined: Callable[[int, Presence], None],
        on_left: Callable[[int], None],
        on_late_answer: Callable[[int], None],
        warn: Callable[[str], None],
    ):
        super().__init__(grid, self._refresh)
        self.port, self.enrolled = port, enrolled
        self.invitation, self.n_clients = invitation, clients
        self.on_joined, self.on_left = on_joined, on_left
        self.on_late_answer, self.warn = on_late_answer, warn
        self._joined: dict[int, int] = {}  # by node id: logical client id
        self._invited: dict[str, int] = {}  # by message id of an invitation: the invited node
        self._late: dict[int, str] = {}  # by client: message id of a cancelled assignment
        self._public_keys = dict(enrolled.values()) if enrolled else {}
        self._warned: set[str] = set()
        self._refreshed_s = float("-inf")

    def open(self) -> None:
        """Do nothing, because Flower's SuperLink has opened the port."""

    def receive(self, timeout_s: float) -> list[Delivery]:
        self._read_late_answers()
        return super().receive(timeout_s)

    def cancel(self, clients: Collection[int]) -> None:
        cancelled = set(clients)
        self._late |= {client: name for name, client in self._open.items() if client in cancelled}
        super().cancel(clients)

    # Methods of GrpcTransport that the Transport protocol does not have.

    def public_key(self, client: int) -> bytes:
        return self._public_keys[client]

    def recheck_keys(self) -> None:
        """Do nothing, because Flower authenticates the nodes."""

    def traffic(self) -> None:
        """Return None, because the bytes at a SuperLink's port are not counted."""

    def figures(self) -> PortFigures:
        return PortFigures(clients=len(self._joined), connections=len(self._joined))

    def send_farewell(self, round: int) -> None:
        """Tell all clients that the run is over, and wait up to 20 s for their answers."""
        farewell = Farewell(self.invitation.run, round)
        messages = [self._message(farewell, LEAVE, node) for node in self._joined]
        waiting = {name for name in self.grid.push_messages(messages) if name}
        end = monotonic() + LEAVE_S
        while waiting and monotonic() < end:
            replies = list(self.grid.pull_messages(list(waiting)))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            sleep(POLL_S)

    # Clients.

    def _refresh(self, grid: Grid) -> Mapping[int, int]:
        """Invite new nodes and read their answers. Return the node id of each connected client."""
        if monotonic() - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = monotonic()
            connected = set(grid.get_node_ids())
            for node in [node for node in self._joined if node not in connected]:
                self.on_left(self._joined.pop(node))
            self._invited = {name: n for name, n in self._invited.items() if n in connected}
            self._read_answers()
            self._invite(connected - {*self._joined, *self._invited.values()})
        return {client: node for node, client in self._joined.items()}

    def _invite(self, nodes: Collection[int]) -> None:
        enrolled = self.enrolled
        nodes = [node for node in nodes if enrolled is None or node in enrolled]
        if not nodes:
            return
        ids = {node: -1 if enrolled is None else enrolled[node][0] for node in nodes}
        names = self.grid.push_messages(
            [self._message(replace(self.invitation, client=ids[n]), JOIN, n) for n in nodes]
        )
        self._invited |= {name: n for name, n in zip(names, nodes, strict=True) if name}

    def _read_answers(self) -> None:
        for reply in self.grid.pull_messages(list(self._invited)) if self._invited else ():
            node = self._invited.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            try:
                self._join(node, message_in(reply, Presence))
            except ProtocolError as error:
                sentence = f"a node that was invited cannot take part: {error}"
                if sentence not in self._warned:
                    self._warned.add(sentence)
                    self.warn(sentence)

    def _join(self, node: int, presence: Presence) -> None:
        client = presence.client
        if presence.reason or presence.run != self.invitation.run:
            reason = presence.reason or "the client answered the invitation of another run"
            raise ProtocolError(f"client {client}: {reason}")
        if not 0 <= client < self.n_clients or (self.enrolled and self.enrolled[node][0] != client):
            raise ProtocolError(
                f"the node asks to be client {client}; the id must be from 0 to {self.n_clients - 1}, and a node with an enrolment must "
                "use the id in its enrolment; correct --client-id or --partition-id"
            )
        self._joined = {n: c for n, c in self._joined.items() if c != client} | {node: client}
        if presence.key:
            verifier(presence.key)
            self._public_keys[client] = presence.key
        self.on_joined(client, presence)

    def _read_late_answers(self) -> None:
        if not self._late:
            return
        clients = {name: client for client, name in self._late.items()}
        for reply in self.grid.pull_messages(list(clients)):
            client = clients.get(reply.metadata.reply_to_message_id)
            if client in self._late:
                del self._late[client]
                if not reply.has_error():
                    self.on_late_answer(client)
