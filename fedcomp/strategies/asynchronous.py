"""Updates as they come: the server waits for nobody.

Yu, Wu, Huang: Double quantization for communication-efficient distributed optimization. NeurIPS 2019 (AsyLPG): workers send low-precision
gradients, made from a low-precision copy of a model that has moved on by the time they arrive. Xie, Koyejo, Gupta: Asynchronous federated
optimization. 2019: what is s rounds old counts (1 + s)^−a. Nguyen et al.: Federated learning with buffered asynchronous aggregation.
AISTATS 2022: the model moves when K updates have come.

    θ ← θ + C'(η/K · Σ_i (1 + s_i)^−a C(x_i)),  i the K clients whose updates came first; then K others begin, from the new θ

Low precision both ways is the codecs' part: the uplink's with the clients' memory, and C', the downlink's, with the server's. Unlike AsyLPG
there is no variance reduction, and its bound on delays is kept by giving up who is later. A round is a step of the model; its cohort are
those who answered or were given up, its downlink what those got who began. Where time is virtual (`pace`), clients answer in its order,
and those that are at work stand in the checkpoint; elsewhere they answer when they do, and a server that starts anew has nobody at work.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from torch import Tensor

from ..errors import ConfigError, FrameError, ProtocolError, SpecError
from ..memories.base import Changes
from ..messages import Report
from ..observe import Rejection
from . import exchange as exchanges
from .average import Average
from .base import Outcome, Phase
from .closing import DEADLINE, AllAnswered
from .cohort import draw, size
from .exchange import Accepted, Exchange, Traffic, accepted_of

CLOCK, AT_WORK = "clock", "at-work"  # in a checkpoint


@dataclass(frozen=True)
class Options:
    wait: float = 0.25  # share of the clients at work whose answers make a round, at least one
    staleness: int = 16  # rounds that an update may be late; who is later is given up
    decay: float = 0.5  # a: an update that is s rounds late counts (1 + s)^-a; 0 = like any other

    def __post_init__(self) -> None:
        for name, low, high in (("wait", 0, 1), ("staleness", 0, 10**9), ("decay", 0, 1000)):
            if not low <= (value := getattr(self, name)) <= high:
                raise SpecError(f"{name} is {value:g}; give {low} to {high:g}")


@dataclass(frozen=True)
class Answer:
    """What a client has answered, and when."""

    round: int  # in which it began
    due: float  # seconds
    report: Report | None  # None: there was none that could be read
    result: Accepted | Rejection

    @property
    def client(self) -> int:
        return self.result.client


class Asynchronous(Average):
    """The discounted mean of the updates that come first."""

    name: ClassVar[str] = "asynchronous"
    Options: ClassVar[type] = Options

    def __init__(self, *rules: Any, **told: Any):
        super().__init__(*rules, **told)
        if self.rules.quorum != 1:
            raise ConfigError(
                f"strategy '{self.name}' makes a round of the first answers that come; leave --quorum out, or give "
                f"--strategy {self.name}:wait={self.rules.quorum:g}"
            )
        self.now = 0.0  # virtual seconds
        self.began: dict[int, int] = {}  # client at work → the round in which it began
        self.answers: dict[int, Answer] = {}  # of clients at work, that have not been taken
        self.changed: set[int] = (
            set()
        )  # clients whose answers came or were taken since the last checkpoint
        self._exchanges: dict[int, Exchange] = {}  # by the round in which it began: answers to come
        self._reports: dict[int, Report] = {}  # that came and are in no answer yet
        self._lateness: dict[int, int] = {}  # rounds, of those whose answers were taken last
        self._seconds: dict[
            int, float
        ] = {}  # from question to answer, of answers that have not been taken

    def run_round(self, grid: Grid, round: int) -> Outcome:
        started, traffic, late = (
            time.perf_counter(),
            Traffic(seconds=self._seconds),
            self._too_late(round),
        )
        unread = {client: self.answers[client] for client in late if client in self.answers}
        rejected = {client: self._give_up(client, round) for client in late}
        self._begin(grid, round, traffic, besides=rejected.keys())
        taken = self._first(round, started)
        traffic.uplink = {
            client: len(answer.report.frame) if answer.report else 0
            for client, answer in (unread | taken).items()
        }
        self._lateness = {client: round - answer.round for client, answer in taken.items()}
        traffic.lateness = {client: rounds for client, rounds in self._lateness.items() if rounds}
        traffic.seconds = {
            client: self._seconds.pop(client)
            for client in [*taken, *late]
            if client in self._seconds
        }
        for client in taken:
            self._leave(client)
        self.clock.move_to(self.now)
        results = [taken[client].result for client in sorted(taken)]
        rejected |= {result.client: result for result in results if isinstance(result, Rejection)}
        accepted = [result for result in results if isinstance(result, Accepted)]
        return self._close(
            round, sorted(taken.keys() | rejected.keys()), {"train": accepted}, rejected, traffic
        )

    def discount(self, accepted: Accepted) -> float:
        return (1.0 + self._lateness.get(accepted.client, 0)) ** -self.options.decay

    def expected(self, clients: Sequence[int], round: int) -> list[int]:
        return []  # a matter of who is free then

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise ConfigError(
            "strategy 'asynchronous' waits for nobody, and this hook for everybody; call start() or rounds()"
        )

    # Who is at work.

    def _begin(self, grid: Grid, round: int, traffic: Traffic, besides: Collection[int]) -> None:
        """Give work to as many as there is room for, drawn from those who have none, `besides` whom."""
        nodes = self.roster(grid)
        self.now = max(self.now, self.clock.time_s)  # it may have waited for clients
        free = nodes.keys() - self.began.keys() - set(besides)
        room = max(0, size(self.rules.participation, len(nodes)) - len(self.began))
        begin = draw([*free], min(room, len(free)), self.rules.seed, round)
        exchange = self._exchanges[round] = self._exchange(grid, round, Phase(), traffic)
        exchange.heard, exchange.on_answer = self._keep, lambda answered, asked: None
        terms = self.schedule.terms(round, begin, self.bandwidths)
        messages = [
            self._message(exchange, client, nodes[client], round, Phase(), {}, terms[client])
            for client in begin
        ]
        self.began |= dict.fromkeys(begin, round)
        for earlier in self._exchanges.values():
            earlier.traffic = traffic  # of what a client still needs
        if self.pace is None:
            exchange.push(messages)
        else:
            exchange.run(messages, AllAnswered())

    def _first(self, round: int, started: float) -> dict[int, Answer]:
        """The answers that make a round."""
        wanted, told = (
            min(len(self.began), max(1, math.floor(self.options.wait * len(self.began) + 0.5))),
            0,
        )
        self._collect()
        while True:
            news = self._poll()
            self._collect()
            for count in range(told + 1, min(wanted, len(self.answers)) + 1):
                self.on_answer(round, count, wanted)
            told = min(wanted, len(self.answers))
            over = (
                self.rules.timeout_s is not None
                and time.perf_counter() - started > self.rules.timeout_s
            )
            if told == wanted or not self._exchanges or over:
                break
            if not news:
                time.sleep(exchanges.POLL_S)
        first = sorted(self.answers.values(), key=lambda answer: (answer.due, answer.client))[
            :wanted
        ]
        limit = (
            self.now + self.rules.timeout_s
            if self.pace and self.rules.timeout_s is not None
            else math.inf
        )
        if any(answer.due > limit for answer in first):
            first, self.now = [answer for answer in first if answer.due <= limit], limit
        self.now = max([self.now, *(answer.due for answer in first)])
        return {answer.client: answer for answer in first}

    def _poll(self) -> bool:
        """Take in the replies that are there, to whatever question, if any: asked for together, since what nobody asks for is given up."""
        waiting = list(self._exchanges.values())
        replies = (
            list(
                waiting[0].grid.pull_messages(
                    [name for exchange in waiting for name in exchange.names]
                )
            )
            if waiting
            else []
        )
        for exchange in waiting:
            exchange.receive(replies)
        return bool(replies)

    def _keep(self, report: Report) -> None:
        self._reports[report.client] = report

    def _collect(self) -> None:
        """Note what has come."""
        for began, exchange in list(self._exchanges.items()):
            for client, result in exchange.take().items():
                due = self.now + self.pace(began, client) if self.pace else time.monotonic()
                self.answers[client] = Answer(began, due, self._reports.pop(client, None), result)
                self.changed.add(client)
            if not exchange.waiting:
                del self._exchanges[began]

    def _too_late(self, round: int) -> list[int]:
        return [
            client for client, began in self.began.items() if round - began > self.options.staleness
        ]

    def _give_up(self, client: int, round: int) -> Rejection:
        reason = f"no answer in the {round - self.began[client]} rounds since it began"
        if client not in self.answers:
            self._exchanges[self.began[client]].give_up(client, reason, DEADLINE)
            self._collect()
        self._leave(client)
        return Rejection(client, DEADLINE, reason)

    def _leave(self, client: int) -> None:
        """A client has no work any more; hear where it stands."""
        del self.began[client]
        answer = self.answers.pop(client)
        self.changed.add(client)
        if answer.report is not None:
            self._hear(answer.report)

    # Checkpoints.

    def take_changes(self) -> Changes:
        values: dict[str, bytes | None] = {
            CLOCK: json.dumps([self.now, sorted(self.answers)]).encode()
        }
        for client in self.changed:
            values[f"{AT_WORK}/{client}"] = (
                _pack(self.answers[client]) if client in self.answers else None
            )
        self.changed.clear()
        return {}, values

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        self.now, clients = json.loads(value(CLOCK) or b"[0.0, []]")
        self.answers = {
            client: self._unpack(value(f"{AT_WORK}/{client}") or b"") for client in clients
        }
        self.began = {client: answer.round for client, answer in self.answers.items()}
        self._exchanges, self._reports = {}, {}
        self.changed.clear()

    def _unpack(self, data: bytes) -> Answer:
        """Raises ValueError or TypeError for what `_pack` did not make."""
        head, _, packed = data.partition(b"\n")
        began, due, rejection = json.loads(head)
        try:
            report = Report.unpack(packed) if packed else None
        except ProtocolError as error:
            raise ValueError from error
        if rejection is not None:
            return Answer(began, due, report, Rejection(*rejection))
        (update,) = self.open(Phase(), [report.frame]) if report.frame else [None]
        if isinstance(update, FrameError):
            raise ValueError from update
        return Answer(began, due, report, accepted_of(report, update))


def _pack(answer: Answer) -> bytes:
    refused = dataclasses.astuple(answer.result) if isinstance(answer.result, Rejection) else None
    head = json.dumps([answer.round, answer.due, refused]).encode()
    return head + b"\n" + (answer.report.pack() if answer.report else b"")
