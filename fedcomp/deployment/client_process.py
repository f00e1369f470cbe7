"""The client process: one that stays, holds model, data and memory, and answers the server as long as there is one.

It speaks Flower's Fleet API itself, so that an exchange costs no new process, and runs only what is installed on its machine: a
server sends names and numbers (joining.py) and frames. What it answers, and what it keeps of that, is the member's affair (member.py).
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from flwr.app import Message

from ..callbacks import Said
from ..clients.flower import Fleet, from_records, to_records
from ..errors import CheckpointError, FedcompError, ProtocolError, UnreachableError, UserError
from ..keys import connection
from ..messages import UPDATE, Assignment, Farewell, Invitation, Presence, Report, failure
from ..state_folder import StateFolder
from ..strategies.sealed_election import unknown_keys
from . import log_messages as sentences
from .member import Member

JOIN, LEAVE, TRAIN = "query.join", "query.leave", "train"  # types of Flower messages
SHORTEST_S, ROUND_S, LONGEST_S = (
    0.1,
    1.0,
    5.0,
)  # between two looks for a message: at least, at most while rounds go on, at most ever
EASE, REST_S = (
    5,
    30.0,
)  # a look comes after a fifth of the time since the last message; from REST_S on, rounds do not go on
GIVE_WAY = 10  # a client that waits for its server waits ten times as long before it looks again
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts to reach the server
LINGER_S = 1.0
UNASKED_S = 20.0
UNASKED = "the server has not asked this client for anything yet: it may have no place for it in this run; its screen says so"
KEY_FILE, NODE_FILE = "key.bin", "node.bin"  # in the state folder


def wait_s(idle_s: float, usual_s: float = 0.0, took_s: float = 0.0) -> float:
    """Seconds until the next look for a message when the last one was answered `idle_s` ago, and the one before it `usual_s` earlier.

    Nobody looks in the first half of the usual time, nor soon again where a look took long (`took_s`), so that many clients do not
    keep the server from its work: however many they are, few of them wait for it at a time.
    """
    longest = ROUND_S if idle_s < REST_S else min(LONGEST_S, idle_s / REST_S)
    usual = min(longest, max(SHORTEST_S, idle_s / EASE, usual_s / 2 - idle_s))
    return max(usual, min(LONGEST_S, took_s * GIVE_WAY))


def not_overtaken(messages: Sequence[Message]) -> list[Message]:
    """Of messages that waited together, in the order in which to answer them: invitations, farewells, and the newest round's questions."""
    questions = [message for message in messages if message.metadata.message_type == TRAIN]
    newest = max((_round(message) for message in questions), default=0)
    others = [
        message
        for kind in (JOIN, LEAVE)
        for message in messages
        if message.metadata.message_type == kind
    ]
    over = any(message.metadata.message_type == LEAVE for message in messages)
    return others + [message for message in questions if not over and _round(message) == newest]


def _round(message: Message) -> int:
    """Of an assignment: its group, as Flower calls it."""
    group = message.metadata.group_id
    return int(group) if group.isdecimal() else 0


