"""What somebody tries who wants the guard to hang, to hold memory, to wait for nothing, or to pass on what it should not."""

import socket
import ssl
import threading
from base64 import b64encode

import pytest
from loopback import (
    answer_on,
    ask,
    connect,
    head,
    make_certificate,
    post,
    status,
    until_closed,
    uvicorn_upstream,
    wait_until,
)

from fedcomp.deployment.guard import Guard
from fedcomp.deployment.limits import Limits

HERE = "127.0.0.1"
EVIL = b"POST /v1/control/start-run HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    with uvicorn_upstream() as upstream:
        yield upstream


@pytest.fixture
def upstream(server):
    server.arrived.clear()
    return server


@pytest.fixture
def guard(upstream):
    with Guard(HERE, 0, upstream.port) as running:
        yield running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("certificates"), "server", ["localhost", HERE])


def well(guard: Guard) -> bool:
    with connect(guard.port) as connection:
        connection.sendall(head("GET", "/health"))
        return answer_on(connection) == (200, b"")


# Other protocols, and other forms of this one.

CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), 400, id="HTTP/2 by prior knowledge"
        ),
        pytest.param(
            head(
                "GET",
                "/health",
                "Connection: Upgrade, HTTP2-Settings",
                "Upgrade: h2c",
                "HTTP2-Settings: AAMAAABk",
            ),
            400,
            id="h2c",
        ),
        pytest.param(
            head(
                "GET",
                "/health",
                "Connection: Upgrade",
                "Upgrade: websocket",
                "Sec-WebSocket-Key: x",
                "Sec-WebSocket-Version: 13",
            ),
            400,
            id="websocket",
        ),
        pytest.param(
            head(
                "POST",
                "/v1/fleet/get-run",
                "Content-Length: 0",
                "Upgrade: TLS/1.0",
                "Connection: Upgrade",
            ),
            400,
            id="TLS within",
        ),
        pytest.param(head("CONNECT", "127.0.0.1:22"), 404, id="CONNECT to an authority"),
        pytest.param(
            head("GET", "http://127.0.0.1/health"), 404, id="absolute form of a good path"
        ),
        pytest.param(
            head("POST", "http://127.0.0.1/v1/control/start-run", "Content-Length: 0"),
            404,
            id="absolute form",
        ),
        pytest.param(head("OPTIONS", "*"), 404, id="asterisk form"),
        pytest.param(b"GET /health\r\n\r\n", 400, id="HTTP/0.9"),
        pytest.param(
            head("POST", "/v1/fleet/get-run", CHUNKED)
            + b'5;name="a\r\n"\r\nhello\r\n0\r\n\r\n'
            + EVIL,
            411,
            id="extension of a chunk",
        ),
        pytest.param(
            head("POST", "/v1/fleet/get-run", CHUNKED, "Trailer: Content-Length")
            + b"0\r\nContent-Length: 9\r\n\r\n"
            + EVIL,
            411,
            id="trailers",
        ),
        pytest.param(
            head("POST", "/v1/fleet/get-run", CHUNKED) + b"FFFFFFFFFFFFFFFFF\r\n" + EVIL,
            411,
            id="a chunk without end",
        ),
        pytest.param(
            head("POST", "/v1/fleet/get-run", "Transfer-Encoding: gzip, chunked") + EVIL,
            400,
            id="two codings",
        ),
        pytest.param(
            head("POST", "/v1/fleet/get-run", "Transfer-Encoding:\x0bchunked", "Content-Length: 3")
            + EVIL,
            400,
            id="a coding in disguise",
        ),
        pytest.param(
            head("POST", "/v1/fleet/get-run", f"Content-Length: {2**63}") + EVIL,
            400,
            id="a length beyond numbers",
        ),
        pytest.param(
            head("POST", "/v1/fleet/get-run", "Content-Length : 3") + EVIL,
            400,
            id="a blank before the colon",
        ),
    ],
)
def test_no_other_protocol_is_spoken_and_nothing_behind_it_is_read(guard, upstream, data, expected):
    answer = ask(guard.port, data)
    assert (
        status(answer) == expected
        and answer.count(b"HTTP/1.1") == 1
        and answer.endswith(b"\r\n\r\n")
    )
    assert upstream.arrived == [] and well(guard)


def test_what_is_inside_a_body_is_no_request(guard, upstream):
    answer = ask(guard.port, post(EVIL, "Connection: close"))
    assert status(answer) == 200 and answer.count(b"HTTP/1.1") == 1
    assert [(request.path, request.body_bytes) for request in upstream.arrived] == [
        ("/v1/fleet/get-run", len(EVIL))
    ]


# Leave to send a body.


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        (["Content-Length: 9999"], {"body_bytes": 100}, 413),
        (["Content-Length: 9"], {"admits": lambda key: False}, 401),
        (["Content-Length: 99"], {"in_hand_bytes": 50}, 503),
    ],
)
def test_who_is_refused_gets_no_leave_to_send(upstream, lines, limits, expected):
    admits = limits.pop("admits", None)
    with Guard(HERE, 0, upstream.port, limits=Limits(**limits), admits=admits) as guard:
        answer = ask(guard.port, head("POST", "/v1/fleet/get-run", "Expect: 100-continue", *lines))
        assert status(answer) == expected and b" 100 " not in answer
    assert upstream.arrived == []


