"""A connection to the guard: its requests one after the other, what is refused, what goes on to the SuperLink and what comes back."""

import asyncio
import logging
import time
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

import h11

from . import http_request as heads
from .http_request import Head, Refused
from .traffic import Account, CountedSocket
from .upstream import CHUNK, Upstream, UpstreamFault

if TYPE_CHECKING:
    from .guard import Guard

LINGER_S, LINGER_BYTES = (
    1.0,
    1 << 20,
)  # that a refused client may go on sending, so that it can read why

log = logging.getLogger(__name__)


class Gone(Exception):
    """The client has left in the middle of something."""


class Visit:
    """One connection of a client, with its requests one after the other, however many it sends ahead."""

    task: asyncio.Task

    def __init__(self, guard: "Guard", client: CountedSocket, address: str, refusal: int | None):
        self.guard, self.client, self.address, self.refusal = guard, client, address, refusal
        self.limits = guard.limits
        self.account = Account(client, address)
        self.upstream = Upstream(guard.upstream_port, guard.limits)
        self.buffer = (
            bytearray()
        )  # received and not yet used: a head, or a body and requests after it
        self.busy = self.answering = self.known = (
            False  # known: the SuperLink has believed one of its requests
        )
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
        except (
            Gone,
            OSError,
            h11.ProtocolError,
        ) as error:  # TimeoutError and ssl.SSLError are OSErrors
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
        waits = (
            {"ssl_handshake_timeout": self.limits.header_s, "ssl_shutdown_timeout": LINGER_S}
            if self.guard.tls
            else {}
        )
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, self.client, ssl=self.guard.tls, **waits
        )
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
        if (
            self.guard.admits
            and head.path != heads.HEALTH[1]
            and not (head.public_key and self.guard.admits(head.public_key))
        ):
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
                await self._hear(
                    self.limits.keep_alive_s
                    if self.known
                    else min(self.limits.keep_alive_s, self.limits.header_s)
                )
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
                self.known = True
                self.guard.ledger.settle(
                    self.account, head.public_key
                )  # whose signature the SuperLink has verified
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
            self.writer.write(
                head.http.send(h11.InformationalResponse(status_code=100, headers=[]))
            )
        try:
            async with asyncio.timeout(
                self.limits.idle_s + left_bytes / self.limits.slowest_bytes_s
            ):
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
        begun = head.http.send(
            h11.Response(status_code=response.status_code, reason=response.reason, headers=headers)
        )
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
        retry = (
            "Retry-After: 1\r\n"
            if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
            else ""
        )
        line = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}"
        with suppress(OSError):
            await self._write(
                f"{line}\r\nContent-Length: 0\r\n{retry}Connection: close\r\n\r\n".encode()
            )
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
