"""The guard's side towards the SuperLink."""

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

import h11

from .http_request import Head, Refused, upstream_headers
from .limits import Limits

CHUNK = 64 << 10  # of a body in hand
REUSE_S = 2.0  # uvicorn closes a connection after 5 s without a request


class UpstreamFault(Refused):
    """The SuperLink's doing, not the client's."""


class Upstream:
    """A connection to the SuperLink that is opened again when it has to be. Raises UpstreamFault: 502, 503 or 504."""

    def __init__(self, port: int, limits: Limits):
        self.port, self.limits = port, limits
        self.writer: asyncio.StreamWriter | None = None
        self.begun, self.used_s = b"", 0.0

    async def open(self) -> None:
        if (
            self.writer is not None
            and time.monotonic() - self.used_s < REUSE_S
            and not self.reader.at_eof()
        ):
            return
        self.close()
        try:
            async with asyncio.timeout(self.limits.upstream_s):
                self.reader, self.writer = await asyncio.open_connection(
                    "127.0.0.1", self.port, limit=CHUNK
                )
        except TimeoutError as error:
            raise UpstreamFault(HTTPStatus.GATEWAY_TIMEOUT) from error
        except OSError as error:
            here = error.errno in (errno.EMFILE, errno.ENFILE)
            raise UpstreamFault(
                HTTPStatus.SERVICE_UNAVAILABLE if here else HTTPStatus.BAD_GATEWAY
            ) from error
        self.http = h11.Connection(h11.CLIENT)

    def begin(self, head: Head) -> None:
        """Hold the head until something follows it: one write less."""
        self.begun = self.http.send(
            h11.Request(
                method=head.method, target=head.path, headers=upstream_headers(head, self.port)
            )
        )

    async def send(self, event: h11.Data | h11.EndOfMessage) -> None:
        data = self.begun + self.http.send(event)
        self.begun = b""
        if not data:
            return
        try:
            self.writer.write(data)
            async with asyncio.timeout(self.limits.upstream_s):
                await self.writer.drain()
        except TimeoutError as error:
            raise UpstreamFault(HTTPStatus.GATEWAY_TIMEOUT) from error
        except OSError as error:
            raise UpstreamFault(HTTPStatus.BAD_GATEWAY) from error

    async def answer(self) -> h11.Response:
        while not isinstance(event := await self._next(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise UpstreamFault(HTTPStatus.BAD_GATEWAY)
        return event

    async def body(self) -> AsyncIterator[bytes]:
        while True:
            try:
                async with asyncio.timeout(self.limits.upstream_s):
                    event = await self._next()
            except TimeoutError as error:
                raise UpstreamFault(HTTPStatus.GATEWAY_TIMEOUT) from error
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    async def _next(self) -> h11.Event:
        try:
            while (event := self.http.next_event()) is h11.NEED_DATA:
                self.http.receive_data(await self.reader.read(CHUNK))
        except (h11.RemoteProtocolError, OSError) as error:
            raise UpstreamFault(HTTPStatus.BAD_GATEWAY) from error
        return event

    def end_cycle(self) -> None:
        if self.http.our_state is h11.DONE and self.http.their_state is h11.DONE:
            self.http.start_next_cycle()
            self.used_s = time.monotonic()
        else:
            self.close()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
            self.writer = None