def test_leave_that_is_not_used_is_taken_back(upstream):
    with Guard(HERE, 0, upstream.port, limits=Limits(idle_s=0.3)) as guard:
        answer = ask(
            guard.port,
            head("POST", "/v1/fleet/get-run", "Content-Length: 9", "Expect: 100-continue"),
        )
        assert status(answer) == 100 and b"HTTP/1.1 408" in answer
        assert guard.in_hand_bytes == 0


def test_an_expectation_that_nobody_knows_changes_nothing(guard, upstream):
    assert status(ask(guard.port, post(b"x", "Expect: a-miracle", "Connection: close"))) == 200
    assert b"expect" not in dict(upstream.arrived[0].headers)


# Connections that are held.


def test_a_client_that_has_said_all_may_close_its_side_and_hear_the_answer(guard, upstream):
    with connect(guard.port) as connection:
        connection.sendall(post(b"hello") + post(b"5", path="/v1/fleet/pull-object"))
        connection.shutdown(socket.SHUT_WR)
        answer = until_closed(connection)
    assert answer.count(b"HTTP/1.1 200") == 2 and [
        request.whole for request in upstream.arrived
    ] == [True, True]


def test_a_client_that_closes_its_side_in_the_middle_is_not_waited_for(guard, upstream):
    for data in (b"", b"GET /hea", post(b"hello")[:-2]):
        with connect(guard.port) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            assert b"200" not in until_closed(connection)
    wait_until(lambda: not guard.visits)
    assert not any(request.whole for request in upstream.arrived) and well(guard)


def test_a_connection_that_nobody_has_believed_is_not_kept_as_long_as_a_clients(upstream):
    """Else whoever opens as many as there may be keeps clients out for as long as they are kept."""
    key = "flwr-public-key: " + b64encode(b"known").decode()
    with Guard(HERE, 0, upstream.port, limits=Limits(header_s=0.3, keep_alive_s=60.0)) as guard:
        with (
            connect(guard.port) as known,
            connect(guard.port) as silent,
            connect(guard.port) as curious,
        ):
            known.sendall(post(b"x", key))
            assert answer_on(known)[0] == 200
            curious.sendall(head("GET", "/health"))
            assert answer_on(curious)[0] == 200
            assert until_closed(silent) == until_closed(curious) == b""
            known.sendall(post(b"y", key))
            assert answer_on(known)[0] == 200


def test_handshakes_that_stall_keep_nobody_else_waiting(upstream, certificate):
    with Guard(HERE, 0, upstream.port, certificate=certificate[0], key=certificate[1]) as guard:
        held = [connect(guard.port) for _ in range(60)]
        for i, connection in enumerate(
            held
        ):  # nothing, the beginning of a hello, and one that is announced and does not come
            connection.sendall(
                [b"", b"\x16\x03\x01\x02\x00\x01", b"\x16\x03\x01\x40\x00" + bytes(100)][i % 3]
            )
        context = ssl.create_default_context(cafile=certificate[0])
        with (
            connect(guard.port) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(head("GET", "/health"))
            assert answer_on(secured) == (200, b"")
        for connection in held:
            connection.close()
        wait_until(lambda: not guard.visits)


def test_after_the_handshake_only_http_1_is_offered(upstream, certificate):
    with Guard(HERE, 0, upstream.port, certificate=certificate[0], key=certificate[1]) as guard:
        context = ssl.create_default_context(cafile=certificate[0])
        context.set_alpn_protocols(["h2"])
        with (
            connect(guard.port) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            assert secured.selected_alpn_protocol() is None
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert status(until_closed(secured)) == 400


# Floods.


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100_000)),
        b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"y" * 1_000_000,
        b"POST /" + b"v1/fleet/" * 100_000,
        head("POST", "/v1/fleet/get-run", "Content-Length: 5", "Cookie: " + "c" * 20_000),
    ],
    ids=["many headers", "one header", "a path", "a head that ends"],
)
def test_a_flood_of_head_is_refused_after_the_limit_and_never_held(guard, upstream, data):
    with connect(guard.port) as connection:
        sender = threading.Thread(target=flood, args=(connection, data))
        sender.start()
        assert status(until_closed(connection)) == 431
        sender.join()
    assert upstream.arrived == [] and well(guard)
    assert sum(traffic.received_bytes for traffic in guard.traffic.values()) < 2 << 20


def flood(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        pass  # it was closed


def test_an_address_that_has_all_its_connections_leaves_the_others_theirs(upstream):
    with Guard(
        "0.0.0.0", 0, upstream.port, limits=Limits(connections=12, connections_per_address=4)
    ) as guard:
        held = [connect(guard.port) for _ in range(4)]
        wait_until(lambda: len(guard.visits) == 4)
        assert status(ask(guard.port, head("GET", "/health"))) == 503
        with socket.create_connection(
            (HERE, guard.port), timeout=5, source_address=("127.0.0.2", 0)
        ) as other:
            other.sendall(head("GET", "/health"))
            assert answer_on(other) == (200, b"")
        for connection in held:
            connection.close()
