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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..callbacks import Said
from ..clients.session import reason
from ..errors import CheckpointError, FedcompError, UnreachableError, UserError
from ..formatting import named_clients
from ..keys.connection import check_server
from ..keys.enrolment import Enrolment
from ..messages import UPDATE, Assignment, Farewell, Invitation, Presence, Report, failure
from ..strategies.sealed_election import unknown_keys
from ..transports.grpc import Credentials, GrpcConnection, IoTasks, Refused
from . import log_messages
from .handshake import STACK_BYTES
from .member import Member, handle

RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts to reach the server
SAVING = 16  # clients of one process whose states are written at the same time
CONNECTING = 64  # clients of one process that connect at the same time
TELL_S = 0.2  # longest time between two prints of the clients' messages
GATHER_S = 1.0  # in which equal messages of several clients are collected into one
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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def credentials(self) -> Credentials | None:
        if self.enrolment is None:
            return None
        ca, certificate, key = self.enrolment.credentials()
        return Credentials(certificate, key, ca)

    def check(self) -> None:
        """Raise UnreachableError with the cause if the server cannot be reached."""
        check_server(self.host, self.port, self.enrolment)


@dataclass
class Retries:
    """Attempts to reach a server since its last message."""

    attempts: int = 0
    lost_at_s: float | None = None  # monotonic time
    told: set[str] = field(default_factory=set)  # reasons that were reported, each of them once

    def reset(self) -> None:
        self.attempts, self.lost_at_s, self.told = 0, None, set()


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
    answer: "Future[Any]" = field(default_factory=Future)

    def do(self, make: "Callable[[Request], Any]") -> None:
        try:
            answer = make(self)
        except Exception as error:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(answer)


