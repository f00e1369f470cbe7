"""What the public port lets through to a SuperLink, and how a request's head is read before that.

A head that two parsers could read in two ways is refused, whatever either of them would make of it; what is left
is read by h11. The path is compared whole, byte by byte, with a table, and what goes on is the table's string: there
is nothing to decode, to normalise or to get around.
"""

import re
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Sequence
from dataclasses import dataclass

import h11

# Every route of the Fleet API of flwr 1.40 to 1.42, all of which its SuperNode uses, and the health check. Not /v1/control, which
# submits code, nor /v1/runtime, which hands out tasks, nor /docs.
FLEET = {
    (b"POST", b"/v1/fleet/activate-node"),
    (b"POST", b"/v1/fleet/confirm-message-received"),
    (b"POST", b"/v1/fleet/deactivate-node"),
    (b"POST", b"/v1/fleet/get-fab"),
    (b"POST", b"/v1/fleet/get-run"),
    (b"POST", b"/v1/fleet/pull-messages"),
    (b"POST", b"/v1/fleet/pull-object"),
    (b"POST", b"/v1/fleet/push-messages"),
    (b"POST", b"/v1/fleet/push-object"),
    (b"POST", b"/v1/fleet/register-node"),
    (b"POST", b"/v1/fleet/send-node-heartbeat"),
    (b"POST", b"/v1/fleet/unregister-node"),
}
HEALTH = (b"GET", b"/health")
ROUTES = {route: route for route in FLEET | {HEALTH}}

PUBLIC_KEY = (
    b"flwr-public-key"  # base64 of the node's PEM; the SuperLink believes it only with a signature
)
# Of a request, what goes on to the SuperLink beside its length. uvicorn believes X-Forwarded-For from loopback, for one.
FORWARDED = {
    b"accept",
    b"content-type",
    b"flwr-component-name",
    b"flwr-package-name",
    b"flwr-package-version",
    b"flwr-signature",
    b"flwr-timestamp",
    b"user-agent",
    PUBLIC_KEY,
}
ONCE = FORWARDED | {
    b"content-length",
    b"host",
    b"transfer-encoding",
}  # or not at all: two readers could take two of them
# Of an answer, what concerns one connection alone (RFC 9110, 7.6.1).
HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}

END = b"\r\n\r\n"
# ASCII without control characters, lines ended by CRLF, none of them folded, names without blanks.
WHOLE = re.compile(rb"[!-~]+ [!-~]+ HTTP/[0-9]\.[0-9]\r\n(?:[!-9;-~]+:[\t -~]*\r\n)+\r\n")
NEVER = re.compile(
    rb"[^\t\r\n -~]|\r[^\n]|(?<!\r)\n"
)  # found in no head, nor in the beginning of one
DIGITS = re.compile(rb"[0-9]{1,15}")

Headers = Sequence[tuple[bytes, bytes]]


class Refused(Exception):
    """The request ends here, with this status and an empty body."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class Head:
    """A request that may go on once the limits allow it."""

    method: bytes  # from the table, as the path is
    path: bytes
    headers: Headers  # in lower case; those that go on
    body_bytes: int
    public_key: bytes | None  # as claimed
    expects_continue: bool
    http: h11.Connection  # the server's side, ready to write the answer


def find_end(buffer: bytearray, seen: int) -> int:
    """Where the head at the beginning of the buffer ends; 0 while it does not. `seen`: bytes that were searched before.

    Raises Refused(400) as soon as no head can come of it.
    """
    if (at := buffer.find(END, max(0, seen - len(END) + 1))) >= 0:
        return at + len(END)
    if NEVER.search(buffer, max(0, seen - 1)):
        raise Refused(400)
    return 0


def read(data: bytes) -> Head:
    """Read a head, its empty line included. Raises Refused: 400 malformed, 404 not in the table, 411 chunked, 505 not HTTP/1.1."""
    if not WHOLE.fullmatch(data):
        raise Refused(400)
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=len(data))
    http.receive_data(data)
    try:
        request = http.next_event()
    except h11.RemoteProtocolError as error:
        raise Refused(400) from error
    if not isinstance(request, h11.Request):
        raise Refused(400)
    if request.http_version != b"1.1":
        raise Refused(505)
    fields = single(data)
    length = body_bytes(fields)
    if (route := ROUTES.get((request.method, request.target))) is None:
        raise Refused(404)
    if route == HEALTH and length:
        raise Refused(400)
    return Head(
        *route,
        headers=[(name, value) for name, value in request.headers if name in FORWARDED],
        body_bytes=length,
        public_key=decoded(fields.get(PUBLIC_KEY)),
        expects_continue=http.they_are_waiting_for_100_continue,
        http=http,
    )


def single(data: bytes) -> dict[bytes, bytes]:
    """The headers as they came: h11 merges equal lengths. Raises Refused(400) where one that matters comes twice."""
    fields: dict[bytes, bytes] = {}
    for line in data.split(b"\r\n")[1:-2]:
        name, _, value = line.partition(b":")
        name = name.lower()
        if name in fields and name in ONCE:
            raise Refused(400)
        fields[name] = value.strip(b"\t ")
    return fields


def body_bytes(fields: dict[bytes, bytes]) -> int:
    if b"upgrade" in fields:
        raise Refused(400)
    length = fields.get(b"content-length")
    if b"transfer-encoding" in fields:
        raise Refused(411 if length is None else 400)  # no SuperNode sends chunks
    if length is not None and not DIGITS.fullmatch(length):
        raise Refused(400)
    return int(length or 0)


def decoded(public_key: bytes | None) -> bytes | None:
    try:
        return None if public_key is None else b64decode(public_key, validate=True)
    except NotBase64 as error:
        raise Refused(400) from error


def upstream_headers(head: Head, port: int) -> Headers:
    return [
        (b"host", b"127.0.0.1:%d" % port),
        *head.headers,
        (b"content-length", b"%d" % head.body_bytes),
    ]


def answer_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Those of an answer that go on to the client."""
    named = {
        name.strip().lower()
        for key, value in headers
        if key == b"connection"
        for name in value.split(b",")
    }
    return [(name, value) for name, value in headers if name not in HOP_BY_HOP | named]
