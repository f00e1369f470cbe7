"""One phase of a round: send assignments, check reports as they arrive, and count the bytes in both directions."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from ..callbacks import Rejection
from ..codecs import Update
from ..errors import FrameError, ProtocolError
from ..messages import (
    DENSE,
    FAILED,
    MAX_EXAMPLES,
    NEED_DENSE,
    UPDATE,
    Assignment,
    Report,
    ReportedMetrics,
    ticket,
)
from ..profiling import timed
from ..strategies.base import (
    AcceptedUpdate,
    Phase,
    PhaseResult,
    Progress,
    RoundCompletion,
    RoundStrategy,
)
from .broadcasts import Broadcasts, Download
from .transport import Delivery, Lost, Transport

# Stages of a failure that a client, a relay or the transport may report. Any other text counts as "reply".
STAGES = frozenset(("phase", "download", "evaluate", "train", "encode", "relay", "send", "reply"))
MAX_REASON_CHARS = 1000  # a longer reason that a client or relay reports is cut off
POLL_S = 0.1  # maximum number of seconds between two checks whether the phase is complete


def to_accepted(report: Report, update: Update | None, rate: float) -> AcceptedUpdate:
    """Return the AcceptedUpdate for a report and its decoded `update`. `rate`: the client's learning rate divided by --lr."""
    return AcceptedUpdate(
        report.client,
        update,
        report.examples,
        report.loss,
        report.ticket,
        report.frame,
        not report.committed,
        rate,
        metrics=ReportedMetrics.unpack(report.metrics),
    )


@dataclass
class Traffic:
    """The bytes that each client of a round sends and receives, and the seconds until its answer."""

    uplink: Counter[int] = field(default_factory=Counter)
    downlink: Counter[int] = field(default_factory=Counter)
    # By client: seconds from assignment to answer, summed over phases. Clients that did not answer have no entry.
    latency_s: dict[int, float] = field(default_factory=dict, compare=False)
    # By client: number of model versions that the client had missed before the round, or None if unknown.
    versions_behind: dict[int, int | None] = field(default_factory=dict)
    # By client: number of rounds from the start of its training to this round. Clients that started in this round have no entry.
    staleness: dict[int, int] = field(default_factory=dict)
    first_download_bytes: int = (
        0  # downlink bytes to clients that have never reported a model version
    )
    # Downlink bytes beyond the size of the newest broadcast, for clients that missed earlier broadcasts.
    catch_up_bytes: int = 0

    def add_download(
        self, client: int, download: Download, attached: list[bytes], first: bool, newest: int
    ) -> None:
        """Count a download to a client, and the bytes that are sent with it (`attached`).

        `first`: whether the client has never reported a model version. `newest`: size of the newest broadcast in bytes.
        """
        size = download.bytes
        self.downlink[client] += size + sum(map(len, attached))
        if first:
            self.first_download_bytes += size
        else:
            self.catch_up_bytes += max(0, size - newest)


