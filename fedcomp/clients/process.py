"""The client process: one that stays, holds model, data and memory, and answers the server as long as there is one.

It speaks Flower's Fleet API itself, so that an exchange costs no new process, and runs only what is installed on its machine: a
server sends names and numbers (joining.py) and frames. What it has to keep is on its disk before a reply leaves, so that a kill at
any moment loses nothing: asked the same again, it sends the reply that it kept.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from flwr.app import Message
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ..errors import CheckpointError, FedcompError, ProtocolError, UnreachableError, UserError
from ..messages import UPDATE, Assignment, Report, failure
from . import connection
from .client import Client
from .flower import Fleet, from_records, to_records
from .joining import Farewell, Invitation, Own, Presence, client_for
from .state import StateFolder

JOIN, LEAVE, TRAIN = "query.join", "query.leave", "train"  # types of Flower messages
SHORTEST_S, ROUND_S, LONGEST_S = 0.1, 1.0, 5.0  # between two looks for a message: at least, at most while rounds go on, at most ever
EASE, REST_S = 5, 30.0  # a look comes after a fifth of the time since the last message; from REST_S on, rounds do not go on
RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts to reach the server
LINGER_S = 1.0
PASSED = 32  # versions that are remembered over a restart
WEIGHTS, MOMENTUM, BUFFERS, MEMORY, HEAD, REPORT = "weights", "momentum", "buffers", "memory.", "head", "report"
KEY_FILE, NODE_FILE = "key.bin", "node.bin"  # in the state folder


def wait_s(idle_s: float, usual_s: float = 0.0) -> float:
    """Seconds until the next look for a message when the last one was answered `idle_s` ago, and the one before it `usual_s` earlier.

    Nobody looks in the first half of the usual time, so that many clients do not keep the server from its work.
    """
    longest = ROUND_S if idle_s < REST_S else min(LONGEST_S, idle_s / REST_S)
    return min(longest, max(SHORTEST_S, idle_s / EASE, usual_s / 2 - idle_s))


class Member:
    """A client that takes part in a run, and what it keeps of it on its disk. Answers messages, whoever carries them."""

    def __init__(self, own: Own, folder: StateFolder | None):
        self.own, self.folder = own, folder
        self.run = ""  # that it is invited to
        self.who = own.client_id
        self.client: Client | None = None
        self._report: Report | None = None  # the last one
        self._accepted = ""  # that its assignment named
        self._passed: deque[str] = deque(maxlen=PASSED)

    def join(self, invitation: Invitation) -> Presence:
        """Take part in a run, where this client left it or from the start. What does not go together is the reason in the answer."""
        if self.client is None or invitation.run != self.run:
            self.who, self.client = client_for(invitation, self.own)
            self.run, self._report, self._accepted = invitation.run, None, ""
            self._passed.clear()
            self._restore(invitation)
        return Presence(self.run, self.who, self.client.replica.version, "")

    def answer(self, assignment: Assignment) -> Report | None:
        """The report on an assignment, kept before it is given. None for one that this client cannot have been meant by.

        Raises CheckpointError when it cannot be kept: the disk then stands where the client's last report left it.
        """
        if self.client is None or assignment.client != self.who:
            return None
        last = self._report
        asked = (assignment.round, assignment.phase, assignment.accepted, assignment.version)
        if last is not None and last.kind == UPDATE and asked == (last.round, last.phase, self._accepted, last.version):
            return last
        report = self.client.handle(assignment)
        self._report, self._accepted = report, assignment.accepted
        self._save()
        return report

    def _save(self) -> None:
        if self.folder is None:
            return
        client, kept = self.client, {}
        state = client.memory.state_dict()
        for name, value in state.items():
            kept[MEMORY + name] = value
        kept[WEIGHTS] = client.replica.weights
        if client.momentum is not None:
            kept[MOMENTUM] = client.momentum
        if client.buffers:
            kept[BUFFERS] = save_tensors({name: value.cpu().contiguous() for name, value in client.buffers.items()})
        if client.replica.version not in self._passed:
            self._passed.append(client.replica.version)
        kept[REPORT] = self._report.pack()
        kept[HEAD] = json.dumps({
            "run": self.run, "client": self.who, "layout": client.replica.layout.fingerprint, "version": client.replica.version,
            "passed": list(self._passed), "ticket": client.ticket, "after": client.after, "accepted": self._accepted,
        }).encode()
        self.folder.save(kept)

    def _restore(self, invitation: Invitation) -> None:
        """Stand where this client stood when it was last heard of in this run."""
        kept = self.folder.load() if self.folder else {}
        client = self.client
        try:
            head = json.loads(kept.get(HEAD, b"{}"))
            if (head.get("run"), head.get("client"), head.get("layout")) != (self.run, self.who, client.replica.layout.fingerprint):
                return  # of another run: it is replaced by this client's first report
            self._passed.extend(head["passed"])
            client.replica.restore(kept[WEIGHTS], head["version"], head["passed"])
            client.ticket, client.after, self._accepted = head["ticket"], head["after"], head["accepted"]
            client.memory.load_state_dict({name[len(MEMORY) :]: value for name, value in kept.items() if name.startswith(MEMORY)})
            client.momentum = kept.get(MOMENTUM)
            client.buffers = load_tensors(kept[BUFFERS]) if BUFFERS in kept else None
            self._report = Report.unpack(kept[REPORT])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, FedcompError) as error:
            raise CheckpointError(f"what --state-dir {self.folder.path} holds is damaged ({error}); remove it, and the client takes part "
                                  "like one that is new") from error


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

    def __init__(self, target: Target, member: Member, say: Callable[[str], None], *, patience_s: float | None = None, stay: bool = False):
        self.target, self.member, self.say, self.patience_s, self.stay = target, member, say, patience_s, stay
        self.refused = ""  # why this client cannot take part, or go on
        self._key = target.key or own_key(member.folder)
        self._over = False

    def run(self) -> None:
        """Until the run is over. Raises UserError when this client cannot take part, or a server is not reached in time."""
        lost_at: float | None = None
        attempt = 0
        while not self._over:
            try:
                connection.check_server(self.target.host, self.target.port, self.target.ca)
                with self._connection() as fleet:
                    self.say(f"connected to {self.target.address}")
                    lost_at, attempt = None, 0
                    self._attend(fleet)
            except UnreachableError as error:
                if error.cause not in UnreachableError.passing:
                    raise
                lost_at = lost_at or time.monotonic()
                if self.patience_s is not None and time.monotonic() - lost_at >= self.patience_s:
                    raise
                pause = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                attempt += 1
                self.say(f"{error}; trying again in {pause:g} s")
                time.sleep(pause)

    def _connection(self) -> "_Connected":
        return _Connected(self.target, self._key, self.member.folder)

    def _attend(self, fleet: Fleet) -> None:
        """Answer what comes."""
        answered, usual_s = time.monotonic(), 0.0
        while not self._over:
            message = fleet.receive()
            if message is None:
                time.sleep(wait_s(time.monotonic() - answered, usual_s))
                continue
            began = time.monotonic()
            reply = self._reply(message)
            if reply is not None:
                fleet.reply(to_records(reply), message, time.monotonic() - began)
                usual_s, answered = began - answered, time.monotonic()
            if self.refused:
                time.sleep(LINGER_S)  # the answer of one who left at once would be lost
                raise UserError(self.refused)

    def _reply(self, message: Message) -> Presence | Report | None:
        kind = message.metadata.message_type
        try:
            if kind == JOIN:
                return self._join(from_records(message.content, Invitation))
            if kind == TRAIN:
                return self._train(from_records(message.content, Assignment))
            if kind == LEAVE:
                return self._leave(from_records(message.content, Farewell))
        except ProtocolError as error:
            self.say(f"a message that cannot be understood was dropped: {error}")
        return None

    def _join(self, invitation: Invitation) -> Presence:
        try:
            presence = self.member.join(invitation)
            client = self.member.client
            self.say(f"takes part as client {presence.client}, with {len(client.shard)} examples, uplink {client.memory.codec}, "
                     f"memory {client.memory.name}")
            return presence
        except FedcompError as error:
            self.refused = str(error)
            return Presence(invitation.run, self.member.who, "", self.refused)

    def _train(self, assignment: Assignment) -> Report | None:
        try:
            report = self.member.answer(assignment)
        except CheckpointError as error:
            self.refused = str(error)
            return failure(assignment, "encode", self.refused)
        if report is not None:
            sent = f"{len(report.frame)} bytes up, loss {report.loss:.4f}" if report.kind == UPDATE else f"{report.stage}: {report.reason}"
            down = sum(map(len, assignment.frames))
            self.say(f"round {assignment.round}{f' {assignment.phase}' * (assignment.phase != TRAIN)}: {down} bytes down, {sent}")
        return report

    def _leave(self, farewell: Farewell) -> Presence | None:
        if farewell.run != self.member.run:
            return None
        self.say(f"the run is over after round {farewell.round}{'; waiting for the next one' * self.stay}")
        self._over = not self.stay
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
        folder.save({KEY_FILE: key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())}, KEY_FILE)
    return key


def _kept_node(folder: StateFolder | None) -> int:
    kept = folder.load(NODE_FILE) if folder else {}
    return int(kept.get(NODE_FILE, b"0"))
