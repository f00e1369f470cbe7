"""A Grid whose replies come when a virtual network brings them.

Clients compute when they are asked, together, and what they answer is held until its moment: a pull goes on to the next moment at which
something comes, or to where the exchange's time is over. Who is asked while it is at work on an older question begins when that is done,
and of two that wait for it it begins the newer one, as clients of a deployment do; but here it has trained for both. Who is cut off before
its answer has come is gone GRACE_S later; who says nothing is waited for until the deadline, and where there is none, until all others
have answered.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..clients.flower import Run, from_records, readdress
from ..deployment.superlink_grid import GONE, GRACE_S
from ..messages import FAILED, NEED_DENSE, UPDATE, Assignment, Report
from .clock import VirtualClock
from .network import Network

PAUSE_S = 0.01  # between looks at a Grid whose clients are still computing
SILENT = "reply"  # the stage of a virtual client that says nothing
TRAINED = "train", "encode"  # stages at which clients fail that have trained, or tried to


@dataclass(frozen=True)
class Question:
    """A message on its way."""

    message: Message
    client: int
    round: int
    bytes_down: int
    steps: int  # of local SGD


@dataclass(frozen=True, order=True)
class Answer:
    """A reply on its way; of several that come at once, that of the lowest client is the first."""

    due_s: float  # of the exchange
    client: int
    name: str  # of the message that it replies to
    reply: Message = field(compare=False)
    began_s: float = field(compare=False)  # when the exchange began, in seconds of the run
    again: bool = field(compare=False, default=False)  # it needs the dense model


class TimedGrid(Grid):
    """A Grid around another one. `steps`: local steps that an assignment takes of the client that does it."""

    def __init__(
        self, grid: Grid, network: Network, clock: VirtualClock, steps: Callable[[Assignment], int]
    ):
        self.grid, self.network, self.clock, self.steps = grid, network, clock, steps
        self.busy: dict[
            int, tuple[float, float]
        ] = {}  # when clients begin, and are done with, the newest question; seconds of the run
        self.late: dict[
            int, float
        ] = {}  # when answers come that nobody waits for, in seconds of the run
        self.took: dict[int, float] = {}  # seconds from question to answer, of the newest exchange
        self._coming: list[Answer] = []  # a heap

    def set_run(self, run: Run) -> None:
        self.grid.set_run(run)

    @property
    def run(self) -> Run:
        return self.grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def content_of(self, message: Assignment | Report) -> RecordDict:
        return self.grid.content_of(message)

    def get_node_ids(self) -> list[int]:
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send, and let the clients compute."""
        messages = list(messages)
        names = self.grid.push_messages(messages)
        asked = {
            name: self._question(message)
            for name, message in zip(names, messages, strict=True)
            if name
        }
        questions, answers = dict(asked), []
        while asked:
            replies = list(self.grid.pull_messages(list(asked)))
            for reply in replies:
                name = reply.metadata.reply_to_message_id
                answers.append(self._answer(name, asked.pop(name), reply))
            if not replies:
                time.sleep(PAUSE_S)
        for answer in self._reaching(answers, questions):
            heapq.heappush(self._coming, answer)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Go on to where as many answers have come as are expected, or the exchange's time is over. What is not asked for comes late.

        Who needs the dense model is heard of at once, since it is asked again.
        """
        self.leave_behind(set(message_ids))
        if not self._coming:
            return []
        clock, ready = self.clock, []
        limit_s = math.inf if clock.limit_s is None else clock.limit_s
        while self._coming and self._coming[0].due_s <= limit_s and len(ready) < clock.expected:
            ready.append(answer := heapq.heappop(self._coming))
            if answer.due_s < math.inf:
                clock.go_to(answer.due_s)
            self.took[answer.client] = clock.now()
            if answer.again:
                break
        if not ready:
            clock.go_to(limit_s)
        clock.due_s = {answer.name: self.took[answer.client] for answer in ready}
        return [answer.reply for answer in ready]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        self.clock.begin(timeout)
        names = self.push_messages(messages)
        while replies := self.pull_messages(names):
            yield from replies

    def leave_behind(self, wanted: Collection[str] = ()) -> None:
        """Nobody waits any more for answers but these."""
        if all(answer.name in wanted for answer in self._coming):
            return
        self.late |= {
            a.client: a.began_s + a.due_s
            for a in self._coming
            if a.name not in wanted and a.due_s < math.inf
        }
        self._coming = [answer for answer in self._coming if answer.name in wanted]
        heapq.heapify(self._coming)

    def rest(self) -> None:
        """Forget what is over."""
        now_s = self.clock.time_s
        self.busy = {
            client: (begins, ends) for client, (begins, ends) in self.busy.items() if ends > now_s
        }

    def _question(self, message: Message) -> Question:
        a = from_records(message.content, Assignment)
        size = sum(map(len, a.frames)) + sum(map(len, a.announced)) + len(a.returned)
        return Question(message, a.client, a.round, size, self.steps(a))

    def _answer(self, name: str, question: Question, reply: Message) -> Answer:
        client = question.client
        began_s = self.clock.time_s - self.clock.now()
        asked_s = self.clock.now()
        report = None if reply.has_error() else from_records(reply.content, Report)
        if report is not None and (report.kind, report.stage) == (FAILED, SILENT):
            return Answer(math.inf, client, name, reply, began_s)
        steps = (
            question.steps
            if report is None or report.kind == UPDATE or report.stage in TRAINED
            else 0
        )
        bytes_up = len(report.frame) if report is not None else 0
        begins_s = self._begins(client, began_s, asked_s)
        due_s = begins_s + self.network.seconds(
            client, question.round, question.bytes_down, steps, bytes_up
        )
        self.busy[client] = began_s + begins_s, began_s + due_s
        return Answer(
            due_s,
            client,
            name,
            reply,
            began_s,
            again=report is not None and report.kind == NEED_DENSE,
        )

    def _reaching(
        self, answers: Sequence[Answer], questions: Mapping[str, Question]
    ) -> list[Answer]:
        """What becomes of answers, given who is cut off before its own has come."""
        absences, asked_s, found = self.network.absences, self.clock.time_s, list(answers)
        if not absences.any or not found:
            return found
        until_s = np.array([a.began_s + a.due_s if a.due_s < math.inf else asked_s for a in found])
        for i in np.flatnonzero(
            absences.leaving(np.array([a.client for a in found]), asked_s, until_s)
        ):
            client, name, began_s = found[i].client, found[i].name, found[i].began_s
            gone_s = absences.gone(client, asked_s, float(until_s[i]), GRACE_S)
            if gone_s is not None:
                self.busy[client] = min(self.busy.get(client, (asked_s, 0.0))[0], gone_s), gone_s
                reply = readdress(Message(GONE, reply_to=questions[name].message), name)
                found[i] = Answer(gone_s - began_s, client, name, reply, began_s)
        return found

    def _begins(self, client: int, began_s: float, asked_s: float) -> float:
        """When a client that is asked now begins, in seconds of the exchange."""
        begins, ends = self.busy.get(client, (0.0, 0.0))
        free_s = (ends if begins <= began_s + asked_s else begins) - began_s
        return max(asked_s, free_s)
