"""Flower's SuperLink for processes of its own user alone: a program that takes the place, and the arguments, of `flower-superlink`.

A loopback port is open to every user of a machine, and a SuperLink asks those who submit or stop runs for nothing. Linux tells whose the
other end of a local connection is (sock_diag(7)): one of another user is closed unheard, and so is one that its process has let go of,
which is nobody's any more. Elsewhere everybody is heard, as by `flower-superlink` itself.

Most of what a SuperLink does for a request is Starlette's: Flower's eight layers of middleware start a group of tasks and a stream each.
The short requests that a round is made of go through the same layers without them.
"""

import asyncio
import os
import socket
import struct
import sys
from functools import partial
from importlib.metadata import entry_points

import uvicorn
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

Address = tuple[str, int]

SOCK_DIAG, BY_FAMILY, ESTABLISHED = (
    4,
    20,
    1,
)  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, TCP_ESTABLISHED
HEAD = struct.Struct("=IHHII")  # struct nlmsghdr
QUESTION = struct.Struct(
    "=BBBxI"
)  # struct inet_diag_req_v2, and a struct inet_diag_sockid after it
ANSWER = struct.Struct(
    "=BBBB48x5I"
)  # struct inet_diag_msg: family, state, …, and after the sockid expires, rqueue, wqueue, uid, inode
ANY_STATE, ANY_COOKIE = 0xFFFFFFFF, b"\xff" * 8
ANSWER_S = 1.0
SHORT = (
    "confirm-message-received",
    "get-nodes",
    "pull-messages",
    "pull-object",
    "push-messages",
    "push-object",
    "send-node-heartbeat",
    "send-task-heartbeat",
)  # ends of the paths of requests whose answers are held before they are sent


def owner(end: Address, other: Address) -> int | None:
    """The user id of the process that holds this end of an IPv4 connection between two sockets of this machine; None for nobody.

    Raises OSError, or AttributeError, where the system does not tell.
    """
    sockid = struct.pack("!HH", end[1], other[1]) + b"".join(
        socket.inet_aton(host).ljust(16, b"\0") for host, _ in (end, other)
    )
    body = (
        QUESTION.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, ANY_STATE)
        + sockid
        + struct.pack("=I", 0)
        + ANY_COOKIE
    )
    with socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, SOCK_DIAG
    ) as kernel:
        kernel.settimeout(ANSWER_S)
        kernel.send(HEAD.pack(HEAD.size + len(body), BY_FAMILY, 1, 1, 0) + body)
        data = kernel.recv(4096)
    if HEAD.unpack_from(data)[1] != BY_FAMILY:
        return None  # an error: there is no such connection
    _, state, _, _, _, _, _, uid, inode = ANSWER.unpack_from(data, HEAD.size)
    return uid if state == ESTABLISHED and inode else None


def told_here() -> bool:
    """Whether this system tells whose a connection is."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        try:
            return owner(one.getsockname(), one.getpeername()) == os.geteuid()
        except (OSError, AttributeError):
            return False


class OwnUser(AutoHTTPProtocol):
    """Serves a connection whose other end is of this process's user, and no other."""

    stranger = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        try:
            whose = owner(
                transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
            )
        except OSError:
            whose = None
        if whose != os.geteuid():
            self.stranger = True
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.stranger:
            super().data_received(data)


def shorten_layers() -> None:
    """Have each layer of middleware call the next one as it is, where a request is short: what they decide stays theirs."""
    layered = BaseHTTPMiddleware.__call__

    async def call(self: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(SHORT):
            return await layered(self, scope, receive, send)
        request, fresh = Request(scope, receive), True
        body = await request.body()

        async def again() -> Message:
            nonlocal fresh
            first, fresh = fresh, False
            return (
                {"type": "http.request", "body": body, "more_body": False}
                if first
                else await receive()
            )

        async def call_next(_: Request) -> Response:
            held: list[Message] = []

            async def hold(message: Message) -> None:
                held.append(message)

            await self.app(scope, again, hold)
            start, *parts = held
            response = Response(b"".join(part.get("body", b"") for part in parts), start["status"])
            response.raw_headers = start["headers"]
            return response

        response = await self.dispatch_func(request, call_next)
        await response(scope, receive, send)

    BaseHTTPMiddleware.__call__ = call


def main() -> None:
    shorten_layers()
    if told_here():
        uvicorn.run = partial(uvicorn.run, http=OwnUser)
    else:
        print(
            "this system does not tell whose a connection is: every user of this machine can stop the run",
            file=sys.stderr,
            flush=True,
        )
    (program,) = entry_points(group="console_scripts", name="flower-superlink")
    sys.exit(program.load()())


if __name__ == "__main__":
    main()