class Exchange:
    """The exchange of messages between the server and a cohort in one phase of a round.

    `accepted` and `rejected` are filled while reports arrive. `on_report` is called with each report that answers an assignment. The bytes
    of the reports are added to `traffic`.
    """

    def __init__(
        self,
        transport: Transport,
        broadcasts: Broadcasts,
        strategy: RoundStrategy,
        phase: Phase,
        traffic: Traffic,
        on_report: Callable[[Report], None],
    ):
        self.transport, self.broadcasts = transport, broadcasts
        self.strategy, self.phase, self.traffic = strategy, phase, traffic
        self.on_report = on_report
        self.accepted: dict[int, AcceptedUpdate] = {}
        self.rejected: dict[int, Rejection] = {}
        self.proven_byzantine: set[int] = set()  # clients that sent an invalid frame
        self.waiting: set[int] = set()  # clients that have not answered
        self._assignments: dict[int, Assignment] = {}  # by client: its last assignment
        self._sent_s: dict[int, float] = {}  # by client: time at which its last assignment was sent
        self._sent_dense: set[int] = set()  # clients that were sent the whole model on request

    def run(
        self,
        assignments: Sequence[Assignment],
        completion: RoundCompletion,
        on_answer: Callable[[int, int], None] = lambda answered, asked: None,
    ) -> None:
        """Send assignments, receive answers until the phase is complete, and reject the clients that have not answered by then.

        `on_answer(answered, asked)` is called after each answer: `answered` of the `asked` clients have answered.
        """
        clock = self.transport.clock
        clock.begin(completion.deadline_s)
        started = clock.now()
        self.send(assignments)
        while (closed := completion.check(progress := self._progress(started))) is None:
            clock.expect(completion.answers_until_check(progress))
            self.receive(self.transport.receive(POLL_S))
            answered = len(self.accepted) + len(self.rejected)
            for count in range(progress.answered + 1, answered + 1):
                on_answer(count, len(self._assignments))
        self.give_up(self.waiting, closed.reason, closed.stage)

    def send(self, assignments: Sequence[Assignment]) -> None:
        now_s = self.transport.clock.now()
        for assignment in assignments:
            self._assignments[assignment.client] = assignment
            self._sent_s[assignment.client] = now_s
            self.waiting.add(assignment.client)
        self.transport.send(assignments)

    def close(self) -> list[AcceptedUpdate]:
        """End the phase. Return the accepted updates in the order of client ids, without those that the strategy rejects now."""
        accepted = [self.accepted[client] for client in sorted(self.accepted)]
        result = PhaseResult(self.phase.name, accepted, frozenset(self.proven_byzantine))
        left_out = self.strategy.on_phase_end(result)
        for client, reason in left_out.items():
            del self.accepted[client]
            self._reject(client, "reply", reason)
        return [a for a in accepted if a.client not in left_out]

    def give_up(self, clients: Collection[int], reason: str, stage: str = "reply") -> None:
        """Reject clients that have not answered. The transport drops answers that arrive later."""
        late = sorted(clients)
        self.waiting -= set(late)
        self.transport.cancel(late)
        for client in late:
            self._reject(client, stage, reason)

    def take(self) -> dict[int, AcceptedUpdate | Rejection]:
        """Return and remove the entries of `accepted` and `rejected`."""
        taken = self.accepted | self.rejected
        self.accepted, self.rejected = {}, {}
        return taken

    def receive(self, deliveries: Sequence[Delivery]) -> None:
        """Accept or reject each report, or send the whole model to a client that asks for it. Ignore clients that are not awaited."""
        awaited = [delivery for delivery in deliveries if delivery.client in self.waiting]
        self.waiting -= {delivery.client for delivery in awaited}
        reports = [r for delivery in awaited if (r := self._report_of(delivery)) is not None]
        with timed("aggregation"):
            frames = [report.frame for report in reports if report.frame]
            opened = iter(self.strategy.open(self.phase, frames))
        for report in reports:
            update = next(opened) if report.frame else None
            try:
                if isinstance(update, FrameError):
                    raise update
                self.strategy.check_frame(self.phase, report.client, report.frame)
                rate = self._assignments[report.client].lr
                self.accepted[report.client] = to_accepted(report, update, rate)
            except FrameError as error:
                self.proven_byzantine.add(report.client)
                self._reject(report.client, "reply", str(error))
        for delivery in awaited:
            if delivery.client in self.rejected:
                self._reject_sum(delivery)

    def _reject_sum(self, delivery: Delivery) -> None:
        """Reject the clients whose updates a relay has added to a rejected update."""
        reason = self.rejected[delivery.client].reason
        for client in delivery.summed:
            if self.accepted.pop(client, None) is not None:
                why = f"a relay has added this client's update to the update of client {delivery.client}; the sum was rejected: {reason}"
                self._reject(client, "relay", why)

    def _report_of(self, delivery: Delivery) -> Report | None:
        """Return the report if it is a valid update, or None if the client was rejected or was sent the whole model."""
        client, report = delivery.client, delivery.answer
        assignment = self._assignments[client]
        if isinstance(report, Lost):
            self._reject_as_reported(client, report.stage, report.reason)
            return None
        latency_s = self.traffic.latency_s
        latency_s[client] = latency_s.get(client, 0.0) + delivery.arrived_s - self._sent_s[client]
        try:
            check_addressee(report, assignment)
            self.on_report(report)
            self.traffic.uplink[client] += len(report.frame)
            if report.kind == UPDATE:
                check_update(report, assignment)
                if self.strategy.counterpart is not None:
                    _check_step(report, assignment)
                return report
        except ProtocolError as error:
            self._reject(client, "reply", str(error))
            return None
        if report.kind == NEED_DENSE and client not in self._sent_dense:
            self._send_dense(assignment)
        else:
            self._reject_as_reported(client, report.stage, report.reason)
        return None

    def _send_dense(self, assignment: Assignment) -> None:
        self._sent_dense.add(assignment.client)
        b = self.broadcasts
        download = b.dense()
        announced = assignment.announced
        self.traffic.add_download(assignment.client, download, announced, first=False, newest=0)
        self.traffic.versions_behind[assignment.client] = None
        dense = replace(
            assignment,
            form=DENSE,
            base="",
            version=b.version,
            fingerprint=b.fingerprint,
            frames=download.frames,
            returned=b"",
        )
        self.send([dense])

    def _reject_as_reported(self, client: int, stage: str, reason: str) -> None:
        self._reject(client, stage if stage in STAGES else "reply", reason[:MAX_REASON_CHARS])

    def _reject(self, client: int, stage: str, reason: str) -> None:
        self.rejected[client] = Rejection(client, stage, reason)

    def _progress(self, started: float) -> Progress:
        answered = len(self.accepted) + len(self.rejected)
        elapsed_s = self.transport.clock.now() - started
        return Progress(len(self._assignments), answered, len(self.accepted), elapsed_s)


