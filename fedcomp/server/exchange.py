"""One phase of a round: send assignments, check reports as they arrive, and count the bytes of both."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..callbacks import Rejection
from ..clients.flower import AWAY, from_records, to_records
from ..codecs import Update
from ..errors import FedcompError, FrameError, ProtocolError
from ..messages import DENSE, FAILED, NEED_DENSE, Assignment, Report, Values, ticket
from ..profiling import timed
from ..strategies.base import Accepted
from ..strategies.round_completion import Progress, RoundCompletion
from .broadcasts import Broadcasts, Download
from .clock import Clock

Roster = Callable[
    [Grid], Mapping[int, int]
]  # logical client id → Flower node id, of the clients that can be reached now

MOST_EXAMPLES = 1 << 53  # that a client may report: up to here every float64 is exact
POLL_S = 0.1  # between polls of a Grid without new replies


def by_node(grid: Grid) -> dict[int, int]:
    """Return the roster of a plain Flower deployment: a client's logical id is its node id."""
    return {node: node for node in grid.get_node_ids()}


def accepted_of(report: Report, update: Update | None, rate: float = 1.0) -> Accepted:
    """Return the accepted update of a report whose frame holds `update`, made at the learning rate `rate`."""
    return Accepted(
        report.client,
        update,
        report.examples,
        report.loss,
        report.ticket,
        report.frame,
        not report.after,
        rate,
    )


@dataclass
class Traffic:
    """The traffic of a round by client: bytes of frames, announcements and returned frames, and the duration of answers."""

    uplink: dict[int, int] = field(default_factory=dict)
    downlink: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(
        default_factory=dict, compare=False
    )  # from question to answer, summed over phases; clients that answered
    behind: dict[int, int | None] = field(
        default_factory=dict
    )  # versions missed when the client was asked; None: unknown
    lateness: dict[int, int] = field(
        default_factory=dict
    )  # rounds since the one that the answer was made for; absent: this one
    first_download: int = 0  # downlink bytes to clients without a state
    catch_up: int = 0  # downlink bytes older than the newest broadcast

    def sent(
        self, client: int, download: Download, beside: list[bytes], first: bool, newest: int
    ) -> None:
        """Count a download. `beside`: what is announced and returned with it."""
        size = download.bytes
        self.downlink[client] = self.downlink.get(client, 0) + size + sum(map(len, beside))
        if first:
            self.first_download += size
        else:
            self.catch_up += max(0, size - newest)

    def received(self, client: int, frame: bytes) -> None:
        self.uplink[client] = self.uplink.get(client, 0) + len(frame)


