"""Virtual time in simulations with --network: a clock, a transport that delays answers, and the choice of online clients.

In an exchange, the server sends assignments (work for a round) to clients and receives their answers. The simulation computes each answer
immediately, but delivers it only when the virtual clock reaches the answer's time of arrival.

A busy client that receives assignments finishes its current work and then starts the newest assignment, as in a deployment. Unlike in a
deployment, assignments that the client skips also change its state, because the simulation has already computed their answers. If a client
goes offline before its answer arrives, and is still offline GRACE_S (5) seconds later, the server stops waiting for the answer. If a client
does not answer, the exchange lasts until the deadline or, without a deadline, until all other clients have answered.

Cohorts are drawn from the clients that are online. A client that missed a deadline is not drawn before its late answer has arrived, unless
too few other clients are online (server/availability.py). If too few clients are online for a cohort, virtual time advances.
"""

import heapq
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import seeds
from ..config import RunConfig
from ..errors import RunFolderError
from ..memories.base import Changes, ReadValue, ReadVector
from ..messages import FAILED, NEED_DENSE, UPDATE, Assignment, Report
from ..server.availability import Availability, Quota
from ..server.round_loop import RoundResult
from ..server.transport import GRACE_S, NOT_RECONNECTED, Clock, Delivery, Lost, Transport
from ..strategies.base import DEADLINE, ClientAlgorithm, cohort_size
from ..training.local_sgd import LocalSGD
from .network import Network

STATE = "state"  # name of the timing state in a checkpoint
# Without --network: the mean durations of two clients' work in a round differ at most by this factor.
MAX_SLOWDOWN = 4.0
# Without --network: maximum difference between the duration of a client's work and the client's mean, as a fraction of the mean.
MAX_SWING = 0.5
SILENT = "reply"  # value of `stage` in a report that replaces a missing answer
TRAINED = "train", "encode"  # values of `stage` for failures during or after training


class VirtualClock(Clock):
    """A clock of virtual time that jumps from one answer to the next, and stands still while the simulation computes.

    `now` returns seconds since the start of the exchange, and `limit_s` is counted from the same time.
    """

    def __init__(self) -> None:
        self.elapsed_s = 0.0  # since the start of the exchange
        self.limit_s = None  # time limit of the exchange; None: no limit
        self.expected = 1  # maximum number of answers that one call of `receive` returns
        self._began_s = 0.0  # start of the exchange, since the start of the run
        self._taken_s = 0.0  # time of the last call of `take`, since the start of the run
        # Seconds from the last call of `take` to the start of the exchange. The difference `_began_s - _taken_s` would be less exact.
        self._round_s = 0.0

    @property
    def time_s(self) -> float:  # type: ignore[override]
        return self._began_s + self.elapsed_s

    def begin(self, limit_s: float | None) -> None:
        self._settle()
        self.limit_s, self.expected = limit_s, 1

    def expect(self, answers: int) -> None:
        self.expected = answers

    def now(self) -> float:
        return self.elapsed_s

    def go_to(self, elapsed_s: float) -> None:
        """Advance the clock to `elapsed_s` seconds after the start of the exchange, unless that is in the past."""
        self.elapsed_s = max(self.elapsed_s, elapsed_s)

    def wait(self, seconds: float) -> None:
        self._settle()
        self._began_s += seconds
        self._round_s += seconds

    def move_to(self, time_s: float) -> None:
        self.elapsed_s, self._began_s, self._round_s = 0.0, time_s, time_s - self._taken_s

    def take(self) -> float:
        self._settle()
        taken_s, self._round_s, self._taken_s = self._round_s, 0.0, self._began_s
        return taken_s

    def _settle(self) -> None:
        self._began_s += self.elapsed_s
        self._round_s += self.elapsed_s
        self.elapsed_s = 0.0


@dataclass(frozen=True, order=True)
class Arrival:
    """An answer on its way to the server. Answers that arrive at the same time are delivered in the order of the client ids."""

    due_s: float  # time of arrival, since the start of the exchange
    client: int
    answer: Report | Lost = field(compare=False)
    exchange_s: float = field(compare=False)  # start of the exchange, since the start of the run


