"""The guard, with raw sockets from outside and real servers behind it: what gets through, what is refused, what is counted."""

import hashlib
import http.client
import logging
import os
import re
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from base64 import b64encode
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from cases import for_each
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from loopback import (
    answer_on,
    ask,
    connect,
    counting_relay,
    head,
    make_certificate,
    post,
    raw_upstream,
    status,
    until_closed,
    uvicorn_upstream,
    wait_until,
)

from fedcomp.deployment import http_request as heads
from fedcomp.deployment.guard import Guard
from fedcomp.deployment.limits import Limits
from fedcomp.errors import ConfigError

HERE = "127.0.0.1"


@pytest.fixture(scope="module")
def server():
    with uvicorn_upstream() as upstream:
        yield upstream


@pytest.fixture
def upstream(server):
    server.arrived.clear()
    server.statuses.clear()
    return server


@pytest.fixture
def guard(upstream, caplog):
    with Guard(HERE, 0, upstream.port) as running:
        yield running
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == [], (
        "nothing was unforeseen"
    )


@contextmanager
def limited(upstream_port: int, **limits):
    with Guard(HERE, 0, upstream_port, limits=Limits(**limits)) as running:
        yield running


def still_works(guard: Guard) -> bool:
    with connect(guard.port) as connection:
        connection.sendall(head("GET", "/health"))
        return answer_on(connection) == (200, b"")


# What gets through


@pytest.mark.parametrize("route", sorted(heads.ROUTES), ids=lambda route: route[1].decode())
def test_each_route_gets_through_as_the_tables_own_string(guard, upstream, route):
    method, path = (part.decode() for part in route)
    body = b"3" if method == "POST" else b""
    answer = ask(
        guard.port, head(method, path, "Connection: close", f"Content-Length: {len(body)}") + body
    )
    assert status(answer) == 200
    (arrived,) = upstream.arrived
    assert (arrived.method, arrived.path, arrived.body_bytes, arrived.whole) == (
        method,
        path,
        len(body),
        True,
    )


BYPASSES = [
    "/v1/fleet/%2e%2e/control/run",
    "/v1/fleet/%2E%2E/control/start-run",
    "/v1/fleet/../control/run",
    "/v1/fleet/./get-run",
    "/v1/fleet/get-run/../../control/start-run",
    "/v1/fleet/..%2fcontrol/run",
    "/v1/fleet/..;/control/run",
    "/v1/fleet/get-run;/../control/run",
    "/v1/fleet/..\\control\\run",
    "\\v1\\fleet\\get-run",
    "//v1/fleet/get-run",
    "/v1//fleet/get-run",
    "/v1/fleet//get-run",
    "/v1/fleet/get-run/",
    "/V1/fleet/get-run",
    "/v1/fleet/Get-Run",
    "/v1/fleet/get%2drun",
    "/v1/fleet/get-run?",
    "/v1/fleet/get-run?x=/../control/run",
    "/v1/fleet/get-run#",
    "/v1/fleet/get-run%00",
    "/v1/fleet/get-run%0d%0a",
    "/v1/fleet",
    "/v1/fleet/",
    "/v1/fleet/no-such-thing",
    "/v1/control/start-run",
    "/v1/control/run",
    "/v1/runtime/acquire-task",
    "/v1/responses",
    "/docs",
    "/openapi.json",
    "/",
    "*",
    "v1/fleet/get-run",
    "http://h/v1/fleet/get-run",
    "http://h/v1/control/start-run",
    "http:/v1/fleet/get-run",
    "h:80",
    "/health",
]


@pytest.mark.parametrize("target", BYPASSES)
def test_no_other_target_gets_through(guard, upstream, target):
    answer = ask(guard.port, post(b"x", path=target))
    assert status(answer) == 404 and answer.endswith(b"\r\n\r\n") and b"Content-Length: 0" in answer
    assert upstream.arrived == []


MALFORMED = [
    "/v1/fleet/get-run\0",
    "/v1/fleet/get-run\t",
    "/v1/fleet/ get-run",
    "/v1/fleet/get\xadrun",
    "/v1/fleet/\xc0\xae\xc0\xae/control/start-run",
]


