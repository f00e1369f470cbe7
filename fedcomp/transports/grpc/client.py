"""The client side of a gRPC stream. Use a GrpcConnection in a running asyncio event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import grpc

from ... import __version__
from ...errors import ProtocolError, UnreachableError
from ...messages import Assignment, Farewell, Invitation, Presence, Report
from . import wire
from .options import client_options
from .settings import Credentials
from .values import Reader
from .wire import Kind, Refused

CONNECT_S = 30.0  # time limit to connect and to receive the server's first message
STATUS_S = 2.0  # time to wait, after a failed write, for the reason why the stream ended
Message = Invitation | Assignment | Farewell | Refused


class GrpcConnection:
    """One stream to a server, from the first message (HELLO) to the end of the stream. `target`: host:port.

    With credentials, the certificate identifies the client. Without credentials, the connection has no TLS, and the client asks for the id
    `client`. `largest` is the size in bytes of the largest message that the server may send.

    A new assignment from the server replaces an older assignment that `messages` has not yielded yet. Pings are answered in the background
    while the event loop runs. Raises UnreachableError if the connection fails, and ProtocolError for a malformed message.
    """

    def __init__(
        self, target: str, *, largest: int, credentials: Credentials | None = None, client: int = -1
    ):
        self.target, self.credentials, self.claimed = target, credentials, client
        self._assembly = wire.Assembly(largest + 4096)
        self._invitation: Invitation | None = None
        self._client = client  # id of this client; the server's invitation may change it
        # The last assignment that `messages` yielded, with its sequence number. None after it has been answered.
        self._assigned: tuple[int, Assignment] | None = None
        # Received messages that `messages` has not yielded yet. An assignment is stored as a tuple (sequence number, assignment).
        self._unread: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._write_lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Connect, send HELLO, and wait for the server's first message."""
        if (c := self.credentials) is None:
            self._channel = grpc.aio.insecure_channel(self.target, options=client_options())
        else:
            secure = grpc.ssl_channel_credentials(c.ca, c.key, c.certificate)
            self._channel = grpc.aio.secure_channel(self.target, secure, options=client_options())
        self._call = self._channel.stream_stream(wire.METHOD)(wait_for_ready=False)
        self._reading = asyncio.create_task(self._read())
        try:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await self._call.write(wire.encode_hello(wire.Hello(self.claimed, __version__)))
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._changed.wait()
            except TimeoutError:
                advice = "check that the server runs and that no firewall blocks its port"
                sentence = f"{self.target} does not answer within {CONNECT_S:g} s; {advice}"
                raise UnreachableError(sentence, "silent") from None
            if self._error is not None and not self._unread:
                raise self._error
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._reading.cancel()
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()

    async def messages(self) -> AsyncIterator[Message]:
        """Yield the server's messages until the server ends the run (Farewell) or refuses the client (Refused).

        Raises UnreachableError if the stream ends before a Farewell or Refused, and ProtocolError for a malformed message.
        """
        while True:
            while self._unread:
                message = self._unread.popleft()
                if isinstance(message, tuple):
                    self._assigned, message = message, message[1]
                yield message
                if isinstance(message, Farewell | Refused):
                    return
                del message
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    async def send(self, answer: Presence | Report) -> None:
        """Answer the server's invitation with a Presence, or the last assignment that `messages` yielded with a Report.

        Returns and raises errors as `write` does.
        """
        if isinstance(answer, Presence):
            assert self._invitation is not None
            self._client = answer.client
            pieces = wire.encode(Kind.PRESENCE, answer, self._invitation)
        else:
            assert self._assigned is not None
            (sequence, assignment), self._assigned = self._assigned, None
            pieces = wire.encode_report(sequence, answer, assignment)
        await self.write(pieces)

    async def write(self, pieces: Sequence[bytes]) -> None:
        """Send a message. Returns when gRPC's flow control has accepted the message.

        Raises the error that ended the stream. If the server has refused this client, `write` returns without an error, and `messages`
        yields the refusal (Refused).
        """
        try:
            for message in wire.split(pieces):
                async with self._write_lock:  # a PONG may be sent between two parts of a message
                    await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    await asyncio.shield(self._reading)
            if self._unread and isinstance(self._unread[-1], Refused):
                return
            raise self._error or self._unreachable(error) from error

    async def _read(self) -> None:
        try:
            async for data in self._call:
                if (whole := self._assembly.take(data)) is not None:
                    await self._handle(*whole)
                    self._changed.set()
                del data, whole
            self._error = UnreachableError(
                f"the server at {self.target} has ended the connection", "closed"
            )
        except ProtocolError as error:
            self._error = error
        except Exception as error:  # the stream has ended with an error status
            self._error = self._unreachable(error)
        finally:
            self._changed.set()

    async def _handle(self, kind: Kind, reader: Reader) -> None:
        """Answer a PING of the server, or queue the server's message for `messages`."""
        if kind is Kind.PING:
            async with self._write_lock:
                await self._call.write(wire.PONG)
        elif kind is Kind.REFUSED:
            self._unread.append(wire.decode_refused(reader))
        elif kind is Kind.INVITATION and self._invitation is None:
            self._invitation = wire.decode(kind, reader)
            self._client = self._invitation.client
            self._unread.append(self._invitation)
        elif kind is Kind.ASSIGNMENT and self._invitation is not None:
            assigned = wire.decode_assignment(reader, self._client)
            if self._unread and isinstance(self._unread[-1], tuple):
                self._unread.pop()
            self._unread.append(assigned)
        elif kind is Kind.FAREWELL and self._invitation is not None:
            self._unread.append(wire.decode(kind, reader, self._invitation))
        else:
            raise ProtocolError(
                f"the server sent an unexpected {kind.name} message; install the same version of fedcomp on both sides"
            )

    def _unreachable(self, error: Exception) -> UnreachableError:
        why: object = error
        if isinstance(error, grpc.aio.AioRpcError):
            why = error.details()
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                reason = (
                    f"{self.target} is a gRPC server but not a fedcomp server; correct --server"
                )
                return UnreachableError(reason, "not fedcomp")
            if self._invitation is None:
                return UnreachableError(f"{self.target} cannot be reached ({why})", "network")
        return UnreachableError(f"the connection to {self.target} was lost ({why})", "network")