class Exchange:
    """The messages of one phase with one cohort. `accepted` and `rejected` grow while replies arrive."""

    def __init__(
        self,
        grid: Grid,
        broadcasts: Broadcasts,
        open_frames: Callable[[Sequence[bytes]], list[Update | FrameError]],
        traffic: Traffic,
        heard: Callable[[Report], None],
        on_answer: Callable[[int, int], None],
        in_step: bool = False,  # the server keeps a counterpart of what clients have committed
        clock: Clock | None = None,  # the real one unless given
        vet: Callable[[int, bytes], None] = lambda client, frame: (
            None
        ),  # raises FrameError for a frame that this client cannot mean
    ):
        self.clock, self.vet = clock or Clock(), vet
        self.grid = grid
        self.broadcasts = broadcasts
        self.open_frames = open_frames
        self.traffic = traffic
        self.heard, self.on_answer, self.in_step = heard, on_answer, in_step
        self._content: Callable[[Values], RecordDict] = getattr(
            grid, "content_of", to_records
        )  # of a message
        self.accepted: dict[int, Accepted] = {}
        self.rejected: dict[int, Rejection] = {}
        self.proven: set[int] = set()  # clients rejected for bytes that no honest client sends
        self._asked: dict[int, tuple[Assignment, int]] = {}  # client → assignment, node
        self._waiting: dict[str, int] = {}  # message id → client
        self._since: dict[int, float] = {}  # client → time of its last message, in seconds
        self._sent_dense: set[int] = set()

    def message(self, assignment: Assignment, node: int) -> Message:
        """Return the Flower message of an assignment and remember it until its reply arrives."""
        self._asked[assignment.client] = assignment, node
        return self.grid.create_message(
            self._content(assignment), "train", node, str(assignment.round)
        )

    def run(self, messages: list[Message], completion: RoundCompletion) -> None:
        """Send messages and receive replies until the phase is complete; reject the clients that have not answered by then."""
        self.clock.begin(completion.deadline_s)
        started = self.clock.now()
        self.push(messages)
        while (closed := completion.check(progress := self._progress(started))) is None:
            self.clock.expect(completion.answers_left(progress))
            if not self.poll():
                self.clock.rest(POLL_S)
        for client in list(self._waiting.values()):
            self.give_up(client, closed.reason, closed.stage)

    def push(self, messages: list[Message]) -> None:
        """Send messages."""
        clients = self._clients()
        for message, name in zip(messages, self.grid.push_messages(messages), strict=True):
            client = clients[message.metadata.dst_node_id]
            if name:
                self._waiting[name], self._since[client] = client, self.clock.now()
            else:
                self._reject(client, "send", "the message could not be sent")

    def poll(self) -> bool:
        """Receive the replies that are there. Return whether there were any."""
        replies = list(self.grid.pull_messages(self.names))
        self.receive(replies)
        return bool(replies)

    def leave_out(self, client: int, reason: str) -> None:
        """Reject a client whose report was accepted."""
        del self.accepted[client]
        self._reject(client, "reply", reason)

    def charge_to(self, traffic: Traffic) -> None:
        """Count the bytes that are sent and received from now on in `traffic`."""
        self.traffic = traffic

    def give_up(self, client: int, reason: str, stage: str = "reply") -> None:
        """Reject a client that has not answered. A later reply is dropped."""
        self._waiting = {name: other for name, other in self._waiting.items() if other != client}
        self._reject(client, stage, reason)

    @property
    def names(self) -> list[str]:
        """The ids of messages without a reply."""
        return list(self._waiting)

    @property
    def waiting(self) -> set[int]:
        """The clients that have not replied."""
        return set(self._waiting.values())

    def take(self) -> dict[int, Accepted | Rejection]:
        """Return what was accepted and rejected since the last call, by client."""
        taken = self.accepted | self.rejected
        self.accepted, self.rejected = {}, {}
        return taken

    def receive(self, replies: Iterable[Message]) -> None:
        """Accept each reply, reject it with a reason, or answer it with the dense model. Drop replies to unknown messages."""
        known = [
            (self._waiting.pop(reply.metadata.reply_to_message_id, None), reply)
            for reply in replies
        ]
        self._answer([(client, reply) for client, reply in known if client is not None])

    def receive_from_nodes(self, replies: Iterable[Message]) -> None:
        """`receive` for messages that were sent by other code: replies are matched by node, and the first of each node counts."""
        clients = self._clients()
        first = {
            clients.get(reply.metadata.src_node_id): reply for reply in reversed(list(replies))
        }
        self._answer([(client, reply) for client, reply in first.items() if client is not None])

    def _answer(self, replies: Sequence[tuple[int, Message]]) -> None:
        for client, came_s in (
            (c, self.clock.came(r.metadata.reply_to_message_id))
            for c, r in replies
            if not r.has_error()
        ):
            self.traffic.seconds[client] = (
                self.traffic.seconds.get(client, 0.0) + came_s - self._since.get(client, came_s)
            )
        before = len(self.accepted) + len(self.rejected)
        updates = [
            report
            for client, reply in replies
            if (report := self._report_of(client, reply)) is not None
        ]
        with timed("aggregation"):
            opened = iter(self.open_frames([report.frame for report in updates if report.frame]))
        for report in updates:
            update = next(opened) if report.frame else None
            try:
                if isinstance(update, FrameError):
                    raise update
                self.vet(report.client, report.frame)
                self.accepted[report.client] = accepted_of(
                    report, update, self._asked[report.client][0].lr
                )
            except FrameError as error:
                self.proven.add(report.client)
                self._reject(report.client, "reply", str(error))
        for answered in range(before + 1, len(self.accepted) + len(self.rejected) + 1):
            self.on_answer(answered, len(self._asked))

    def _report_of(self, client: int, reply: Message) -> Report | None:
        """Return the report of a reply that has an update; None if the client was rejected or was sent the dense model."""
        if reply.has_error():
            return self._reject(client, "reply", _why(reply))
        try:
            return self._checked(client, from_records(reply.content, Report))
        except FedcompError as error:
            return self._reject(client, "reply", str(error))

    def answers(self) -> Iterator[Accepted]:
        """Yield what was accepted, in the order of the client ids."""
        return (self.accepted[client] for client in sorted(self.accepted))

    def _checked(self, client: int, report: Report) -> Report | None:
        assignment, node = self._asked[client]
        if (report.client, report.round, report.phase) != (
            client,
            assignment.round,
            assignment.phase,
        ):
            raise ProtocolError(
                f"the reply is of client {report.client}, round {report.round}, phase '{report.phase}'"
            )
        self.heard(report)
        self.traffic.received(client, report.frame)
        if report.kind == NEED_DENSE and client not in self._sent_dense:
            return self._send_dense(assignment, node)
        if report.kind in (FAILED, NEED_DENSE):
            return self._reject(client, report.stage, report.reason)
        if (report.version, report.fingerprint) != (assignment.version, assignment.fingerprint):
            raise ProtocolError(
                f"the update was made from version {report.version[:8]}, the round's is {assignment.version[:8]}"
            )
        if self.in_step:
            _check_step(report, assignment)
        if not 1 <= report.examples <= MOST_EXAMPLES:
            raise ProtocolError(f"the reply counts {report.examples} examples")
        return report

    def _send_dense(self, assignment: Assignment, node: int) -> None:
        self._sent_dense.add(assignment.client)
        b = self.broadcasts
        download = b.dense()
        self.traffic.sent(assignment.client, download, assignment.announced, first=False, newest=0)
        self.traffic.behind[assignment.client] = None
        now = {
            "form": DENSE,
            "base": "",
            "version": b.version,
            "fingerprint": b.fingerprint,
            "frames": download.frames,
        }
        self.push([self.message(replace(assignment, **now, returned=b""), node)])

    def _clients(self) -> dict[int, int]:
        return {node: client for client, (_, node) in self._asked.items()}

    def _reject(self, client: int, stage: str, reason: str) -> None:
        self.rejected[client] = Rejection(client, stage, reason)

    def _progress(self, started: float) -> Progress:
        answered = len(self.accepted) + len(self.rejected)
        return Progress(len(self._asked), answered, len(self.accepted), self.clock.now() - started)


def _why(reply: Message) -> str:
    """Return the reason of a reply that is an error."""
    error = reply.error
    return (
        error.reason
        if error.code == AWAY and ": " not in error.reason
        else f"Flower error {error.code}: {error.reason}"
    )


def _check_step(report: Report, assignment: Assignment) -> None:
    """Raise ProtocolError for an update relative to another state than the counterpart holds, or with a wrong ticket."""
    if report.after not in ("", assignment.accepted):
        raise ProtocolError(
            f"the update comes after the proposal '{report.after}', the last that was accepted is '{assignment.accepted}'"
        )
    if report.ticket != ticket(report.round, report.client, report.frame):
        raise ProtocolError(f"the ticket '{report.ticket}' is not that of the frame")
