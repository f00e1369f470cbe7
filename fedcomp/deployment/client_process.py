"""The process of `fedcomp client`, which keeps one or more clients connected to a server and answers the server's messages.

Clients join and train in the thread that calls `run`. Another thread (transports/grpc/io_loop.py) serves the connections, so that the
server's pings are answered while clients train. The clients of one process share the data. They also share a session (the model and the
clients' states) and train together, unless the strategy uses sealed ballots (encrypted votes). If a client fails, its error is logged, and
the other clients of the process continue.
"""

import asyncio
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ..callbacks import LogMessage
from ..clients.session import failure_reason
from ..errors import FedcompError, UnreachableError, UserError
from ..formatting import named_clients
from ..keys.connection import contact, join_address
from ..keys.enrolment import Enrolment
from ..messages import UPDATE, Assignment, Farewell, Invitation, Presence, Report, failure
from ..strategies.sealed_election import unknown_keys
from ..transports.grpc import Credentials, GrpcConnection, Refused, io_tasks
from . import log_messages
from .deployed_client import DeployedClient, handle
from .handshake import STACK_BYTES

RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)  # pauses between attempts to reach the server; the last repeats
MAX_SAVES = 16  # number of threads that write client states to disk
MAX_CONNECTS = 64  # largest number of clients that connect at the same time
LOG_INTERVAL_S = 0.2  # while no client trains: longest time between two prints of log messages
COMBINE_S = 1.0  # how long a log message waits for equal messages of other clients, to be combined with them
REFUSAL_S = 5.0  # time limit to send the server the reason why a client cannot take part
# The size limit of a message from the server is MAX_MODELS times the model's size in float32, plus SPARE_BYTES.
MAX_MODELS, SPARE_BYTES = 16, 64 << 20
JITTER = random.Random()  # generator of random pauses, independent of the seed of the run


@dataclass(frozen=True)
class Target:
    """The address of a server, and the enrolment (key and certificate) with which a client or relay connects to it.

    If `enrolment` is None, the connection has no TLS.
    """

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
        e = self.enrolment
        return Credentials(e.certificate.encode(), e.private_key.encode(), e.ca.encode())

    def check(self) -> None:
        """Connect to the server and disconnect again. Raises UnreachableError with the cause if the server cannot be reached."""
        contact(self.host, self.port, self.enrolment)


@dataclass
class Retries:
    """The failed attempts to reach a server since the server's last message."""

    attempts: int = 0
    lost_at_s: float | None = None  # time.monotonic() of the first failed attempt
    reported: set[str] = field(default_factory=set)  # reasons that were already logged

    def pause(
        self, error: UnreachableError, pauses_s: Sequence[float], patience_s: float | None
    ) -> tuple[float, LogMessage | None]:
        """Return the pause before the next attempt in seconds, and a log message about `error`, or None if it was already logged.

        `pauses_s`: the pauses between attempts, of which the last repeats. Raises `error` if further attempts cannot help, or if
        `patience_s` seconds (None: no limit) have passed since the first failed attempt. The time limit is needed because a client cannot
        distinguish a server that is down for a while from a run that is over.
        """
        now_s, last = time.monotonic(), len(pauses_s) - 1
        self.lost_at_s = self.lost_at_s or now_s
        remaining_s = self.lost_at_s + (math.inf if patience_s is None else patience_s) - now_s
        if error.cause not in UnreachableError.transient or remaining_s <= 0:
            raise error
        pause_s = pauses_s[min(self.attempts, last)]
        if self.attempts < last:
            retry = f"trying again in {pause_s:g} s"
        else:
            end = "without a time limit" if patience_s is None else f"for {patience_s:g} s in all"
            retry = f"trying every {pause_s:g} s from now on, {end} (the server may be down, or the run may be over)"
        entry = LogMessage(
            f"{error}; {retry}", "cut_off", reason=str(error), cause=error.cause, pause_s=pause_s
        )
        is_new = self.attempts == last or str(error) not in self.reported
        self.reported.add(str(error))
        self.attempts += 1
        # A random pause, so that clients do not reconnect all at once.
        varied_s = pause_s * JITTER.uniform(0.5, 1.5)
        return min(remaining_s, varied_s), entry if is_new else None


@dataclass
class HostedClient:
    """A client of the process, with the server to which it connects and its failed attempts to connect."""

    target: Target
    client: DeployedClient
    id: int = -1  # logical id, set by `ClientProcess`
    retries: Retries = field(default_factory=Retries)
    over: bool = False  # whether the run is over and the client does not wait for another run
    error: FedcompError | None = None  # the error that ended the client

    @property
    def done(self) -> bool:
        return self.over or self.error is not None


