"""The public port in front of a SuperLink that listens on loopback.

The SuperLink serves clients (/v1/fleet), those who submit code (/v1/control) and its own processes (/v1/runtime) on one
port, and asks the latter two for nothing. The guard lets an exact list of requests through (heads.py), ends TLS, streams
bodies in both directions, counts bytes by client at the socket (traffic.py) and holds everybody to limits (limits.py).
Whatever it refuses gets a status, no body, and the end of its connection.

Every connection of a client has its own connection to the SuperLink, so no answer can reach another client.
"""

import asyncio
import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Self

import h11

from . import heads
from .heads import Head, Refused
from .limits import Buckets, Limits, address_of
from .ports import files_for, listen, server_context
from .traffic import Account, Client, CountedSocket, Ledger, Traffic
from .upstream import CHUNK, Upstream, UpstreamFault

TURNED_AWAY = 32  # connections over a limit that are told so at once; the rest are closed unheard
LINGER_S, LINGER_BYTES = 1.0, 1 << 20  # that a refused client may go on sending, so that it can read why

log = logging.getLogger(__name__)


class Gone(Exception):
    """The client has left in the middle of something."""


class Guard:
    """A thread that serves the public port between `start()` and `stop()`. Raises ConfigError where it cannot.

    `admits(public_key)`, the key as PEM, decides before a body is read whether a node may go on (else 401), in the guard's
    thread: it must be quick. That the node owns the key is for the SuperLink to verify. Plain HTTP without a certificate.
    """

    def __init__(
        self,
        listen_host: str,
        listen_port: int,
        upstream_port: int,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        limits: Limits | None = None,
        admits: Callable[[bytes], bool] | None = None,
    ):
        self.host, self.port, self.upstream_port = listen_host, listen_port, upstream_port  # port 0: a free one, once started
        self.limits, self.admits = limits or Limits(), admits
        self.tls = server_context(certificate, key)
        self.refused: Counter[int] = Counter()  # by status
        self.ledger = Ledger()
        self.buckets = Buckets(self.limits)
        self.visits: set[Visit] = set()
        self.turned_away: set[Visit] = set()
        self.by_address: Counter[str] = Counter()
        self.in_hand_bytes = 0  # of bodies, as announced
        self._thread: threading.Thread | None = None

    @property
    def traffic(self) -> dict[Client, Traffic]:
        """Received and sent bytes of each client: of a node's public key that the SuperLink believed, or else of an address."""
        return self.ledger.read()

    def start(self) -> None:
        self._connections = min(self.limits.connections, files_for(self.limits.connections))
        self._listener = listen(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="fedcomp-guard", daemon=True)
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Close the port and every connection; a request in hand gets a second to end."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self, started: threading.Event) -> None:
        # asyncio's own loop and no other: it moves every byte through the methods of CountedSocket.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda loop, context: log.debug("%s", context))
        accepting = asyncio.create_task(self._accept())
        started.set()
        await self._ending.wait()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        self._listener.close()
        if busy := [visit.task for visit in self.visits if visit.busy]:
            await asyncio.wait(busy, timeout=LINGER_S)
        left = [visit.task for visit in self.visits | self.turned_away]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                accepted, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                log.debug("accept: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(0.1)  # until somebody leaves
                continue
            try:
                self._admit(CountedSocket(accepted), address_of(peer[0]))
            except Exception:
                log.exception("a connection of %s was given up", peer)
                accepted.close()

    def _admit(self, client: CountedSocket, address: str) -> None:
        full = len(self.visits) >= self._connections or self.by_address[address] >= self.limits.connections_per_address
        if full and len(self.turned_away) >= TURNED_AWAY:
            self.refused[HTTPStatus.SERVICE_UNAVAILABLE] += 1
            client.close()
            return
        visit = Visit(self, client, address, HTTPStatus.SERVICE_UNAVAILABLE if full else None)
        (self.turned_away if full else self.visits).add(visit)
        self.by_address[address] += not full
        visit.task = self._loop.create_task(visit.run())
        visit.task.add_done_callback(lambda task: self._leave(visit))

    def _leave(self, visit: "Visit") -> None:
        visit.client.close()
        self.turned_away.discard(visit)
        if visit in self.visits:
            self.visits.remove(visit)
            self.by_address[visit.address] -= 1
            if not self.by_address[visit.address]:
                del self.by_address[visit.address]


class Visit:
    """One connection of a client, with its requests one after the other, however many it sends ahead."""

    task: asyncio.Task

    def __init__(self, guard: Guard, client: CountedSocket, address: str, refusal: int | None):
        self.guard, self.client, self.address, self.refusal = guard, client, address, refusal
        self.limits = guard.limits
        self.account = Account(client, address)
        self.upstream = Upstream(guard.upstream_port, guard.limits)
        self.buffer = bytearray()  # received and not yet used: a head, or a body and requests after it
        self.busy = self.answering = False
        self.writer: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        self.guard.ledger.open(self.account)
        try:
            await self._open()
            while await self._exchange():
                self.answering = False
            await self._close()
        except Refused as refusal:
            await self._refuse(refusal.status)
        except (Gone, OSError, h11.ProtocolError) as error:  # TimeoutError and ssl.SSLError are OSErrors
            log.debug("%s: %r", self.address, error)
        except Exception:
            log.exception("a connection of %s was given up", self.address)
            await self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
        finally:
            self.upstream.close()
            if self.writer is not None:
                self.writer.transport.abort()
            self.guard.ledger.close(self.account)

    async def _open(self) -> None:
        try:
            await self._wait_for_turn()
        except Refused as refusal:
            if self.guard.tls:
                raise  # unheard: a handshake is what costs, and what a flood is after
            self.refusal = self.refusal or refusal.status
        loop = asyncio.get_running_loop()
        self.reader = asyncio.StreamReader(limit=CHUNK, loop=loop)
        protocol = asyncio.StreamReaderProtocol(self.reader, loop=loop)
        waits = {"ssl_handshake_timeout": self.limits.header_s, "ssl_shutdown_timeout": LINGER_S} if self.guard.tls else {}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, self.client, ssl=self.guard.tls, **waits)
        self.writer = asyncio.StreamWriter(transport, protocol, self.reader, loop)
        if self.refusal is not None:
            raise Refused(self.refusal)

    async def _wait_for_turn(self) -> None:
        wait_s = self.guard.buckets.take(self.address, time.monotonic())
        if wait_s is None:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS)
        if wait_s:
            await asyncio.sleep(wait_s)

    async def _exchange(self) -> bool:
        """One request and its answer. False when the connection ends after it."""
        self.busy = bool(self.buffer)
        if (data := await self._read_head()) is None:
            return False
        await self._wait_for_turn()
        head = heads.read(data)
        if head.body_bytes > self.limits.body_bytes:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if self.guard.admits and head.path != heads.HEALTH[1] and not (head.public_key and self.guard.admits(head.public_key)):
            raise Refused(HTTPStatus.UNAUTHORIZED)
        if self.guard.in_hand_bytes + head.body_bytes > self.limits.in_hand_bytes:
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE)
        self.guard.in_hand_bytes += head.body_bytes
        try:
            return await self._forward(head)
        finally:
            self.guard.in_hand_bytes -= head.body_bytes

    async def _read_head(self) -> bytes | None:
        """A head, its empty line included; None when there is no further request."""
        if not self.buffer:
            with suppress(TimeoutError, Gone):
                await self._hear(self.limits.keep_alive_s)
        if not self.buffer:
            return None
        self.busy, seen = True, 0
        try:
            async with asyncio.timeout(self.limits.header_s):
                while not (end := heads.find_end(self.buffer, seen)):
                    seen = len(self.buffer)
                    if seen > self.limits.header_bytes:
                        raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                    await self._hear(self.limits.header_s)
        except TimeoutError as error:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT) from error
        if end > self.limits.header_bytes:
            raise Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        return self._taken(end)

    async def _hear(self, seconds: float) -> None:
        """Read on into the buffer."""
        async with asyncio.timeout(seconds):
            data = await self.reader.read(CHUNK)
        if not data:
            raise Gone
        self.buffer += data

    def _taken(self, count: int) -> bytes:
        """At most so many bytes off the buffer."""
        data = bytes(self.buffer[:count])
        del self.buffer[:count]
        return data

    async def _forward(self, head: Head) -> bool:
        """Whether the connection is good for another request."""
        await self.upstream.open()
        self.upstream.begin(head)
        sending = asyncio.create_task(self._send_body(head))
        answer = asyncio.create_task(self.upstream.answer())
        try:
            await asyncio.wait({sending, answer}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await self._after_body(sending, answer)
            response = answer.result()
            if 200 <= response.status_code < 300 and head.path != heads.HEALTH[1]:
                self.guard.ledger.settle(self.account, head.public_key)  # whose signature the SuperLink has verified
            whole = sending.done() and sending.exception() is None
            goes_on = await self._answer(head, response, whole)
        finally:
            for task in (sending, answer):
                task.cancel()
            await asyncio.gather(sending, answer, return_exceptions=True)
        self.upstream.end_cycle()
        return goes_on

    async def _after_body(self, sending: asyncio.Task, answer: asyncio.Task) -> None:
        """Wait for the answer once the body is through, or could not be: a SuperLink that closes may have said why."""
        fault = sending.exception()
        if fault is not None and not isinstance(fault, UpstreamFault):
            raise fault
        await asyncio.wait({answer}, timeout=self.limits.upstream_s if fault is None else LINGER_S)
        if not answer.done():
            raise fault or UpstreamFault(HTTPStatus.GATEWAY_TIMEOUT)

    async def _send_body(self, head: Head) -> None:
        left_bytes = head.body_bytes
        if head.expects_continue and left_bytes and not self.buffer:
            self.writer.write(head.http.send(h11.InformationalResponse(status_code=100, headers=[])))
        try:
            async with asyncio.timeout(self.limits.idle_s + left_bytes / self.limits.slowest_bytes_s):
                while left_bytes:
                    if not self.buffer:
                        await self._hear(self.limits.idle_s)
                    piece = self._taken(left_bytes)
                    left_bytes -= len(piece)
                    await self.upstream.send(h11.Data(data=piece))
        except TimeoutError as error:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT) from error
        await self.upstream.send(h11.EndOfMessage())

    async def _answer(self, head: Head, response: h11.Response, whole: bool) -> bool:
        headers = heads.answer_headers(response.headers)
        if not whole:  # what is left of the body would be taken for a request
            headers.append((b"connection", b"close"))
        self.answering = True
        begun = head.http.send(h11.Response(status_code=response.status_code, reason=response.reason, headers=headers))
        async for piece in self.upstream.body():  # the head goes with the first of it
            await self._write(begun + head.http.send(h11.Data(data=piece)))
            begun = b""
        await self._write(begun + head.http.send(h11.EndOfMessage()))
        self.guard.ledger.settle(self.account)  # before another node may be next on this connection
        return head.http.our_state is not h11.MUST_CLOSE

    async def _write(self, data: bytes) -> None:
        if data:
            self.writer.write(data)
            async with asyncio.timeout(self.limits.idle_s):
                await self.writer.drain()

    async def _refuse(self, status: int) -> None:
        self.guard.refused[status] += 1
        if self.answering or self.writer is None:
            return  # an answer that stops in the middle
        retry = "Retry-After: 1\r\n" if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE) else ""
        line = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}"
        with suppress(OSError):
            await self._write(f"{line}\r\nContent-Length: 0\r\n{retry}Connection: close\r\n\r\n".encode())
            await self._close()

    async def _close(self) -> None:
        """Say that nothing more comes, and hear the client out for a moment: a reset could overtake the answer."""
        heard = 0
        with suppress(OSError):
            async with asyncio.timeout(LINGER_S):
                if self.writer.can_write_eof():
                    self.writer.write_eof()
                while heard < LINGER_BYTES and (data := await self.reader.read(CHUNK)):
                    heard += len(data)
                self.writer.close()
                await self.writer.wait_closed()
