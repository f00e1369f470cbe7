"""The round loop of asynchronous strategies: a round ends after the first answers, and the clients without an answer continue to train.

A client is busy from its assignment until the server aggregates or rejects its answer; otherwise it is idle. A round ends when a fraction
(the strategy's option `wait`) of the busy clients has answered, in real time or in a simulation's virtual time. The cohort of a round
consists of the clients of these answers, and of the busy clients that are rejected because they started more than `staleness` rounds (an
option of the strategy) ago. The downlink bytes of a round are those of the clients that start to train in it.

A checkpoint contains the answers that are not aggregated yet. If the server stops, clients that have not answered are idle after a restart.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..callbacks import Rejection
from ..errors import FrameError, ProtocolError
from ..memories.base import Changes, ReadValue, ReadVector
from ..messages import TRAIN, Report
from ..strategies.base import (
    DEADLINE,
    AcceptedUpdate,
    Phase,
    RoundCompletion,
    RoundStrategy,
    cohort_size,
    draw_cohort,
)
from .broadcasts import Broadcasts
from .exchange import POLL_S, Exchange, Traffic, to_accepted
from .round_loop import RoundLoop, RoundResult
from .transport import Transport

CLOCK, AT_WORK = "clock", "at-work"  # names of entries in a checkpoint


@dataclass(frozen=True)
class Answer:
    """A client's answer that is not aggregated yet."""

    round: int  # round in which the client started to train
    # Time of arrival: virtual seconds, or seconds of time.monotonic() in real time.
    arrival_s: float
    report: Report | None  # None if the client sent no readable report
    result: AcceptedUpdate | Rejection

    @property
    def client(self) -> int:
        return self.result.client