class TimedTransport(Transport):
    """A transport that adds a network's delays to another transport.

    The function `steps` returns an assignment's number of local steps, which determines how long the client trains.
    """

    def __init__(
        self,
        transport: Transport,
        network: Network,
        clock: VirtualClock,
        steps: Callable[[Assignment], int],
    ):
        self.transport, self.network, self.clock, self.steps = transport, network, clock, steps
        # Start and end of each client's work on its newest assignment, including the transfers, in seconds since the start of the run.
        self.busy: dict[int, tuple[float, float]] = {}
        # Arrival of each client's answer to a cancelled assignment, in seconds since the start of the run.
        self.late: dict[int, float] = {}
        # Arrival of each client's newest answer, in seconds since the start of its exchange.
        self.answer_s: dict[int, float] = {}
        self._in_transit: list[Arrival] = []  # a heap

    def clients(self) -> Sequence[int]:
        return self.transport.clients()

    def send(self, assignments: Sequence[Assignment]) -> None:
        """Send assignments, compute the clients' answers immediately, and schedule the arrival of the answers."""
        by_client = {assignment.client: assignment for assignment in assignments}
        # Count the bytes first, since clients free the frames (encoded vectors) that they receive.
        bytes_down = {
            a.client: sum(map(len, (*a.frames, *a.announced, a.returned))) for a in assignments
        }
        self.cancel(by_client)
        self.transport.send(assignments)
        arrivals: list[Arrival] = []
        while len(arrivals) < len(by_client):
            arrivals += [
                self._arrival(by_client[c := delivery.client], bytes_down[c], delivery.answer)
                for delivery in self.transport.receive(math.inf)
            ]
        for arrival in self._with_losses(arrivals):
            heapq.heappush(self._in_transit, arrival)

    def receive(self, timeout_s: float) -> list[Delivery]:
        """Advance the clock until the expected number of answers has arrived, or to the end of the exchange.

        If a client answers that it needs all weights of the model, return at once, so that the server can send it another assignment.
        """
        if not self._in_transit:
            return []
        clock = self.clock
        ready: list[Delivery] = []
        limit_s = math.inf if clock.limit_s is None else clock.limit_s
        while self._in_transit and len(ready) < clock.expected:
            if self._in_transit[0].due_s > limit_s:
                break
            arrival = heapq.heappop(self._in_transit)
            if arrival.due_s < math.inf:
                clock.go_to(arrival.due_s)
            self.answer_s[arrival.client] = clock.now()
            ready.append(Delivery(arrival.client, arrival.answer, clock.now()))
            if isinstance(arrival.answer, Report) and arrival.answer.kind == NEED_DENSE:
                break
        if not ready:
            clock.go_to(limit_s)
        return ready

    def cancel(self, clients: Collection[int]) -> None:
        """Withdraw the open assignments of clients. Their answers become late: they are not delivered, and no exchange waits for them."""
        cancelled = set(clients)
        self.late |= {
            a.client: a.exchange_s + a.due_s
            for a in self._in_transit
            if a.client in cancelled and a.due_s < math.inf
        }
        self._in_transit = [a for a in self._in_transit if a.client not in cancelled]
        heapq.heapify(self._in_transit)

    def close(self) -> None:
        self.transport.close()

    def _arrival(self, a: Assignment, bytes_down: int, answer: Report | Lost) -> Arrival:
        """Return an answer with its arrival time, and record in `busy` when the client works."""
        client = a.client
        sent_s = self.clock.now()
        exchange_s = self.clock.time_s - sent_s
        report = answer if isinstance(answer, Report) else None
        if report is not None and (report.kind, report.stage) == (FAILED, SILENT):
            return Arrival(math.inf, client, answer, exchange_s)
        trained = report is None or report.kind == UPDATE or report.stage in TRAINED
        bytes_up = len(report.frame) if report is not None else 0
        start_s = self._start_s(client, exchange_s, sent_s)
        due_s = start_s + self.network.exchange_s(
            client, a.round, bytes_down, self.steps(a) if trained else 0, bytes_up
        )
        self.busy[client] = exchange_s + start_s, exchange_s + due_s
        return Arrival(due_s, client, answer, exchange_s)

    def _with_losses(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """Replace an answer by `Lost` if the client goes offline before the answer arrives and stays offline for GRACE_S seconds."""
        now_s, replaced = self.clock.time_s, []
        for arrival in arrivals:
            client, exchange_s = arrival.client, arrival.exchange_s
            until_s = exchange_s + arrival.due_s if arrival.due_s < math.inf else now_s
            lost_s = self.network.absences.lost_at_s(client, now_s, until_s, GRACE_S)
            if lost_s is not None:
                self.busy[client] = min(self.busy.get(client, (now_s, 0.0))[0], lost_s), lost_s
                arrival = Arrival(lost_s - exchange_s, client, Lost(NOT_RECONNECTED), exchange_s)
            replaced.append(arrival)
        return replaced

    def _start_s(self, client: int, exchange_s: float, sent_s: float) -> float:
        """Return when a client starts an assignment that was sent at `sent_s`. Both are in seconds since the start of the exchange."""
        start_s, end_s = self.busy.get(client, (0.0, 0.0))
        # The client finishes its previous assignment if it has started that assignment, and skips it otherwise.
        free_s = (end_s if start_s <= exchange_s + sent_s else start_s) - exchange_s
        return max(sent_s, free_s)


class Timing:
    """The clock and the transport of a run on a virtual network, and the choice of clients from which cohorts are drawn.

    `min_clients` is the number of clients that the strategy needs in a round.
    """

    def __init__(
        self,
        network: Network,
        config: RunConfig,
        min_clients: int,
        transport: Transport,
        steps: Callable[[Assignment], int],
    ):
        self.network, self.clock = network, VirtualClock()
        self.transport = TimedTransport(transport, network, self.clock, steps)
        cohort = cohort_size(config.participation, config.clients)
        self._quota = Quota.later(config, cohort).at_least(min(min_clients, config.clients))
        self._availability, self._option = Availability(), config.network

    def work_s(self, round: int, client: int) -> float:
        """Return the virtual seconds from the start of a client's newest exchange to the arrival of its answer. `round` is ignored."""
        return self.transport.answer_s[client]

    def gather(self) -> Sequence[int]:
        """Advance virtual time until enough clients are online. Return the clients from which a cohort may be drawn."""
        waited_s = 0.0
        while True:
            self._record_late_answers()
            absent = self.network.absences.absent_at(self.clock.time_s)
            online = [client for client in self.transport.clients() if not absent[client]]
            if (cohort := self._availability.cohort_of(online, self._quota, waited_s)) is not None:
                return cohort
            step_s = self._seconds_to_next_event(waited_s)
            if math.isinf(step_s):
                return online
            waited_s += step_s
            self.clock.wait(step_s)

    def on_round_end(self, result: RoundResult) -> None:
        """Record which clients missed the deadline of a round, and which clients answered."""
        self._availability.mark_silent(r.client for r in result.rejections if r.stage == DEADLINE)
        for accepted in result.accepted:
            self._availability.mark_responsive(accepted.client)

    def _record_late_answers(self) -> None:
        now_s = self.clock.time_s
        for client in [client for client, due_s in self.transport.late.items() if due_s <= now_s]:
            del self.transport.late[client]
            self._availability.mark_responsive(client)

    def _seconds_to_next_event(self, waited_s: float) -> float:
        """Return the seconds until a client leaves or returns, a late answer arrives, or the round has waited for `patience_s` seconds."""
        time_s, patience_s = self.clock.time_s, self._quota.patience_s
        next_change_s = self.network.absences.next_change_s(time_s)
        step_s = min([next_change_s, *self.transport.late.values()]) - time_s
        if patience_s is None or waited_s >= patience_s:
            return step_s
        return min(step_s, patience_s - waited_s)

    def take_changes(self) -> Changes:
        time_s, busy = self.clock.time_s, self.transport.busy
        responsive = self._availability.responsive
        state = {
            "network": self.network.profiles.fingerprint,
            "time_s": time_s,
            "busy": [[client, *work] for client, work in busy.items() if work[1] > time_s],
            "late": [*self.transport.late.items()],
            "silent": sorted(self._availability.silent),
            "usual": responsive if math.isfinite(responsive) else None,
        }
        return {}, {STATE: json.dumps(state).encode()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Continue from the state that `take_changes` returned.

        Raises RunFolderError if the state belongs to another network, and ValueError, KeyError or TypeError if the state is malformed.
        """
        state = json.loads(value(STATE) or b"")
        if state["network"] != self.network.profiles.fingerprint:
            raise RunFolderError(
                f"--network {self._option} differs from the network at the start of the run; restore that network, or give another --out"
            )
        self.clock.move_to(state["time_s"])
        self.clock.take()
        self.transport.busy = {client: (begins, ends) for client, begins, ends in state["busy"]}
        self.transport.late = dict(state["late"])
        self._availability.silent = set(state["silent"])
        responsive = state["usual"]
        self._availability.responsive = math.inf if responsive is None else responsive


def random_work_s(seed: int) -> Callable[[int, int], float]:
    """Return a function that draws the duration of a client's work from (round, client), for asynchronous runs without --network."""

    def duration_s(round: int, client: int) -> float:
        mean_s = seeds.generator(seed, "speed", 0, client).uniform(1.0, MAX_SLOWDOWN)
        swing = seeds.generator(seed, "pace", round, client)
        return mean_s * swing.uniform(1.0 - MAX_SWING, 1.0 + MAX_SWING)

    return duration_s


def step_counter(
    algorithm: ClientAlgorithm, sgd: LocalSGD, shards: Sequence[np.ndarray]
) -> Callable[[Assignment], int]:
    """Return a function that counts the local steps of an assignment.

    A client trains on its own data or, if the strategy assigns data partitions to it, on these partitions.
    """

    def steps(a: Assignment) -> int:
        if a.phase != algorithm.phases[0]:
            return 0
        round_sgd = sgd.for_round(1.0, a.steps, a.batch_size)
        sizes = [
            sum(len(shards[client]) for client in partition.clients)
            for partition in algorithm.partitions(a)
        ]
        return sum(
            round_sgd.epochs * -(-examples // round_sgd.batch_size) or round_sgd.steps
            for examples in sizes or [len(shards[a.client])]
        )

    return steps