@dataclass(frozen=True)
class Target:
    """Where the server is, and how this client proves who it is."""

    host: str
    port: int
    ca: bytes | None  # PEM; None: without TLS
    key: ec.EllipticCurvePrivateKey | None  # None: one of its own making, that anybody could make

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Process:
    """Keeps a member connected. `say` hears a sentence whenever something changes.

    `patience_s`: for how long it tries to reach a server; None = for ever. `stay`: it waits for the next run when one is over.
    """

    def __init__(
        self,
        target: Target,
        member: Member,
        say: Callable[[str], None],
        *,
        patience_s: float | None = None,
        stay: bool = False,
    ):
        self.target = target
        self.member = member
        self.say = say
        self.patience_s = patience_s
        self.stay = stay
        self.refused = ""  # why this client cannot take part, or go on
        self._key = member.key = target.key or own_key(member.folder)
        self._over = False
        self._ended = threading.Event()

    def end(self) -> None:
        """Have `run` return soon. May be called from another thread."""
        self._over = True
        self._ended.set()

    def run(self) -> None:
        """Until the run is over. Raises UserError when this client cannot take part, or a server is not reached in time."""
        lost_at: float | None = None
        attempt, told = 0, ""
        while not self._over:
            try:
                with ExitStack() as ends:
                    with self.member.own.common.door:
                        if self._over:
                            return
                        connection.check_server(self.target.host, self.target.port, self.target.ca)
                        fleet = ends.enter_context(self._connection())
                    self.say(
                        Said(
                            f"connected to {self.target.address}",
                            "connected",
                            server=self.target.address,
                        )
                    )
                    lost_at, attempt = None, 0
                    self._attend(fleet)
            except UnreachableError as error:
                if error.cause not in UnreachableError.passing:
                    raise
                lost_at = lost_at or time.monotonic()
                if self.patience_s is not None and time.monotonic() - lost_at >= self.patience_s:
                    raise
                pause = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                if attempt < len(RETRY_S) or str(error) != told:
                    told = str(error)
                    how = self._trying(attempt, pause)
                    self.say(
                        Said(
                            f"{error}; {how}",
                            "cut_off",
                            reason=told,
                            cause=error.cause,
                            pause_s=pause,
                        )
                    )
                attempt += 1
                self._ended.wait(pause)

    def _trying(self, attempt: int, pause_s: float) -> str:
        """What is done about a server that is not reached. A client that missed the end of the run sees no more than that."""
        if attempt < len(RETRY_S) - 1:
            return f"trying again in {pause_s:g} s"
        end = (
            "until it is stopped"
            if self.patience_s is None
            else f"for {self.patience_s:g} s in all"
        )
        return f"trying every {pause_s:g} s from now on, {end}: the server may be away, or the run over"

    def _connection(self) -> "_Connected":
        return _Connected(self.target, self._key, self.member.folder)

    def _attend(self, fleet: Fleet) -> None:
        """Answer what comes."""
        looked = answered = came = time.monotonic()
        usual_s, asked = 0.0, False
        while not self._over:
            began = time.monotonic()
            messages = self._waiting(fleet, all_of_them=began - looked > ROUND_S)
            looked = time.monotonic()
            asked = asked or bool(messages)
            if not asked and looked - came > UNASKED_S:
                asked = True
                self.say(Said(UNASKED, "unasked"))
            if not messages:
                self._ended.wait(wait_s(looked - answered, usual_s, looked - began))
            for message in messages:
                began = time.monotonic()
                if self._answer(fleet, message):
                    usual_s, answered = began - answered, time.monotonic()

    def _waiting(self, fleet: Fleet, all_of_them: bool) -> list[Message]:
        """The next message, if there is one. After a pause there may be several, of rounds that are over: what is worth an answer."""
        messages: list[Message] = []
        while (message := fleet.receive()) is not None:
            messages.append(message)
            if not all_of_them:
                return messages
        kept = not_overtaken(messages)
        if dropped := len(messages) - len(kept):
            self.say(
                Said(
                    f"{dropped} question{'s' * (dropped > 1)} of rounds that are over: not answered",
                    "overtaken",
                    count=dropped,
                )
            )
        return kept

    def _answer(self, fleet: Fleet, message: Message) -> bool:
        """Whether there was something to answer. Raises UserError when this client cannot take part, or go on."""
        began = time.monotonic()
        reply = self._reply(message)
        if reply is not None:
            fleet.reply(to_records(reply), message, time.monotonic() - began)
        if self.refused:
            time.sleep(LINGER_S)  # the answer of one who left at once would be lost
            raise UserError(self.refused)
        return reply is not None

    def _reply(self, message: Message) -> Presence | Report | None:
        kind = message.metadata.message_type
        try:
            if kind == JOIN:
                return self._join(from_records(message.content, Invitation))
            if kind == TRAIN:
                return self._train(
                    from_records(message.content, Assignment), message.metadata.run_id
                )
            if kind == LEAVE:
                return self._leave(from_records(message.content, Farewell))
        except ProtocolError as error:
            self.say(
                Said(
                    f"a message that cannot be understood was dropped: {error}",
                    "dropped",
                    reason=str(error),
                )
            )
        return None

    def _join(self, invitation: Invitation) -> Presence:
        try:
            presence = self.member.join(invitation)
            self.say(sentences.joined(presence, self.member.session))
            return presence
        except FedcompError as error:
            self.refused = str(error)
            return Presence(invitation.run, self.member.who, "", self.refused)

    def _train(self, assignment: Assignment, asker: int) -> Report | None:
        try:
            report = self.member.answer(assignment, asker)
        except CheckpointError as error:
            self.refused = str(error)
            return failure(assignment, "encode", self.refused)
        if report is not None:
            self.say(sentences.answered(assignment, report))
            if report.kind == UPDATE and (
                others := unknown_keys(assignment, self.member.round_state)
            ):
                self.say(sentences.unknown(assignment, others))
        return report

    def _leave(self, farewell: Farewell) -> Presence | None:
        if farewell.run != self.member.run:
            return None
        self.say(sentences.over(farewell, self.stay))
        self._over = self._over or not self.stay
        return Presence(farewell.run, self.member.who, "", "")


class _Connected:
    """A connection that is entered, with the heartbeat that keeps it."""

    def __init__(self, target: Target, key: ec.EllipticCurvePrivateKey, folder: StateFolder | None):
        self.folder = folder
        self.fleet = Fleet(target.address, key, target.ca, enrolled=target.key is not None)
        self._left = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Fleet:
        try:
            node = self.fleet.enter(_kept_node(self.folder))
        except BaseException:
            self.fleet.close()
            raise
        if self.folder is not None:
            self.folder.save({NODE_FILE: str(node).encode()}, NODE_FILE)
        self._heart.start()
        return self.fleet

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self.fleet.leave()
        self._heart.join()
        self.fleet.close()

    def _beat(self) -> None:
        while not self._left.wait(self.fleet.interval_s * 0.8):
            try:
                self.fleet.heartbeat()
            except UserError:  # the next call of the main thread tells
                continue


def own_key(folder: StateFolder | None) -> ec.EllipticCurvePrivateKey:
    """The key that a client without an enrolment made for itself, the same after a restart."""
    kept = folder.load(KEY_FILE) if folder else {}
    if KEY_FILE in kept:
        return load_pem_private_key(kept[KEY_FILE], None)
    key = ec.generate_private_key(ec.SECP384R1())
    if folder is not None:
        folder.save(
            {KEY_FILE: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())},
            KEY_FILE,
        )
    return key


def _kept_node(folder: StateFolder | None) -> int:
    """The node id that the client had, 0 when it is not known, which costs a minute's wait at most."""
    try:
        return int(folder.load(NODE_FILE)[NODE_FILE]) if folder else 0
    except (CheckpointError, KeyError, ValueError):
        return 0