class AsynchronousLoop(RoundLoop):
    """The round loop of an asynchronous strategy.

    `work_s(round, client)` returns how many virtual seconds a client needs for the work that it starts in a round. Without `work_s`, the
    loop runs in real time.
    """

    def __init__(
        self, *parts: Any, work_s: Callable[[int, int], float] | None = None, **settings: Any
    ):
        super().__init__(*parts, **settings)
        self.work_s, self.options = work_s, self.strategy.options
        self.now = 0.0  # virtual seconds
        self.started_in: dict[int, int] = {}  # busy client → round in which it started
        self.answers: dict[int, Answer] = {}  # answers of busy clients, not aggregated yet
        # Clients whose answers have arrived or were aggregated since the last checkpoint.
        self.changed: set[int] = set()
        # By round: exchange of messages with the clients that started to train in the round.
        self._exchanges: dict[int, Exchange] = {}
        self._reports: dict[int, Report] = {}  # by client: report that is not in `answers` yet
        # By busy client: seconds from assignment to answer.
        self._latency_s: dict[int, float] = {}

    def run_round(self, round: int) -> RoundResult:
        started = time.perf_counter()
        traffic = Traffic(latency_s=self._latency_s)
        oldest = round - self.options.staleness
        late = [client for client, started_in in self.started_in.items() if started_in < oldest]
        unread = {client: self.answers[client] for client in late if client in self.answers}
        rejected = {client: self._reject_late(client, round) for client in late}
        self._start_clients(round, traffic, excluded=rejected.keys())
        taken = self._wait_for_answers(round, started)
        traffic.uplink.clear()  # uplink bytes count in the round that aggregates the update
        for client, answer in (unread | taken).items():
            traffic.uplink[client] = len(answer.report.frame) if answer.report else 0
        traffic.staleness = {c: round - a.round for c, a in taken.items() if a.round < round}
        measured = self._latency_s.keys() & {*taken, *late}
        traffic.latency_s = {client: self._latency_s.pop(client) for client in measured}
        for client in taken:
            self._release(client)
        self.clock.move_to(self.now)
        results = [taken[client].result for client in sorted(taken)]
        rejected |= {result.client: result for result in results if isinstance(result, Rejection)}
        accepted = [
            dataclasses.replace(result, staleness=traffic.staleness.get(result.client, 0))
            for result in results
            if isinstance(result, AcceptedUpdate)
        ]
        cohort = sorted(taken.keys() | rejected.keys())
        phases = {TRAIN: accepted}
        # Without these references to the updates, `close` can free them.
        del unread, taken, results, accepted
        return self.close(round, cohort, phases, rejected, traffic)

    # Busy clients.

    def _start_clients(self, round: int, traffic: Traffic, excluded: Collection[int]) -> None:
        """Send assignments to idle clients, except `excluded`, so that the fraction --participation of the connected clients is busy."""
        clients = self.gather()
        # `gather` may have waited for clients, which advances the clock.
        self.now = max(self.now, self.clock.time_s)
        free = set(clients) - self.started_in.keys() - set(excluded)
        room = max(0, cohort_size(self.config.participation, len(clients)) - len(self.started_in))
        starting = draw_cohort([*free], min(room, len(free)), self.config.seed, round)
        configs = self.strategy.schedule.for_clients(round, starting, self.bandwidths)
        exchange, assignments = self.start_phase(round, Phase(), configs, {}, traffic)
        self._exchanges[round] = exchange
        self.started_in |= dict.fromkeys(starting, round)
        for earlier in self._exchanges.values():
            # Clients of an earlier round may still ask for the whole model, which counts as traffic of this round.
            earlier.traffic = traffic
        if self.work_s is None:
            exchange.send(assignments)
        else:
            exchange.run(assignments, RoundCompletion())

    def _wait_for_answers(self, round: int, started: float) -> dict[int, Answer]:
        """Wait until enough answers have arrived to end the round, or until the deadline. Return these answers by client.

        `started`: `time.perf_counter()` at the start of the round.
        """
        at_work = len(self.started_in)
        wanted = min(at_work, max(1, math.floor(self.options.wait * at_work + 0.5)))
        timeout_s = math.inf if self.config.timeout_s is None else self.config.timeout_s
        reported = 0
        self._collect()
        while True:
            if waiting := list(self._exchanges.values()):
                poll_s = POLL_S if len(self.answers) < wanted else 0.0
                deliveries = self.transport.receive(poll_s)
                for exchange in waiting:
                    exchange.receive(deliveries)
            self._collect()
            for count in range(reported + 1, min(wanted, len(self.answers)) + 1):
                self.on_answer(round, count, wanted)
            reported = min(wanted, len(self.answers))
            timed_out = time.perf_counter() - started > timeout_s
            if reported == wanted or not self._exchanges or timed_out:
                break
        by_arrival = sorted(self.answers.values(), key=lambda a: (a.arrival_s, a.client))
        first, limit = by_arrival[:wanted], self.now + timeout_s
        if self.work_s and any(answer.arrival_s > limit for answer in first):
            first, self.now = [answer for answer in first if answer.arrival_s <= limit], limit
        self.now = max([self.now, *(answer.arrival_s for answer in first)])
        return {answer.client: answer for answer in first}

    def _on_report(self, report: Report) -> None:
        self._reports[report.client] = report

    def _collect(self) -> None:
        """Move the results of the exchanges to `answers`."""
        for started_in, exchange in list(self._exchanges.items()):
            for client, result in exchange.take().items():
                work_s = self.work_s
                arrival_s = self.now + work_s(started_in, client) if work_s else time.monotonic()
                report = self._reports.pop(client, None)
                self.answers[client] = Answer(started_in, arrival_s, report, result)
                self.changed.add(client)
            if not exchange.waiting:
                del self._exchanges[started_in]

    def _reject_late(self, client: int, round: int) -> Rejection:
        reason = f"no answer in the {round - self.started_in[client]} rounds since the client started training"
        if client not in self.answers:
            self._exchanges[self.started_in[client]].give_up([client], reason, DEADLINE)
            self._collect()
        self._release(client)
        return Rejection(client, DEADLINE, reason)

    def _release(self, client: int) -> None:
        """Mark a client as idle, and record the model version that its answer reports."""
        del self.started_in[client]
        answer = self.answers.pop(client)
        self.changed.add(client)
        if answer.report is not None:
            super()._on_report(answer.report)

    # Checkpoints.

    def take_changes(self) -> Changes:
        values: dict[str, bytes | None] = {}
        values[CLOCK] = json.dumps([self.now, sorted(self.answers)]).encode()
        for client in self.changed:
            answer = self.answers.get(client)
            values[f"{AT_WORK}/{client}"] = _pack(answer) if answer else None
        self.changed.clear()
        return {}, values

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.now, clients = json.loads(value(CLOCK) or b"[0.0, []]")
        self.answers = {
            client: self._unpack(value(f"{AT_WORK}/{client}") or b"") for client in clients
        }
        self.started_in = {client: answer.round for client, answer in self.answers.items()}
        self._exchanges, self._reports = {}, {}
        self.changed.clear()

    def _unpack(self, data: bytes) -> Answer:
        """Return the Answer that `_pack` serialized. Raises ValueError or TypeError for malformed data."""
        head, _, packed = data.partition(b"\n")
        started_in, arrival_s, rejection = json.loads(head)
        try:
            report = Report.unpack(packed) if packed else None
        except ProtocolError as error:
            raise ValueError from error
        if rejection is not None:
            return Answer(started_in, arrival_s, report, Rejection(*rejection))
        if report is None:
            raise ValueError("an answer in the checkpoint has neither a report nor a rejection")
        (update,) = self.strategy.open(Phase(), [report.frame]) if report.frame else [None]
        if isinstance(update, FrameError):
            raise ValueError from update
        rate = self.strategy.schedule.rate(started_in)
        return Answer(started_in, arrival_s, report, to_accepted(report, update, rate))


def make_loop(
    strategy: RoundStrategy,
    broadcasts: Broadcasts,
    transport: Transport,
    *,
    work_s: Callable[[int, int], float] | None = None,
    **settings: Any,
) -> RoundLoop:
    """Return the loop that runs a strategy's rounds. `work_s`: see AsynchronousLoop. `settings`: keyword arguments of RoundLoop."""
    if strategy.asynchronous:
        return AsynchronousLoop(strategy, broadcasts, transport, work_s=work_s, **settings)
    return RoundLoop(strategy, broadcasts, transport, **settings)


def _pack(answer: Answer) -> bytes:
    rejection = dataclasses.astuple(answer.result) if isinstance(answer.result, Rejection) else None
    head = json.dumps([answer.round, answer.arrival_s, rejection]).encode()
    return head + b"\n" + (answer.report.pack() if answer.report else b"")