def check_addressee(report: Report, assignment: Assignment) -> None:
    """Raise ProtocolError if a report does not answer this assignment, or is of an unknown kind."""
    a, r = assignment, report
    if (r.client, r.round, r.phase) != (a.client, a.round, a.phase):
        raise ProtocolError(
            f"the report names client {r.client}, round {r.round}, phase '{r.phase}'; "
            f"expected client {a.client}, round {a.round}, phase '{a.phase}'"
        )
    if r.kind not in (UPDATE, NEED_DENSE, FAILED):
        raise ProtocolError(
            f"the report is of the unknown kind '{r.kind}'; use the same version of fedcomp on both sides"
        )


def check_version(report: Report, assignment: Assignment) -> None:
    """Raise ProtocolError if an update was not computed from the model version of its assignment."""
    a, r = assignment, report
    if (r.version, r.fingerprint) != (a.version, a.fingerprint):
        raise ProtocolError(
            f"the update was computed from model version {r.version[:8]}, but this round uses version {a.version[:8]}"
        )


def check_update(report: Report, assignment: Assignment) -> None:
    """Raise ProtocolError if the model version, the number of examples or the metrics of a report are wrong."""
    check_version(report, assignment)
    if not 1 <= report.examples <= MAX_EXAMPLES:
        raise ProtocolError(
            f"the report has {report.examples} examples; the number must be from 1 to 2**53"
        )
    ReportedMetrics.unpack(report.metrics)


def _check_step(report: Report, assignment: Assignment) -> None:
    """Raise ProtocolError if client and server disagree about the last accepted update, or if the ticket of the new update is wrong."""
    if report.committed not in ("", assignment.accepted):
        raise ProtocolError(
            "client and server disagree about the last update that the server accepted from this client: its hash is "
            f"'{assignment.accepted}' on the server, and '{report.committed}' on the client; use the same version of fedcomp on both sides"
        )
    if report.ticket != ticket(report.round, report.client, report.frame):
        raise ProtocolError(
            f"the ticket in the report, '{report.ticket}', is not the hash of the report's frame"
        )
