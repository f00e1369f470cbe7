"""The client process: keeps its clients connected to a server and has them answer the server's messages.

Connections are served in a thread of their own (transports/grpc/io_loop.py), so that they answer pings while clients train. Clients join
and train in the thread that calls `run`. The clients of one process share the data and a session, and train together. A client's state is
written before its report is sent. A client that cannot continue is reported, and the others continue.
"""

import asyncio
import math
import queue
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..callbacks import LogMessage
from ..clients.session import reason
from ..errors import FedcompError, UnreachableError, UserError
from ..formatting import named_clients
from ..keys.connection import contact, join_address
from ..keys.enrolment import Enrolment
from ..messages import UPDATE, Assignment, Farewell, Invitation, Presence, Report, failure
from ..strategies.sealed_client import unknown_keys
from ..transports.grpc import Credentials, GrpcConnection, IoTasks, Refused
from . import log_messages
from .handshake import STACK_BYTES
from .member import Member, handle

RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts to reach the server
SAVING = 16  # clients of one process whose states are written at the same time
CONNECTING = 64  # clients of one process that connect at the same time
TELL_S = 0.2  # longest time between two prints of the clients' messages
GATHER_S = 1.0  # in which equal messages of several clients are combined
REFUSAL_S = 5.0  # for the server to receive the reason why a client cannot take part
VECTORS = 16  # size of the largest message from a server, in float32 models
SPARE_BYTES = 64 << 20  # in addition to VECTORS models


@dataclass(frozen=True)
class Target:
    """The address of a server, and the enrolment with which a client connects; None: without TLS."""

    host: str
    port: int
    enrolment: Enrolment | None = None

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def credentials(self) -> Credentials | None:
        if self.enrolment is None:
            return None
        texts = self.enrolment.certificate, self.enrolment.private_key, self.enrolment.ca
        return Credentials(*(text.encode() for text in texts))

    def check(self) -> None:
        """Raise UnreachableError with the cause if the server cannot be reached."""
        contact(self.host, self.port, self.enrolment)


@dataclass
class Retries:
    """Attempts to reach a server since its last message."""

    attempts: int = 0
    lost_at_s: float | None = None  # monotonic time
    told: set[str] = field(default_factory=set)  # reasons that were reported

    def reset(self) -> None:
        self.attempts, self.lost_at_s, self.told = 0, None, set()

    def pause(
        self, error: UnreachableError, pauses_s: Sequence[float], patience_s: float | None
    ) -> tuple[float, LogMessage | None]:
        """Return how long to wait for the next attempt, and a message if the reason is new or the pauses become no longer.

        A client cannot tell a server that is away from a run that has ended. Raises `error` after `patience_s`.
        """
        now_s, last = time.monotonic(), len(pauses_s) - 1
        self.lost_at_s = self.lost_at_s or now_s
        left_s = self.lost_at_s + (math.inf if patience_s is None else patience_s) - now_s
        if left_s <= 0:
            raise error
        pause_s = pauses_s[min(self.attempts, last)]
        if self.attempts < last:
            again = f"trying again in {pause_s:g} s"
        else:
            end = "until it is stopped" if patience_s is None else f"for {patience_s:g} s in all"
            again = f"trying every {pause_s:g} s from now on, {end}: the server may be down, or the run over"
        said = LogMessage(
            f"{error}; {again}", "cut_off", reason=str(error), cause=error.cause, pause_s=pause_s
        )
        is_news = self.attempts == last or str(error) not in self.told
        self.told.add(str(error))
        self.attempts += 1
        varied_s = pause_s * random.uniform(0.5, 1.5)  # so that clients do not return all at once
        return min(left_s, varied_s), said if is_news else None


@dataclass
class Seat:
    """A client of the process."""

    target: Target
    member: Member
    retries: Retries = field(default_factory=Retries)
    over: bool = False  # its run has ended, and it does not stay for another
    error: FedcompError | None = None  # why it cannot go on

    @property
    def done(self) -> bool:
        return self.over or self.error is not None


