"""What the public port lets through: an exact list, and no head that two parsers could read in two ways."""

import re
from base64 import b64encode
from pathlib import Path

import flwr
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.deployment import http_request as heads
from fedcomp.deployment.http_request import Refused

GOOD = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n"


def refusal(data: bytes) -> int:
    with pytest.raises(Refused) as refused:
        heads.read(data)
    return refused.value.status


def with_lines(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST /v1/fleet/get-run HTTP/1.1", *lines, b"", b""])


def test_the_table_is_the_fleet_api_of_the_installed_flwr():
    from flwr.superlink.routers.fleet.router import router

    assert {
        (method.encode(), route.path.encode())
        for route in router.routes
        for method in route.methods
    } == heads.FLEET


def test_the_supernode_of_the_installed_flwr_uses_all_of_it_and_nothing_else():
    source = (Path(flwr.__file__).parent / "supernode" / "fleet_http_client.py").read_text(
        encoding="utf-8"
    )
    assert {
        (b"POST", path.encode()) for path in re.findall(r'path="([^"]+)"', source)
    } == heads.FLEET


def test_what_goes_on_is_the_tables_own_string():
    for route in heads.FLEET | {heads.HEALTH}:
        head = heads.read(b"%s %s HTTP/1.1\r\nhost: h\r\n\r\n" % route)
        assert any(
            head.method is method and head.path is path for method, path in heads.ROUTES.values()
        )


def test_a_head_tells_what_the_guard_needs():
    key = b64encode(b"the key")
    lines = (
        b"HOST: h",
        b"Content-Length:\t7 ",
        b"FLWR-Public-Key: " + key,
        b"Expect: 100-continue",
        b"X-Forwarded-For: 1.2.3.4",
    )
    head = heads.read(with_lines(*lines, b"Cookie: c"))
    assert (head.body_bytes, head.public_key, head.expects_continue) == (7, b"the key", True)
    assert head.headers == [(b"flwr-public-key", key)]


@for_each(
    "lines",
    [
        (b"Host: h", b"Host: h"),
        (),
        (b"Content-Length: 5",),  # no host
        (b"Host: h", b"Content-Length: 5", b"Content-Length: 5"),
        (b"Host: h", b"Content-Length: 5", b"content-length: 6"),
        (b"Host: h", b"Content-Length: 5, 5"),
        (b"Host: h", b"Content-Length: +5"),
        (b"Host: h", b"Content-Length: 0x5"),
        (b"Host: h", b"Content-Length: 5 5"),
        (b"Host: h", b"Content-Length: -1"),
        (b"Host: h", b"Content-Length:"),
        (b"Host: h", b"Content-Length: " + b"9" * 16),
        (b"Host: h", b"Content-Length : 5"),
        (b"Host: h", b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (b"Host: h", b"Transfer-Encoding: chunked", b"Content-Length: 5"),
        (b"Host: h", b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"),
        (b"Host: h", b"Transfer-Encoding: chunked, identity"),
        (b"Host: h", b"Transfer-Encoding: xchunked"),
        (b"Host: h", b"Transfer-Encoding : chunked"),
        (b"Host: h", b"Transfer-Encoding: \x0bchunked"),
        (b"Host: h", b"X: a", b" folded"),
        (b"Host: h", b"X: a", b"\tfolded"),
        (b" Host: h",),
        (b"Host: h", b"X: a\rContent-Length: 5"),
        (b"Host: h", b"X: a\nContent-Length: 5"),
        (b"Host: h\n",),
        (b"Host: h\r",),
        (b"Host: h", b"X: \x00"),
        (b"Host: h", b"X: \x7f"),
        (b"Host: h", b"X: \xff"),
        (b"Host: h", b": nameless"),
        (b"Host: h", b"no colon"),
        (b"Host: h", b"X(: a"),
        (b"Host: h", b"Upgrade: h2c", b"Connection: Upgrade"),
        (b"Host: h", b"flwr-public-key: YQ==", b"flwr-public-key: Yg=="),
        (b"Host: h", b"flwr-public-key: not base64!"),
        (b"Host: h", b"flwr-signature: a", b"Flwr-Signature: b"),
    ],
)
def test_a_head_that_can_be_read_in_two_ways_is_malformed(lines):
    assert refusal(with_lines(*lines)) == 400


@for_each(
    "line",
    [
        b"POST  /v1/fleet/get-run HTTP/1.1",
        b"POST /v1/fleet/get-run  HTTP/1.1",
        b" POST /v1/fleet/get-run HTTP/1.1",
        b"POST\t/v1/fleet/get-run HTTP/1.1",
        b"POST /v1/fleet/get-run http/1.1",
        b"POST /v1/fleet/get-run",
        b"POST /v1/fleet/get-run HTTP/1.1 ",
        b"POST /v1/fleet/get-run HTTP/11",
        b"PO(ST /v1/fleet/get-run HTTP/1.1",
        b"",
    ],
)
def test_a_request_line_has_one_form(line):
    assert refusal(line + b"\r\nHost: h\r\n\r\n") == 400


@for_each("version", [b"1.0", b"0.9", b"2.0", b"1.2"])
def test_no_other_version_is_spoken(version):
    assert refusal(b"GET /health HTTP/%s\r\nHost: h\r\n\r\n" % version) == 505


def test_chunks_are_refused():
    assert refusal(with_lines(b"Host: h", b"Transfer-Encoding: chunked")) == 411


def test_health_has_no_body():
    assert refusal(b"GET /health HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\n") == 400


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_or_a_route(data):
    try:
        head = heads.read(data + b"\r\n\r\n")
    except Refused:
        return
    assert (head.method, head.path) in heads.ROUTES


@given(st.data())
def test_a_good_head_with_a_byte_changed_reaches_no_other_route(data):
    at = data.draw(st.integers(0, len(GOOD) - 5))
    changed = GOOD[:at] + data.draw(st.binary(max_size=3)) + GOOD[at + 1 :]
    try:
        assert heads.read(changed).path == b"/v1/fleet/get-run"
    except Refused:
        pass


@given(st.lists(st.integers(1, len(GOOD) - 1), max_size=6))
def test_where_a_head_is_cut_into_pieces_does_not_matter(cuts):
    buffer, seen = bytearray(), 0
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(GOOD)]):
        assert heads.find_end(buffer, seen) == 0
        seen = len(buffer)
        buffer += GOOD[begin:end]
    assert heads.find_end(buffer + b"hello", seen) == len(GOOD)


@for_each(
    "start",
    [b"\x16\x03\x01", b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\rX", b"GET /\x00", b"GET /\xc3\xa9"],
)
def test_what_cannot_become_a_head_is_refused_before_it_ends(start):
    with pytest.raises(Refused):
        heads.find_end(bytearray(start), 0)


def test_headers_of_one_connection_stay_there():
    answered = [
        (b"connection", b"close, X-Inner"),
        (b"x-inner", b"1"),
        (b"keep-alive", b"5"),
        (b"content-length", b"3"),
    ]
    assert heads.answer_headers(answered) == [(b"content-length", b"3")]
