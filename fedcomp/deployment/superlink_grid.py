"""Who is there, and the Grid to them: invites who comes, and asks again who came back without having answered.

A SuperLink hands a message out once. A client that is killed, or cut off, after that would keep a round waiting; but when it comes
back, Flower notes when, and what it was asked before that moment is asked again. Clients answer the same question with the same
reply, and of two replies the first counts.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from ..callbacks import Callback
from ..clients.flower import AWAY, Place, Run, Task, from_records, readdress, to_records
from ..errors import ProtocolError
from ..messages import Farewell, Invitation, Presence, Values
from ..server.availability import Attendance, Quota
from ..server.transport import CUT_OFF, GRACE_S
from .client_process import JOIN, LEAVE
from .multi_client import named

LOOK_S = 0.5  # between looks at who is there
PAUSE_S = 0.05  # while waiting for clients
FAREWELL_S = 10.0  # that clients have to hear that the run is over: those that are there answer at once, a SuperNode in 7 s
EXPELLED = Error(AWAY, "its key is not let in any more")
GONE = Error(AWAY, CUT_OFF)
LATE = 1000  # questions given up whose answers are still taken away


@dataclass
class Asked:
    """A message on its way, as the strategy sent it, and its copies."""

    message: Message
    client: int
    place: Place  # that the newest copy went to
    names: set[str] = field(default_factory=set)
    error: Message | None = None  # that its client is away
    until: float = 0.0  # that it is waited for, then


class Gathering(Grid):
    """The Grid of a deployed run, whose nodes are the clients that have joined it.

    `check()` raises when the SuperLink has ended. `id_of(key)`: the logical id that a public key speaks for, -1 = the client says it,
    None = it has no part. `heard(presence)` is told of each client that joins or comes back.
    """

    def __init__(
        self,
        task: Task,
        invitation: Invitation,
        clients: int,
        callback: Callback,
        check: Callable[[], None],
        id_of: Callable[[bytes], int | None],
        heard: Callable[[Presence], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.task = task
        self.invitation = invitation
        self.clients = clients
        self.callback = callback
        self.check, self.id_of, self.heard, self.clock = check, id_of, heard, clock
        self.waited_s = 0.0  # for clients to come, in all
        self.joined: dict[int, Place] = {}  # by logical id
        self._client_of: dict[int, int] = {}  # by node, those that were left behind too
        self._known: dict[int, Place] = {}  # by node, as last invited
        self._here: set[int] = set()  # nodes
        self._noticed: set[int] = set()  # clients that the callback takes to be here
        self._invited: dict[str, Place] = {}  # by the message that invites
        self._asked: dict[str, Asked] = {}  # by the name that the strategy knows
        self._late: dict[str, int] = {}  # messages given up → the clients that were asked
        self._attendance = Attendance()
        self._without_place: set[int] = set()  # clients of whom that was said
        self._missing: list[int] = []  # clients without whom rounds go on, as it was said
        self._next_look, self._look_came = 0.0, False

    # For the strategy.

    def set_run(self, run: Run) -> None:
        self.task.grid.set_run(run)

    @property
    def run(self) -> Run:
        return self.task.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self.here().values())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        clients = [self._client_of[message.metadata.dst_node_id] for message in messages]
        sent = [
            Asked(message, client, self.joined[client])
            for message, client in zip(messages, clients, strict=True)
        ]
        names = self.task.push([self._addressed(asked) for asked in sent])
        for name, asked in zip(names, sent, strict=True):
            if name:
                asked.names.add(name)
                self._asked[name] = asked
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self.look()
        wanted = set(message_ids)
        for name in self._asked.keys() - wanted:
            self._give_up(self._asked.pop(name))
        own = {copy: name for name, asked in self._asked.items() for copy in asked.names}
        replies: dict[str, Message] = {}
        for reply in self._pull(own):
            name = own[reply.metadata.reply_to_message_id]
            asked = self._asked[name]
            asked.names.discard(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code == AWAY:
                asked.error = asked.error or readdress(Message(GONE, reply_to=asked.message), name)
                asked.until = asked.until or self.clock() + GRACE_S
            elif name not in replies:
                replies[name] = readdress(reply, name)
        for name, asked in self._asked.items():
            if name in replies:
                continue
            if self.id_of(asked.place.key) is None:
                replies[name] = readdress(Message(EXPELLED, reply_to=asked.message), name)
            elif asked.error is not None and not asked.names and self.clock() > asked.until:
                replies[name] = asked.error
        for name in replies:
            self._give_up(self._asked.pop(name))
        return list(replies.values())

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        waiting, began = {name for name in self.push_messages(messages) if name}, self.clock()
        while waiting and (timeout is None or self.clock() - began < timeout):
            replies = self.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            yield from replies
            if not replies:
                time.sleep(PAUSE_S)

    # Who is there.

    def here(self) -> dict[int, int]:
        """Logical id → node of the clients that have joined, can be reached, and may still take part."""
        there = (
            (client, place)
            for client, place in sorted(self.joined.items())
            if place.node in self._here
        )
        return {client: place.node for client, place in there if self.id_of(place.key) is not None}

    def gather(self, quota: Quota) -> dict[int, int]:
        """Wait until enough clients are here. Returns logical id → node of those that a round may be drawn from."""
        told, began = None, self.clock()
        while True:
            self.look()
            self._pull()
            here, waited_s = self.here(), self.clock() - began
            self._notice(set(here))
            if (cohort := self._attendance.cohort_of([*here], quota, waited_s)) is not None:
                self.waited_s += waited_s
                if told is not None:
                    self.callback.waiting([*here], min(len(here), self._attendance.wanted(quota)))
                self._tell_who_is_missing(cohort, quota)
                return {client: here[client] for client in cohort}
            if [*here] != told:
                told = [*here]
                self.callback.waiting(told, self._attendance.wanted(quota))
            time.sleep(PAUSE_S)

    def _tell_who_is_missing(self, cohort: Sequence[int], quota: Quota) -> None:
        """Once, whenever others are missing where a round is drawn from fewer clients than it asks for."""
        missing = sorted(self.joined.keys() - set(cohort)) if len(cohort) < quota.wanted else []
        if missing and missing != self._missing:
            self.callback.warning(
                f"rounds go on with {len(cohort)} clients in place of {quota.wanted}, without {named(missing)}: away, or "
                "silent since the deadline; who is heard of takes part again"
            )
        self._missing = missing

    def miss(self, clients: Iterable[int]) -> None:
        """These clients had their time and did not answer: attendance.py says what follows."""
        missed = set(clients)
        self._attendance.miss(missed)
        for name in [name for name, asked in self._asked.items() if asked.client in missed]:
            self._give_up(self._asked.pop(name))

    def look(self) -> None:
        """See who came, now and then."""
        self.check()
        if self.clock() < self._next_look:
            return
        places = self.task.places()
        self._here = {place.node for place in places}
        new = [
            p for p in places if p.node not in self._known or p.since > self._known[p.node].since
        ]
        self._known |= {place.node: place for place in new}
        self._invite(new)
        self._notice(set(self.here()))
        self._next_look, self._look_came = self.clock() + LOOK_S, True

    def _notice(self, here: set[int]) -> None:
        """Tell of those who came and went."""
        for client in sorted(self._noticed - here):
            self.callback.left(client)
        for client in sorted(here - self._noticed):
            self.callback.joined(client)
        self._noticed = here

    def dismiss(self, round: int) -> None:
        """Tell everybody that the run is over."""
        farewell = Farewell(self.invitation.run, round)
        waiting = {
            name
            for name in self.task.push(
                [self._letter(farewell, node, LEAVE) for node in self.here().values()]
            )
            if name
        }
        deadline = self.clock() + FAREWELL_S
        while waiting and self.clock() < deadline:
            waiting -= {reply.metadata.reply_to_message_id for reply in self.task.pull(waiting)}
            time.sleep(PAUSE_S)

    def _invite(self, places: Iterable[Place]) -> None:
        ids = [(place, self.id_of(place.key)) for place in places]
        guests = [(place, who) for place, who in ids if who is not None and who < self.clients]
        for who in sorted(
            {who for _, who in ids if who is not None and who >= self.clients} - self._without_place
        ):
            self._without_place.add(who)
            self.callback.warning(
                f"client {who} is here and has no part in this run of {self.clients} clients, 0 to {self.clients - 1}; "
                f"a new run with --clients {who + 1} has a place for it"
            )
        letters = [
            self._letter(_to(self.invitation, who), place.node, JOIN) for place, who in guests
        ]
        self._invited |= {
            name: place
            for name, (place, _) in zip(self.task.push(letters), guests, strict=True)
            if name
        }

    @staticmethod
    def _letter(content: Values, node: int, kind: str) -> Message:
        return Message(to_records(content), node, kind, group_id="")

    def _pull(self, own: Iterable[str] = ()) -> list[Message]:
        """Replies to messages of the strategy; those to invitations are heard, late ones dropped."""
        own, replies = set(own), []
        late = self._late if self._look_came else ()
        self._look_came = False
        for reply in self.task.pull([*own, *self._invited, *late]):
            name = reply.metadata.reply_to_message_id
            if name in self._invited:
                self._hear(reply, self._invited.pop(name))
            elif name in own:
                replies.append(reply)
            elif (client := self._late.pop(name, None)) is not None and not reply.has_error():
                self._attendance.hear(client)
        return replies

    def _hear(self, reply: Message, place: Place) -> None:
        """An invitation was answered."""
        if reply.has_error() or self._known.get(place.node) != place:
            return  # gone before it could answer
        try:
            presence = from_records(reply.content, Presence)
        except ProtocolError as error:
            self.callback.warning(f"node {place.node} cannot take part: {error}")
            return
        who = self.id_of(place.key)
        client = presence.client if who == -1 else who
        if presence.reason or presence.run != self.invitation.run:
            named = (
                f"client {client}" if client is not None and client >= 0 else f"node {place.node}"
            )
            self.callback.warning(
                f"{named} cannot take part: {presence.reason or 'it answered for another run'}"
            )
        elif client is None or not 0 <= client < self.clients or presence.client != client:
            self.callback.warning(
                f"node {place.node} cannot take part as client {presence.client}; the run has {self.clients} clients, "
                "from 0 on"
            )
        else:
            self._welcome(client, place, presence)

    def _welcome(self, client: int, place: Place, presence: Presence) -> None:
        before = self.joined.get(client)
        if before is not None and before.node != place.node and before.node in self._here:
            self.callback.warning(
                f"client {client} came a second time, with a new key or from another state folder; the newer one counts"
            )
        self.joined[client], self._client_of[place.node] = place, client
        self._attendance.hear(client)
        self.heard(presence)
        for asked in self._asked.values():
            if asked.client == client and (asked.place != place or asked.error is not None):
                self._ask_again(asked, place)

    def _ask_again(self, asked: Asked, place: Place) -> None:
        asked.place, asked.error, asked.until = place, None, 0.0
        asked.names |= {
            name for name in self.task.push([self._addressed(asked, anew=True)]) if name
        }

    def _addressed(self, asked: Asked, anew: bool = False) -> Message:
        """The message, or one like it, for where its client is now."""
        m = asked.message
        if m.metadata.dst_node_id == asked.place.node and not anew:
            return m
        return self.create_message(
            m.content,
            m.metadata.message_type,
            asked.place.node,
            m.metadata.group_id,
            m.metadata.ttl,
        )

    def _give_up(self, asked: Asked) -> None:
        self._late |= dict.fromkeys(asked.names, asked.client)
        while len(self._late) > LATE:
            del self._late[next(iter(self._late))]


def _to(invitation: Invitation, client: int) -> Invitation:
    return Invitation(
        invitation.run,
        client,
        invitation.options,
        invitation.layout,
        invitation.version,
    )