@dataclass
class Request:
    """A message from the server to a client. `answer` is set in the thread that calls `ClientProcess.run`."""

    hosted: HostedClient
    message: Invitation | Assignment
    answer: Future[Any] = field(default_factory=Future)


def _save(client: DeployedClient) -> Exception | None:
    """Save the state of a client, and return the error if this fails."""
    try:
        client.save()
    except Exception as error:
        return error
    return None


class ClientProcess:
    """A process with one or more clients.

    `clients`: the clients by logical id. `log_message` is called with each log message, in the thread that calls `run`; equal messages of
    several clients are combined. `patience_s`: for how many seconds a client tries to reach a server, or None for no limit. `stay`: whether
    to wait for the next run when a run is over. `retry_s`: pauses between attempts to connect, in seconds; the last pause is repeated.
    """

    def __init__(
        self,
        clients: Mapping[int, HostedClient],
        log_message: Callable[[str], None],
        *,
        patience_s: float | None = None,
        stay: bool = False,
        retry_s: Sequence[float] = RETRY_S,
    ):
        self.clients = {id: replace(hosted, id=id) for id, hosted in clients.items()}
        self.log_message = log_message
        self.patience_s = patience_s
        self.stay = stay
        self.retry_s = retry_s
        setup = next(iter(self.clients.values())).client.setup
        # The lock keeps other threads from using torch's random generator while `model()` draws the initial weights.
        with setup.shared.lock:
            self.numel = sum(parameter.numel() for parameter in setup.task.model().parameters())
        # Largest number of clients that train together.
        self.at_once = max(1, STACK_BYTES // (4 * self.numel))
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        # By text of a queued log message: the clients that logged it, the message, and when to print it (`time.monotonic()`).
        self._unlogged: dict[str, tuple[set[int], LogMessage, float]] = {}
        self._log_lock = threading.Lock()
        self._ended = False

    def end(self) -> None:
        """Make `run` return as soon as the clients that train now have answered. Any thread may call this method."""
        self._ended = True

    def run(self) -> None:
        """Answer the server's messages until every client has ended, because its run is over or because it has failed.

        If clients have failed, raises the error of the failed client that comes first in `clients`. It is a UserError if this client cannot
        take part or cannot reach the server in time.
        """
        limit = asyncio.Semaphore(MAX_CONNECTS)
        clients = [self._keep_connected(hosted, limit) for hosted in self.clients.values()]
        with ThreadPoolExecutor(MAX_SAVES, "fedcomp-save") as savers, io_tasks(clients):
            while not self._ended and not all(hosted.done for hosted in self.clients.values()):
                self._answer_requests(LOG_INTERVAL_S, savers)
                self._log_entries(time.monotonic())
        self._log_entries(math.inf)
        failed = {hosted.id: hosted.error for hosted in self.clients.values() if hosted.error}
        if failed:
            first = next(iter(failed.values()))
            if self._single:
                raise first
            count = f"{len(failed)} of {len(self.clients)} clients could not continue"
            raise type(first)(f"{count}: {named_clients(failed)}; the first reason: {first}")

    @property
    def _single(self) -> bool:
        return len(self.clients) == 1

    # Methods that run in the thread that calls `run`.

    def _answer_requests(self, timeout_s: float, savers: ThreadPoolExecutor) -> None:
        """Answer up to `at_once` queued requests. Wait up to `timeout_s` seconds for the first request."""
        requests: list[Request] = []
        with suppress(queue.Empty):
            requests.append(self._requests.get(timeout=timeout_s))
            while len(requests) < self.at_once:
                requests.append(self._requests.get_nowait())
        assigned: list[tuple[Request, Assignment]] = []
        for request in requests:
            if isinstance(request.message, Invitation):
                self._join(request, request.message)
            else:
                assigned.append((request, request.message))
        downlink_bytes = [sum(map(len, assignment.frames)) for _, assignment in assigned]
        reports = handle([(request.hosted.client, a) for request, a in assigned])
        errors = [*savers.map(_save, [request.hosted.client for request, _ in assigned])]
        answered = zip(assigned, reports, errors, downlink_bytes, strict=True)
        for (request, assignment), report, error, down_bytes in answered:
            if error is not None:
                request.answer.set_exception(error)
                continue
            if report is not None:
                self._log_answer(request.hosted, assignment, report, down_bytes)
            request.answer.set_result(report)

    def _join(self, request: Request, invitation: Invitation) -> None:
        client = request.hosted.client
        try:
            presence = client.join(invitation)
        except Exception as error:
            request.answer.set_exception(error)
        else:
            joined = log_messages.joined(presence, client.session, client.setup.partition_id)
            self._queue_message(request.hosted, joined)
            request.answer.set_result(presence)

    def _log_answer(
        self, hosted: HostedClient, assignment: Assignment, report: Report, downlink_bytes: int
    ) -> None:
        self._queue_message(hosted, log_messages.answered(assignment, report, downlink_bytes))
        if report.kind == UPDATE and (
            others := unknown_keys(assignment, hosted.client.round_state)
        ):
            self._queue_message(hosted, log_messages.unknown(assignment, others))

    def _log_entries(self, now_s: float) -> None:
        """Pass the queued log messages that are due at `now_s` to `log_message`."""
        with self._log_lock:
            due = [text for text, (*_, due_s) in self._unlogged.items() if due_s <= now_s]
            messages = [self._unlogged.pop(text) for text in due]
        for clients, entry, _ in messages:
            if not self._single:
                values = dict(entry.values) | {"clients": sorted(clients)}
                values.pop("client", None)
                entry = LogMessage(f"{named_clients(clients)}: {entry}", entry.event, **values)
            self.log_message(entry)

    # Methods that run in the I/O thread.

    async def _keep_connected(self, hosted: HostedClient, connect_limit: asyncio.Semaphore) -> None:
        try:
            while not hosted.done and not self._ended:
                try:
                    await self._serve(hosted, connect_limit)
                    if not hosted.done:  # with --stay, reconnect after the server has exited
                        await asyncio.sleep(self.retry_s[-2])
                except UnreachableError as error:
                    pause_s, entry = hosted.retries.pause(error, self.retry_s, self.patience_s)
                    if entry:
                        self._queue_message(hosted, entry, COMBINE_S)
                    await asyncio.sleep(pause_s)
        except Exception as error:
            failed = (
                error if isinstance(error, FedcompError) else FedcompError(failure_reason(error))
            )
            hosted.error = failed
            if not self._single:
                combine_s = COMBINE_S if isinstance(failed, UnreachableError) else 0.0
                ended = LogMessage(f"ended: {failed}", "failed", reason=str(failed))
                self._queue_message(hosted, ended, combine_s)

    async def _serve(self, hosted: HostedClient, connect_limit: asyncio.Semaphore) -> None:
        target = hosted.target
        connection = GrpcConnection(
            target.address,
            largest=MAX_MODELS * 4 * self.numel + SPARE_BYTES,
            credentials=target.credentials,
            client=hosted.client.client_id if target.enrolment is None else -1,
        )
        async with AsyncExitStack() as stack:
            async with connect_limit:
                try:
                    await stack.enter_async_context(connection)
                except UnreachableError:
                    await asyncio.to_thread(target.check)  # raises a more precise error
                    raise
            async for message in connection.messages():
                if isinstance(message, Refused):
                    raise message.error
                hosted.retries = Retries()
                if isinstance(message, Invitation):
                    sentence = f"connected to {target.address}"
                    self._queue_message(
                        hosted, LogMessage(sentence, "connected", server=target.address)
                    )
                await self._answer(hosted, connection, message)
                del message

    async def _answer(
        self,
        hosted: HostedClient,
        connection: GrpcConnection,
        message: Invitation | Assignment | Farewell,
    ) -> None:
        if isinstance(message, Farewell):
            if message.run == hosted.client.run:
                self._queue_message(hosted, log_messages.over(message, self.stay), COMBINE_S)
                hosted.over = not self.stay
            return
        request = Request(hosted, message)
        self._requests.put(request)
        try:
            answer = await asyncio.wrap_future(request.answer)
        except FedcompError as error:
            if isinstance(message, Assignment):
                await connection.send(failure(message, "encode", str(error)))
            else:
                refusal = Presence(message.run, hosted.client.client_id, "", str(error))
                with suppress(UnreachableError, TimeoutError):
                    await connection.send(refusal)
                    async with asyncio.timeout(REFUSAL_S):
                        async for _ in connection.messages():
                            pass
            raise UserError(str(error)) from error
        if answer is not None:
            await connection.send(answer)

    def _queue_message(
        self, hosted: HostedClient, entry: LogMessage, combine_s: float = 0.0
    ) -> None:
        """Queue a log message. It waits `combine_s` seconds for equal messages of other clients, to be combined with them."""
        due_s = time.monotonic() + (0.0 if self._single else combine_s)
        with self._log_lock:
            self._unlogged.setdefault(str(entry), (set(), entry, due_s))[0].add(hosted.id)