class ClientProcess:
    """Clients by logical id. `say` is called with a message whenever something changes, in the thread that calls `run`.

    `patience_s`: how long a client tries to reach a server; None = for ever. `stay`: wait for the next run when one is over. `retry_s`:
    pauses between attempts; the last one is repeated. With several clients the pauses are randomised, so that the clients do not
    reconnect all at once.
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
        own = next(iter(self.seats.values())).member.own
        self.numel = sum(parameter.numel() for parameter in own.task.model().parameters())
        self.batch = max(1, STACK_BYTES // (4 * self.numel))
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._saves: set[Future[None]] = set()
        self._said: queue.SimpleQueue[tuple[Collection[int], str]] = queue.SimpleQueue()
        self._gathered: dict[str, tuple[set[int], str]] = {}
        self._ended = False

    def end(self) -> None:
        """Have `run` return soon. May be called from another thread."""
        self._ended = True

    def run(self) -> None:
        """Serve until the run is over for every client. Raises UserError if a client cannot take part, or cannot reach a server in time."""
        with ThreadPoolExecutor(SAVING, "fedcomp-save") as self._savers, IoTasks() as io:
            gate = asyncio.Semaphore(CONNECTING)
            for who, seat in self.seats.items():
                io.start(self._attend(who, seat, gate))
            while not self._ended and not all(seat.done for seat in self.seats.values()):
                self._answer_requests(TELL_S)
                self._tell()
        for what in [*self._gathered]:
            self._queue_gathered(what)
        self._tell()
        failed = {who: seat.error for who, seat in self.seats.items() if seat.error is not None}
        if failed:
            raise self._summed_up(failed)

    # In the thread of `run`.

    def _answer_requests(self, timeout_s: float) -> None:
        """Answer the queued messages, at most `batch`. Wait up to `timeout_s` seconds for the first."""
        try:
            requests = []
            requests.append(self._requests.get(timeout=timeout_s))
            while len(requests) < self.batch:
                requests.append(self._requests.get_nowait())
        except queue.Empty:
            pass
        assigned: list[Request] = []
        for request in requests:
            if isinstance(request.message, Assignment):
                assigned.append(request)
            else:
                request.do(self._join)
        if assigned:
            wait(list(self._saves))  # a save reads the state that training changes
            reports = handle([(request.seat.member, request.message) for request in assigned])
            for request, report in zip(assigned, reports, strict=True):
                request.do(lambda request, report=report: self._answered(request, report))

    def _tell(self) -> None:
        """Pass the clients' messages to `say`. Combine equal messages of several clients."""
        by_sentence: dict[str, tuple[set[int], str]] = {}
        with suppress(queue.Empty):
            while True:
                clients, sentence = self._said.get_nowait()
                if self._alone:
                    self.say(sentence)
                else:
                    by_sentence.setdefault(str(sentence), (set(), sentence))[0].update(clients)
        for clients, sentence in by_sentence.values():
            values = dict(getattr(sentence, "values", {})) | {"clients": sorted(clients)}
            values.pop("client", None)
            event = getattr(sentence, "event", "said")
            self.say(Said(f"{named_clients(clients)}: {sentence}", event, **values))

    @property
    def _alone(self) -> bool:
        return len(self.seats) == 1

    def _summed_up(self, failed: Mapping[int, FedcompError]) -> FedcompError:
        first = next(iter(failed.values()))
        if self._alone:
            return first
        some = (
            f"{len(failed)} of {len(self.seats)} clients could not go on: {named_clients(failed)}"
        )
        return type(first)(f"{some}; {first}")

    def _join(self, request: "Request") -> Presence:
        presence = request.seat.member.join(request.message)
        self._queue_message(
            [request.who], log_messages.joined(presence, request.seat.member.session)
        )
        return presence

    def _answered(self, request: "Request", report: Report | None) -> Report | None:
        if report is not None:
            self._queue_message([request.who], log_messages.answered(request.message, report))
            state = request.seat.member.round_state
            if report.kind == UPDATE and (others := unknown_keys(request.message, state)):
                self._queue_message([request.who], log_messages.unknown(request.message, others))
        return report

    # In the I/O thread.

    async def _attend(self, who: int, seat: Seat, gate: asyncio.Semaphore) -> None:
        """Keep a client connected until it is done."""
        try:
            await self._stay_connected(who, seat, gate)
        except asyncio.CancelledError:
            raise
        except FedcompError as error:
            self._fail(who, seat, error)
        except Exception as error:
            self._fail(who, seat, FedcompError(reason(error)))

    async def _stay_connected(self, who: int, seat: Seat, gate: asyncio.Semaphore) -> None:
        while not seat.done:
            try:
                await self._serve(who, seat, gate)
                if not seat.done:  # --stay: the server is about to exit
                    await asyncio.sleep(self.retry_s[-2])
            except UnreachableError as error:
                if error.cause not in UnreachableError.passing:
                    raise
                await self._wait_for_server(who, seat, error)

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
                    connected = Said(f"connected to {address}", "connected", server=address)
                    self._queue_message([who], connected)
                invited = True
                await self._answer(who, seat, connection, message)
                del message
            if not invited:
                raise UnreachableError(f"{address} ended the connection", "starting")
        finally:
            await connection.__aexit__(None, None, None)

    async def _wait_for_server(self, who: int, seat: Seat, error: UnreachableError) -> None:
        """Report why the server cannot be reached, and wait before the next attempt. Raises the error after `patience_s`."""
        retries, now_s = seat.retries, time.monotonic()
        retries.lost_at_s = retries.lost_at_s or now_s
        patience_s = math.inf if self.patience_s is None else self.patience_s
        left_s = retries.lost_at_s + patience_s - now_s
        if left_s <= 0:
            raise error
        pause_s = self.retry_s[min(retries.attempts, len(self.retry_s) - 1)]
        sentence = f"{error}; {self._trying(retries.attempts, pause_s)}"
        lost = Said(sentence, "cut_off", reason=str(error), cause=error.cause, pause_s=pause_s)
        self._tell_lost(who, retries, error, lost)
        retries.attempts += 1
        varied_s = pause_s if self._alone else pause_s * random.uniform(0.5, 1.5)
        await asyncio.sleep(min(left_s, varied_s))

    def _tell_lost(self, who: int, retries: Retries, error: UnreachableError, lost: Said) -> None:
        """Report that the server cannot be reached. Several clients report it once together, and once that they keep trying."""
        last = len(self.retry_s) - 1
        if self._alone:
            if retries.attempts <= last or str(error) not in retries.told:
                self._queue_message([who], lost)
            retries.told.add(str(error))
        elif retries.attempts == 0:
            self._gather(f"lost: {error.cause}", who, lost)
        elif retries.attempts >= last and error.cause not in retries.told:
            away = {
                client: seat.retries
                for client, seat in self.seats.items()
                if seat.retries.lost_at_s is not None and not seat.done
            }
            self._queue_message([one for one in away if error.cause not in away[one].told], lost)
            for other in away.values():
                other.told.add(error.cause)

    async def _answer(
        self,
        who: int,
        seat: Seat,
        connection: GrpcConnection,
        message: Invitation | Assignment | Farewell,
    ) -> None:
        if isinstance(message, Invitation):
            try:
                presence = await self._in_run_thread(who, seat, message)
            except FedcompError as error:
                refusal = Presence(message.run, seat.member.who, "", str(error))
                with suppress(UnreachableError, TimeoutError):
                    await connection.send(refusal)
                    async with asyncio.timeout(REFUSAL_S):
                        async for _ in connection.messages():
                            pass
                raise UserError(str(error)) from error
            await connection.send(presence)
        elif isinstance(message, Assignment):
            try:
                report = await self._in_run_thread(who, seat, message)
                await self._save(seat)
            except CheckpointError as error:
                await connection.send(failure(message, "encode", str(error)))
                raise UserError(str(error)) from error
            if report is not None:
                await connection.send(report)
        elif message.run == seat.member.run:
            self._gather("over", who, log_messages.over(message, self.stay))
            seat.over = not self.stay

    async def _in_run_thread(self, who: int, seat: Seat, message: Invitation | Assignment) -> Any:
        """Return the answer to a message. The thread of `run` makes it."""
        request = Request(who, seat, message)
        self._requests.put(request)
        return await asyncio.wrap_future(request.answer)

    async def _save(self, seat: Seat) -> None:
        """Write a client's state in another thread. Raises CheckpointError."""
        save = self._savers.submit(seat.member.save)
        self._saves.add(save)
        save.add_done_callback(self._saves.discard)
        await asyncio.wrap_future(save)

    def _trying(self, attempt: int, pause_s: float) -> str:
        """Return when the next attempt follows. A client cannot tell a server that is away from a run that has ended."""
        if attempt < len(self.retry_s) - 1:
            return f"trying again in {pause_s:g} s"
        end = (
            "until it is stopped"
            if self.patience_s is None
            else f"for {self.patience_s:g} s in all"
        )
        return f"trying every {pause_s:g} s from now on, {end}: the server may be down, or the run over"

    def _queue_message(self, clients: Collection[int], sentence: str) -> None:
        self._said.put((clients, sentence))

    def _gather(self, what: str, who: int, sentence: str) -> None:
        """Report once for all clients with the same `what` within GATHER_S. The sentence of the first client is used."""
        if self._alone:
            self._queue_message([who], sentence)
        elif what in self._gathered:
            self._gathered[what][0].add(who)
        else:
            self._gathered[what] = {who}, sentence
            asyncio.get_running_loop().call_later(GATHER_S, self._queue_gathered, what)

    def _queue_gathered(self, what: str) -> None:
        if (gathered := self._gathered.pop(what, None)) is not None:
            self._queue_message(*gathered)

    def _fail(self, who: int, seat: Seat, error: FedcompError) -> None:
        seat.error = error
        if self._alone:
            return
        ended = Said(f"ended: {error}", "failed", reason=str(error))
        if isinstance(error, UnreachableError):
            self._gather(f"ended: {error.cause}", who, ended)
        else:
            self._queue_message([who], ended)