@pytest.mark.parametrize("target", MALFORMED)
def test_bytes_that_no_target_may_have_are_malformed(guard, upstream, target):
    answer = ask(guard.port, post(b"x", path=target))
    assert status(answer) == 400 and answer.endswith(b"\r\n\r\n")
    assert upstream.arrived == []


@pytest.mark.parametrize(
    "method",
    ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "post", "PRI", "X"],
)
def test_no_other_method_gets_through(guard, upstream, method):
    assert status(ask(guard.port, head(method, "/v1/fleet/get-run"))) == 404
    if method != "GET":
        assert status(ask(guard.port, head(method, "/health"))) == 404
    assert upstream.arrived == []


SMUGGLED = post(path="/v1/fleet/push-object")


@pytest.mark.parametrize(
    "data",
    [
        head("POST", "/v1/fleet/get-run", "Content-Length: 0", "Transfer-Encoding: chunked")
        + b"0\r\n\r\n"
        + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "Content-Length: 0", f"Content-Length: {len(SMUGGLED)}")
        + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "Content-Length: 0", "Content-Length: 0") + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "Transfer-Encoding: xchunked") + b"0\r\n\r\n" + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "X: a", " Content-Length: 9") + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "X: a\rb") + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "X: a\nContent-Length: 9") + SMUGGLED,
        head("POST", "/v1/fleet/get-run", "Host: g") + SMUGGLED,
        b"\r\n" + SMUGGLED,
        b"GET /health HTTP/1.1\nHost: h\n\n" + SMUGGLED,
    ],
)
def test_what_could_smuggle_a_request_ends_the_connection(guard, upstream, data):
    answer = ask(guard.port, data)
    assert (
        status(answer) == 400 and answer.count(b"HTTP/1.1") == 1 and b"Connection: close" in answer
    )
    assert upstream.arrived == []


def test_a_refusal_ends_the_connection_and_what_follows_is_not_read(guard, upstream):
    answer = ask(guard.port, head("GET", "/health") + head("GET", "/docs") + head("GET", "/health"))
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404"]
    assert len(upstream.arrived) == 1


def test_headers_go_on_when_the_fleet_api_has_them_and_stop_when_they_are_anyone_elses(
    guard, upstream
):
    lines = [
        "User-Agent: u",
        "Accept: a",
        "Content-Type: application/x-protobuf",
        "FLWR-Timestamp: now",
        "Connection: close, X-Mine",
    ]
    ours = [
        "X-Mine: 1",
        "Keep-Alive: 5",
        "TE: trailers",
        "Trailer: t",
        "Proxy-Authorization: p",
        "Cookie: c",
        "Authorization: a",
    ]
    theirs = [
        "X-Forwarded-For: 8.8.8.8",
        "Forwarded: for=x",
        "flwr-task-token: t",
        "X-HTTP-Method-Override: PUT",
    ]
    ask(guard.port, post(b"x", *lines, *ours, *theirs))
    assert sorted(upstream.arrived[0].headers) == [
        (b"accept", b"a"),
        (b"content-length", b"1"),
        (b"content-type", b"application/x-protobuf"),
        (b"flwr-timestamp", b"now"),
        (b"host", b"127.0.0.1:%d" % upstream.port),
        (b"user-agent", b"u"),
    ]


def test_headers_of_the_upstreams_connection_do_not_reach_the_client(guard):
    answer = ask(guard.port, post(b"x", "Connection: close")).lower()
    assert (
        b"x-inner" not in answer
        and b"keep-alive" not in answer
        and b"\r\nconnection: close\r\n" in answer
    )


def test_the_header_that_a_supernode_sends_and_the_superlink_reads_all_go_on(guard, upstream):
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key = ec.generate_private_key(ec.SECP384R1())
    sent: set[bytes] = set()

    class Spy:
        def intercept(self, context, call_next):
            sent.update(name.lower().encode() for name in context.request.headers)
            return call_next(context)

    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(key, key.public_key()),
        Spy(),
    ]
    with FleetHttpClient.from_server_address(
        f"{HERE}:{guard.port}", True, None, interceptors=interceptors
    ) as client:
        with pytest.raises(ValueError, match="protobuf"):
            client.PullMessages(PullMessagesRequest())
    assert sent - {name for name, _ in upstream.arrived[0].headers} == {
        b"accept-encoding",
        b"connection",
    }
    (owner,) = guard.traffic
    assert owner == key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