@dataclass
class Request:
    """A message to a client, and its answer, which the thread of `ClientProcess.run` makes."""

    who: int
    seat: Seat
    message: Invitation | Assignment
    answer: Future[Any] = field(default_factory=Future)


class ClientProcess:
    """Clients by logical id. `say` is called with a message whenever something changes, in the thread that calls `run`.

    `patience_s`: how long a client tries to reach a server; None = for ever. `stay`: wait for the next run when one is over. `retry_s`:
    pauses between attempts; the last one is repeated. Equal messages of several clients are combined into one.
    """

    def __init__(
        self,
        seats: Mapping[int, Seat],
        say: Callable[[str], None],
        *,
        patience_s: float | None = None,
        stay: bool = False,
        retry_s: Sequence[float] = RETRY_S,
    ):
        self.seats = dict(seats)
        self.say = say
        self.patience_s = patience_s
        self.stay = stay
        self.retry_s = retry_s
        setup = next(iter(self.seats.values())).member.setup
        with setup.shared.turn:  # model() draws from torch's global generator
            self.numel = sum(parameter.numel() for parameter in setup.task.model().parameters())
        self.batch = max(1, STACK_BYTES // (4 * self.numel))
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[tuple[int, LogMessage, float]] = queue.SimpleQueue()
        # By text: the clients that said it, and until when others may join them (monotonic time).
        self._untold: dict[str, tuple[set[int], LogMessage, float]] = {}
        self._ended = False

    def end(self) -> None:
        """Have `run` return soon. May be called from another thread."""
        self._ended = True

    def run(self) -> None:
        """Serve until the run is over for every client. Raises UserError if a client cannot take part, or cannot reach a server in time."""
        with ThreadPoolExecutor(SAVING, "fedcomp-save") as savers, IoTasks() as io:
            gate = asyncio.Semaphore(CONNECTING)
            for who, seat in self.seats.items():
                io.start(self._attend(who, seat, gate))
            while not self._ended and not all(seat.done for seat in self.seats.values()):
                self._answer_requests(TELL_S, savers)
                self._tell(time.monotonic())
        self._tell(math.inf)
        failed = {who: seat.error for who, seat in self.seats.items() if seat.error is not None}
        if failed:
            first = next(iter(failed.values()))
            if self._alone:
                raise first
            many = f"{len(failed)} of {len(self.seats)} clients could not go on"
            raise type(first)(f"{many}: {named_clients(failed)}; {first}")

    @property
    def _alone(self) -> bool:
        return len(self.seats) == 1

    # In the thread of `run`.

    def _answer_requests(self, timeout_s: float, savers: ThreadPoolExecutor) -> None:
        """Answer the queued messages, at most `batch`. Wait up to `timeout_s` seconds for the first."""
        requests: list[Request] = []
        with suppress(queue.Empty):
            requests.append(self._requests.get(timeout=timeout_s))
            while len(requests) < self.batch:
                requests.append(self._requests.get_nowait())
        assigned = [request for request in requests if isinstance(request.message, Assignment)]
        for request in requests:
            if isinstance(request.message, Invitation):
                self._join(request)
        reports = handle([(request.seat.member, request.message) for request in assigned])
        saves = [savers.submit(request.seat.member.save) for request in assigned]
        for request, report, save in zip(assigned, reports, saves, strict=True):
            if error := save.exception():
                request.answer.set_exception(error)
                continue
            if report is not None:
                self._tell_answer(request, report)
            request.answer.set_result(report)

    def _join(self, request: Request) -> None:
        member = request.seat.member
        try:
            presence = member.join(request.message)
        except Exception as error:
            request.answer.set_exception(error)
        else:
            self._queue_message(request.who, log_messages.joined(presence, member.session))
            request.answer.set_result(presence)

    def _tell_answer(self, request: Request, report: Report) -> None:
        self._queue_message(request.who, log_messages.answered(request.message, report))
        state = request.seat.member.round_state
        if report.kind == UPDATE and (others := unknown_keys(request.message, state)):
            self._queue_message(request.who, log_messages.unknown(request.message, others))

    def _tell(self, now_s: float) -> None:
        """Pass the clients' messages to `say`. Combine equal messages of several clients."""
        with suppress(queue.Empty):
            while True:
                who, said, until_s = self._said.get_nowait()
                if self._alone:
                    self.say(said)
                else:
                    self._untold.setdefault(str(said), (set(), said, until_s))[0].add(who)
        for text, (clients, said, until_s) in [*self._untold.items()]:
            if until_s <= now_s:
                del self._untold[text]
                values = {name: value for name, value in said.values.items() if name != "client"}
                sentence = f"{named_clients(clients)}: {said}"
                self.say(LogMessage(sentence, said.event, **values | {"clients": sorted(clients)}))

    # In the I/O thread.

    async def _attend(self, who: int, seat: Seat, gate: asyncio.Semaphore) -> None:
        """Keep a client connected until it is done."""
        try:
            while not seat.done:
                try:
                    await self._serve(who, seat, gate)
                    if not seat.done:  # --stay: the server is about to exit
                        await asyncio.sleep(self.retry_s[-2])
                except UnreachableError as error:
                    if error.cause not in UnreachableError.transient:
                        raise
                    pause_s, said = seat.retries.pause(error, self.retry_s, self.patience_s)
                    if said:
                        self._queue_message(who, said, GATHER_S)
                    await asyncio.sleep(pause_s)
        except FedcompError as error:
            self._fail(who, seat, error)
        except Exception as error:
            self._fail(who, seat, FedcompError(reason(error)))

    async def _serve(self, who: int, seat: Seat, gate: asyncio.Semaphore) -> None:
        """Connect once, and answer the server's messages until the connection ends."""
        target, invited = seat.target, False
        connection = GrpcConnection(
            target.address,
            largest=VECTORS * 4 * self.numel + SPARE_BYTES,
            credentials=target.credentials,
            client=seat.member.who if target.enrolment is None else -1,
        )
        async with gate:
            try:
                await connection.__aenter__()
            except UnreachableError:
                await asyncio.to_thread(target.check)  # raises an error with the cause
                raise
        try:
            address = target.address
            async for message in connection.messages():
                if isinstance(message, Refused):
                    if message.again:
                        raise UnreachableError(message.sentence, "starting")
                    raise UserError(message.sentence)
                seat.retries.reset()
                if not invited:
                    connected = LogMessage(f"connected to {address}", "connected", server=address)
                    self._queue_message(who, connected)
                invited = True
                await self._answer(who, seat, connection, message)
                del message
            if not invited:
                raise UnreachableError(f"{address} ended the connection", "starting")
        finally:
            await connection.__aexit__(None, None, None)

    async def _answer(
        self,
        who: int,
        seat: Seat,
        connection: GrpcConnection,
        message: Invitation | Assignment | Farewell,
    ) -> None:
        if isinstance(message, Farewell):
            if message.run == seat.member.run:
                self._queue_message(who, log_messages.over(message, self.stay), GATHER_S)
                seat.over = not self.stay
            return
        request = Request(who, seat, message)
        self._requests.put(request)
        try:
            answer = await asyncio.wrap_future(request.answer)
        except FedcompError as error:
            if isinstance(message, Assignment):
                await connection.send(failure(message, "encode", str(error)))
            else:
                refusal = Presence(message.run, seat.member.who, "", str(error))
                with suppress(UnreachableError, TimeoutError):
                    await connection.send(refusal)
                    async with asyncio.timeout(REFUSAL_S):
                        async for _ in connection.messages():
                            pass
            raise UserError(str(error)) from error
        if answer is not None:
            await connection.send(answer)

    def _queue_message(self, who: int, said: LogMessage, gather_s: float = 0.0) -> None:
        """Have a message printed, with equal messages of other clients within `gather_s` seconds."""
        self._said.put((who, said, time.monotonic() + gather_s))

    def _fail(self, who: int, seat: Seat, error: FedcompError) -> None:
        seat.error = error
        if not self._alone:
            gather_s = GATHER_S if isinstance(error, UnreachableError) else 0.0
            self._queue_message(
                who, LogMessage(f"ended: {error}", "failed", reason=str(error)), gather_s
            )