# Streams


GUARD_ALONE = """
import sys, time
from fedcomp.deployment.guard import Guard
with Guard("127.0.0.1", 0, int(sys.argv[1])) as guard:
    print(guard.port, flush=True)
    sys.stdin.read()
"""


@contextmanager
def guard_alone(upstream_port: int):
    """A guard in a process of its own, where its memory can be measured: process and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", GUARD_ALONE, str(upstream_port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def peak_bytes(process: subprocess.Popen) -> int:
    text = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", text)[1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_200_mb_pass_in_both_directions_and_are_never_held(upstream):
    count, piece = 200_000_000, os.urandom(1_000_000)
    with guard_alone(upstream.port) as (process, port), connect(port) as connection:
        connection.settimeout(60)
        before = peak_bytes(process)
        connection.sendall(head("POST", "/v1/fleet/push-object", f"Content-Length: {count}"))
        for _ in range(200):
            connection.sendall(piece)
        digest = hashlib.sha256(piece * 200).hexdigest()
        assert answer_on(connection) == (200, digest.encode())
        connection.sendall(post(b"%d" % count, path="/v1/fleet/pull-object"))
        response = http.client.HTTPResponse(connection)
        response.begin()
        received = 0
        while data := response.read(1 << 20):
            received += len(data)
        assert received == count
        assert peak_bytes(process) - before < 8_000_000


def test_a_client_is_slowed_down_to_what_the_upstream_takes():
    over = threading.Event()
    with (
        raw_upstream(lambda connection: over.wait(10)) as port,
        Guard(HERE, 0, port) as guard,
        connect(guard.port) as connection,
    ):
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.sendall(
                head("POST", "/v1/fleet/push-object", "Content-Length: 200000000")
                + bytes(200_000_000)
            )
        assert guard.traffic[HERE].received_bytes < 30_000_000, (
            "what fits into the buffers of two sockets"
        )
        over.set()


def test_a_connection_serves_one_request_after_the_other(guard, upstream):
    with connect(guard.port) as connection:
        for number in range(20):
            body = b"%d" % number
            connection.sendall(post(body))
            assert answer_on(connection) == (200, hashlib.sha256(body).hexdigest().encode())
        assert len(guard.visits) == 1
    assert len(upstream.arrived) == 20


def test_requests_that_are_sent_ahead_are_answered_in_their_order(guard, upstream):
    bodies = [os.urandom(size) for size in (0, 1, 70_000, 3, 200_000, 5)]
    answer = ask(
        guard.port,
        b"".join(post(body) for body in bodies) + head("GET", "/health", "Connection: close"),
    )
    digests = [hashlib.sha256(body).hexdigest().encode() for body in bodies]
    assert [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [
        *digests,
        b"",
    ]


def test_a_body_may_come_byte_by_byte_and_its_head_too(guard, upstream):
    with connect(guard.port) as connection:
        for byte in post(b"hello"):
            connection.sendall(bytes([byte]))
        assert answer_on(connection) == (200, hashlib.sha256(b"hello").hexdigest().encode())


def test_a_client_that_waits_for_leave_to_send_its_body_gets_it(guard, upstream):
    with connect(guard.port) as connection:
        connection.sendall(
            head("POST", "/v1/fleet/get-run", "Content-Length: 5", "Expect: 100-continue")
        )
        assert connection.recv(100) == b"HTTP/1.1 100 \r\n\r\n"
        connection.sendall(b"hello")
        assert answer_on(connection)[0] == 200
    assert (
        status(ask(guard.port, head("POST", "/docs", "Content-Length: 5", "Expect: 100-continue")))
        == 404
    )


# Accidents


def test_a_client_that_leaves_in_the_middle_of_its_body_is_not_taken_for_one_that_finished(
    guard, upstream
):
    with connect(guard.port) as connection:
        connection.sendall(
            head("POST", "/v1/fleet/push-object", "Content-Length: 1000000") + bytes(300_000)
        )
        wait_until(lambda: upstream.arrived and upstream.arrived[0].body_bytes == 300_000)
    wait_until(lambda: not guard.visits)
    assert not upstream.arrived[0].whole
    assert still_works(guard)


def test_a_client_that_leaves_in_the_middle_of_its_answer_harms_nobody(guard):
    with connect(guard.port) as connection:
        connection.sendall(post(b"100000000", path="/v1/fleet/pull-object"))
        connection.recv(100_000)
    wait_until(lambda: not guard.visits)
    assert still_works(guard)


def test_an_upstream_that_is_down_is_a_bad_gateway_and_may_come_back(upstream):
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    with Guard(HERE, 0, port) as guard:
        assert status(ask(guard.port, head("GET", "/health"))) == 502
        guard.upstream_port = upstream.port
        assert still_works(guard)


def test_an_upstream_that_is_restarted_between_two_requests_is_found_again(upstream):
    """The connection kept for the next request is gone by then."""

    def once(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with (
        raw_upstream(once) as port,
        Guard(HERE, 0, port) as guard,
        connect(guard.port) as connection,
    ):
        for _ in range(3):
            connection.sendall(post(b"x"))
            assert answer_on(connection)[0] == 200
            time.sleep(0.05)


@for_each(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nConte",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    ],
)
def test_an_upstream_that_dies_before_it_answers_is_a_bad_gateway(said):
    def die(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(said)

    with raw_upstream(die) as port, Guard(HERE, 0, port) as guard:
        assert status(ask(guard.port, post(b"x"))) == 502


@for_each(
    "said",
    [
        b"Content-Length: 1000\r\n\r\n" + bytes(500),
        b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ],
)
def test_an_upstream_that_dies_in_the_middle_of_its_answer_leaves_it_visibly_unfinished(said):
    def die(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + said)

    with (
        raw_upstream(die) as port,
        Guard(HERE, 0, port) as guard,
        connect(guard.port) as connection,
    ):
        connection.sendall(post(b"x"))
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            answer_on(connection)


def test_an_upstream_that_says_nothing_is_a_gateway_timeout():
    with (
        raw_upstream(lambda connection: until_closed(connection)) as port,
        limited(port, upstream_s=0.2) as guard,
    ):
        assert status(ask(guard.port, post(b"x"))) == 504


def test_an_upstream_that_answers_before_the_body_is_through_is_heard():
    def hasty(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 418 Too soon\r\nContent-Length: 2\r\n\r\nno")
        time.sleep(0.2)

    with (
        raw_upstream(hasty) as port,
        Guard(HERE, 0, port) as guard,
        connect(guard.port) as connection,
    ):
        connection.sendall(
            head("POST", "/v1/fleet/push-object", "Content-Length: 1000000") + bytes(1000)
        )
        answer = until_closed(connection)
        assert (
            status(answer) == 418
            and b"connection: close" in answer.lower()
            and answer.endswith(b"no")
        )


# Limits


def test_a_body_over_the_limit_is_refused_before_it_is_sent(upstream):
    with limited(upstream.port, body_bytes=1000) as guard:
        assert (
            status(ask(guard.port, head("POST", "/v1/fleet/get-run", "Content-Length: 1001")))
            == 413
        )
        assert upstream.arrived == []
        assert status(ask(guard.port, post(bytes(1000), "Connection: close"))) == 200
        assert guard.refused == {413: 1}


def test_a_client_that_sends_its_huge_body_all_the_same_can_read_why_it_is_refused(upstream):
    with limited(upstream.port, body_bytes=1000) as guard, connect(guard.port) as connection:
        connection.sendall(post(bytes(500_000)))
        assert status(until_closed(connection)) == 413


@pytest.mark.parametrize(
    "data",
    [
        head("GET", "/health", "X: " + "x" * 2000),
        b"GET /" + b"x" * 5000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000,
    ],
)
def test_headers_over_the_limit_are_refused(upstream, data):
    with limited(upstream.port, header_bytes=1000) as guard:
        assert status(ask(guard.port, data)) == 431
        assert still_works(guard)


def test_a_head_may_be_as_long_as_the_limit_says(upstream):
    with limited(upstream.port, header_bytes=1000) as guard:
        room = 1000 - len(head("GET", "/health", "Connection: close", "X: "))
        assert (
            status(ask(guard.port, head("GET", "/health", "Connection: close", "X: " + "x" * room)))
            == 200
        )
        assert (
            status(
                ask(
                    guard.port,
                    head("GET", "/health", "Connection: close", "X: " + "x" * (room + 1)),
                )
            )
            == 431
        )


@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_connections_over_the_limit_are_told_so_and_let_in_once_others_leave(upstream, limit):
    with limited(upstream.port, **{limit: 3}) as guard:
        held = [connect(guard.port) for _ in range(3)]
        wait_until(lambda: len(guard.visits) == 3)
        answer = ask(guard.port, head("GET", "/health"))
        assert status(answer) == 503 and b"Retry-After" in answer
        held[0].sendall(head("GET", "/health"))
        assert answer_on(held[0])[0] == 200
        held.pop().close()
        wait_until(lambda: len(guard.visits) == 2)
        assert still_works(guard)
        for connection in held:
            connection.close()
        wait_until(lambda: not guard.visits and not guard.by_address)


def test_a_flood_of_connections_is_closed_unheard_and_the_guard_outlives_it(upstream):
    with limited(upstream.port, connections=5) as guard:
        held = [connect(guard.port) for _ in range(300)]
        wait_until(lambda: guard.refused[503] == 295)
        assert len(guard.visits) == 5
        for connection in held:
            connection.close()
        wait_until(lambda: not guard.visits)
        assert still_works(guard)


def test_requests_faster_than_the_rate_wait_and_then_are_too_many(upstream):
    with (
        limited(upstream.port, requests_per_s=20, burst=3, patience_s=0.3) as guard,
        connect(guard.port) as connection,
    ):
        begin = time.monotonic()
        for _ in range(6):
            connection.sendall(head("GET", "/health"))
            assert answer_on(connection)[0] == 200
        assert (
            time.monotonic() - begin >= 0.9 * 4 / 20
        )  # the connection was one, then two, then four had to wait
    with limited(upstream.port, requests_per_s=0.1, burst=3, patience_s=0.3) as guard:
        answer = ask(guard.port, 3 * head("GET", "/health"))
        assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [
            b"200",
            b"200",
            b"429",
        ] and b"Retry-After" in answer
    with limited(upstream.port, requests_per_s=0.1, burst=1, patience_s=0) as guard:
        with connect(guard.port):
            assert status(ask(guard.port, b"")) == 429, "connections are counted too"


def test_a_head_that_does_not_end_is_timed_out(upstream):
    with limited(upstream.port, header_s=0.3) as guard, connect(guard.port) as connection:
        begin = time.monotonic()
        for byte in b"GET /health HTT":
            connection.sendall(bytes([byte]))
            time.sleep(0.01)
        assert status(until_closed(connection)) == 408
        assert time.monotonic() - begin < 3


def test_a_body_that_stops_is_timed_out_and_so_is_one_that_trickles(upstream):
    with limited(upstream.port, idle_s=0.3) as guard:
        assert (
            status(ask(guard.port, head("POST", "/v1/fleet/get-run", "Content-Length: 5") + b"hel"))
            == 408
        )
        with connect(guard.port) as connection:
            connection.sendall(head("POST", "/v1/fleet/get-run", "Content-Length: 100"))
            begin = time.monotonic()
            for _ in range(10):
                connection.sendall(b"x")
                time.sleep(0.1)
                if guard.refused[408] == 2:
                    break
            assert guard.refused[408] == 2 and time.monotonic() - begin < 1
    wait_until(lambda: len(upstream.arrived) == 2)
    assert not any(request.whole for request in upstream.arrived)


def test_a_client_that_does_not_take_its_answer_is_let_go(upstream):
    with limited(upstream.port, idle_s=0.3) as guard, connect(guard.port) as connection:
        connection.sendall(post(b"100000000", path="/v1/fleet/pull-object"))
        wait_until(lambda: guard.visits)
        wait_until(lambda: not guard.visits)


def test_a_connection_without_requests_is_closed_without_a_word(upstream):
    with limited(upstream.port, keep_alive_s=0.2) as guard, connect(guard.port) as connection:
        assert until_closed(connection) == b""
        assert guard.refused == {}


def test_slow_clients_do_not_keep_others_waiting(guard):
    slow = [connect(guard.port) for _ in range(50)]
    for connection in slow:
        connection.sendall(head("POST", "/v1/fleet/get-run", "Content-Length: 5") + b"he")
    begin = time.monotonic()
    assert still_works(guard) and time.monotonic() - begin < 2
    for connection in slow:
        connection.close()


def test_a_key_that_is_not_admitted_is_refused_before_its_body_is_read(upstream):
    known = "flwr-public-key: " + b64encode(b"known").decode()
    with Guard(HERE, 0, upstream.port, admits=lambda key: key == b"known") as guard:
        begun = head(
            "POST",
            "/v1/fleet/get-run",
            "Content-Length: 9",
            "flwr-public-key: " + b64encode(b"stranger").decode(),
        )
        assert status(ask(guard.port, begun)) == 401
        assert status(ask(guard.port, post(b"x"))) == 401
        assert upstream.arrived == []
        assert status(ask(guard.port, post(b"x", known, "Connection: close"))) == 200
        assert still_works(guard), "health is for everybody"


def test_bodies_on_their_way_are_limited_together(upstream):
    with limited(upstream.port, in_hand_bytes=1000) as guard, connect(guard.port) as slow:
        slow.sendall(head("POST", "/v1/fleet/get-run", "Content-Length: 600") + b"begun")
        wait_until(lambda: guard.in_hand_bytes == 600)
        assert status(ask(guard.port, post(bytes(401)))) == 503
        assert status(ask(guard.port, post(bytes(400), "Connection: close"))) == 200
        slow.sendall(bytes(595))
        assert answer_on(slow)[0] == 200
        assert status(ask(guard.port, post(bytes(1000), "Connection: close"))) == 200
        assert guard.in_hand_bytes == 0


def test_what_nobody_foresaw_ends_one_connection_and_is_logged(upstream, caplog):
    with Guard(HERE, 0, upstream.port, admits=lambda key: 1 / 0) as guard:
        assert status(ask(guard.port, post(b"x", "flwr-public-key: YQ=="))) == 500
        assert still_works(guard)
    assert "ZeroDivisionError" in caplog.text


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    return {
        name: make_certificate(folder, name, hosts)
        for name, hosts in {
            "server": ["localhost", HERE],
            "elsewhere": ["example.org"],
            "other": ["localhost", HERE],
        }.items()
    }


@pytest.fixture
def tls(upstream, certificates, caplog):
    certificate, key = certificates["server"]
    with Guard(HERE, 0, upstream.port, certificate=certificate, key=key) as running:
        yield running
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def trusting(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificate)
    return context


def test_tls_ends_at_the_guard(tls, upstream, certificates):
    body = os.urandom(1_000_000)
    with httpx.Client(verify=trusting(certificates["server"][0])) as client:
        answer = client.post(f"https://localhost:{tls.port}/v1/fleet/get-run", content=body)
        assert answer.text == hashlib.sha256(body).hexdigest()
        assert (
            len(
                client.post(
                    f"https://localhost:{tls.port}/v1/fleet/pull-object", content=b"3000000"
                ).content
            )
            == 3_000_000
        )
        assert client.get(f"https://localhost:{tls.port}/docs").status_code == 404
    assert len(upstream.arrived) == 2


def test_a_wrong_ca_a_wrong_name_and_an_old_version_are_refused_by_tls(tls, upstream, certificates):
    def fails(context: ssl.SSLContext, name: str, cause: str) -> None:
        with connect(tls.port) as connection, pytest.raises(ssl.SSLError, match=cause):
            context.wrap_socket(connection, server_hostname=name)

    fails(trusting(certificates["other"][0]), "localhost", "CERTIFICATE_VERIFY_FAILED")
    fails(trusting(certificates["server"][0]), "example.org", "Hostname mismatch")
    old = trusting(certificates["server"][0])
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with (
        connect(tls.port) as connection,
        old.wrap_socket(connection, server_hostname="localhost") as secured,
    ):
        assert secured.version() == "TLSv1.2"
    assert tls.tls.minimum_version is ssl.TLSVersion.TLSv1_2
    with httpx.Client(verify=trusting(certificates["server"][0])) as client:
        assert client.get(f"https://localhost:{tls.port}/health").status_code == 200


def test_plain_http_on_the_tls_port_reaches_nothing(tls, upstream):
    with connect(tls.port) as connection:
        connection.sendall(head("GET", "/health"))
        with suppress_reset():
            assert b"200" not in until_closed(connection)
    assert upstream.arrived == []


@contextmanager
def suppress_reset():
    try:
        yield
    except ConnectionResetError:
        pass


def test_a_handshake_that_does_not_end_is_timed_out(upstream, certificates):
    certificate, key = certificates["server"]
    with Guard(
        HERE, 0, upstream.port, certificate=certificate, key=key, limits=Limits(header_s=0.3)
    ) as guard:
        with connect(guard.port) as connection:
            connection.sendall(b"\x16\x03\x01")
            with suppress_reset():
                assert until_closed(connection) == b""
        wait_until(lambda: not guard.visits)


def test_connections_faster_than_the_rate_get_no_handshake(upstream, certificates):
    certificate, key = certificates["server"]
    slow = Limits(requests_per_s=0.1, burst=1, patience_s=0)
    with (
        Guard(HERE, 0, upstream.port, certificate=certificate, key=key, limits=slow) as guard,
        connect(guard.port),
    ):
        assert ask(guard.port, b"") == b""
        assert guard.refused == {429: 1}


def test_a_refusal_under_tls_is_read_too(upstream, certificates):
    certificate, key = certificates["server"]
    with Guard(
        HERE,
        0,
        upstream.port,
        certificate=certificate,
        key=key,
        limits=Limits(connections=1, body_bytes=10),
    ) as guard:
        with httpx.Client(verify=trusting(certificate)) as client, connect(guard.port):
            wait_until(lambda: guard.visits)
            assert client.get(f"https://localhost:{guard.port}/health").status_code == 503
        wait_until(lambda: not guard.visits)
        with httpx.Client(verify=trusting(certificate)) as client:
            assert (
                client.post(
                    f"https://localhost:{guard.port}/v1/fleet/get-run", content=bytes(100_000)
                ).status_code
                == 413
            )


def test_certificates_that_do_not_work_are_named_with_the_fix(upstream, certificates, tmp_path):
    certificate, key = certificates["server"]
    secret = tmp_path / "secret.key"
    secret.write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"word"),
        )
    )
    missing, strangers = tmp_path / "none.crt", certificates["other"][1]
    for wrong in (
        (certificate, None),
        (None, key),
        (missing, key),
        (certificate, strangers),
        (key, key),
        (certificate, secret),
    ):
        with pytest.raises(ConfigError, match="certificate"):
            Guard(HERE, 0, upstream.port, certificate=wrong[0], key=wrong[1])


# Bytes


def test_bytes_counted_are_the_bytes_that_the_socket_carried(guard):
    with counting_relay(guard.port) as (port, carried), connect(port) as connection:
        for body in (b"", b"hello", os.urandom(300_000)):
            connection.sendall(post(body))
            answer_on(connection)
        connection.sendall(post(b"400000", path="/v1/fleet/pull-object"))
        answer_on(connection)
        connection.sendall(head("GET", "/docs"))
        until_closed(connection)
        wait_until(lambda: not guard.visits)
        assert guard.traffic == {HERE: tuple(carried)}
        assert carried[0] > 300_000 and carried[1] > 400_000


def test_bytes_of_tls_are_counted_with_its_handshake_and_records(tls, certificates):
    with counting_relay(tls.port) as (port, carried):
        context = trusting(certificates["server"][0])
        with (
            connect(port) as connection,
            context.wrap_socket(connection, server_hostname="localhost") as secured,
        ):
            secured.sendall(post(os.urandom(300_000), "Connection: close"))
            answer_on(secured)
        wait_until(lambda: not tls.visits)
        assert tls.traffic == {HERE: tuple(carried)}
        assert carried[0] > 300_500


def test_bytes_are_a_nodes_once_the_superlink_believes_its_key(guard, upstream):
    key = "flwr-public-key: " + b64encode(b"a key").decode()
    first, second, third = (
        post(b"hello", key),
        post(b"hello"),
        post(b"hello", "flwr-public-key: " + b64encode(b"another").decode()),
    )
    with connect(guard.port) as connection:
        connection.sendall(first)
        answer_on(connection)
        assert guard.traffic[b"a key"].received_bytes == len(first)
        connection.sendall(second)  # the same connection is the same node
        answer_on(connection)
        assert guard.traffic[b"a key"].received_bytes == len(first) + len(second)
        connection.sendall(third)
        answer_on(connection)
    assert {client: carried.received_bytes for client, carried in guard.traffic.items()} == {
        b"a key": len(first) + len(second),
        b"another": len(third),
    }


@pytest.mark.parametrize("code", [400, 401, 403, 500])
def test_a_key_that_the_superlink_does_not_believe_is_nobodys(guard, upstream, code):
    upstream.statuses["/v1/fleet/get-run"] = code
    assert (
        status(
            ask(
                guard.port,
                post(
                    b"hello",
                    "flwr-public-key: " + b64encode(b"stolen").decode(),
                    "Connection: close",
                ),
            )
        )
        == code
    )
    assert list(guard.traffic) == [HERE]


def test_health_makes_no_one_a_node(guard):
    ask(
        guard.port,
        head(
            "GET",
            "/health",
            "flwr-public-key: " + b64encode(b"stolen").decode(),
            "Connection: close",
        ),
    )
    assert list(guard.traffic) == [HERE]


def test_bytes_are_seen_while_they_pass(guard):
    with connect(guard.port) as connection:
        connection.sendall(
            head("POST", "/v1/fleet/get-run", "Content-Length: 100000") + bytes(50_000)
        )
        wait_until(lambda: guard.traffic.get(HERE, (0, 0))[0] > 50_000)


# Start and stop


def test_stopping_closes_the_port_every_connection_and_the_thread(upstream):
    threads = threading.active_count()
    with Guard(HERE, 0, upstream.port) as guard:
        connection = connect(guard.port)
        connection.sendall(post(b"x"))
        answer_on(connection)
        begin = time.monotonic()
    assert time.monotonic() - begin < 2 and threading.active_count() == threads
    with connection, suppress_reset():
        assert connection.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        connect(guard.port)
    guard.stop()


def test_stopping_lets_a_request_in_hand_end(upstream):
    def slow(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        time.sleep(0.3)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with raw_upstream(slow) as port:
        with Guard(HERE, 0, port) as guard:
            connection = connect(guard.port)
            connection.sendall(post(b"x"))
            wait_until(lambda: guard.visits and next(iter(guard.visits)).busy)
        with connection:
            assert answer_on(connection)[0] == 200


def test_a_port_that_is_taken_and_a_host_that_is_not_here_are_named_with_the_fix(guard):
    with pytest.raises(ConfigError, match=f"port {guard.port} of 127.0.0.1 .* --port"):
        Guard(HERE, guard.port, 1).start()
    with pytest.raises(ConfigError, match="address of this machine"):
        Guard("192.0.2.1", 0, 1).start()


# A SuperLink


@pytest.fixture(scope="module")
def superlink(tmp_path_factory):
    """A real SuperLink on loopback: its port."""
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    scripts = sysconfig.get_path("scripts")
    env = os.environ | {
        "FLWR_HOME": str(tmp_path_factory.mktemp("flwr")),
        "PATH": scripts + os.pathsep + os.environ["PATH"],
    }
    command = [f"{scripts}/flower-superlink", "--insecure", "--host", HERE, "--port", str(port)]
    command.append("--disable-runtime-dependency-installation")
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: process.poll() is not None or answers(port), 60)
        assert process.poll() is None
        yield port
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    try:
        return status(ask(port, head("GET", "/health", "Connection: close"))) == 200
    except OSError:
        return False


@pytest.mark.deploy
def test_a_supernode_lives_behind_the_guard_and_nobody_submits_code_through_it(superlink):
    from flwr.supernode.fleet_http_connection import http_request_response

    with Guard(HERE, 0, superlink) as guard:
        with http_request_response(f"{HERE}:{guard.port}", insecure=True) as (node, receive, *_):
            assert node and receive() is None
            (owner,) = guard.traffic
            assert owner.startswith(b"-----BEGIN PUBLIC KEY-----")
            assert min(guard.traffic[owner]) > 300
        protobuf = "Content-Type: application/protobuf"
        for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs", "/openapi.json"):
            direct, through = (
                ask(port, post(b"", protobuf, "Connection: close", path=path))
                for port in (superlink, guard.port)
            )
            assert status(through) == 404 and through.endswith(b"\r\n\r\n")
            assert b"uvicorn" in direct
        assert (
            status(
                ask(
                    superlink,
                    post(b"", protobuf, "Connection: close", path="/v1/control/list-runs"),
                )
            )
            == 200
        )
