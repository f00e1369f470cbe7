"""The port of the page: loopback, GET /metrics and nothing else, and a reader that hangs holds nobody up."""

import socket
import urllib.error
import urllib.request

import pytest
from loopback import ask, connect, head, status, until_closed, wait_until

from fedcomp.errors import ConfigError
from fedcomp.server import metrics_port
from fedcomp.server.exposition import CONTENT_TYPE
from fedcomp.server.metrics_port import READERS, MetricsPort


@pytest.fixture
def port():
    pages = iter(range(10_000))
    with MetricsPort(0, lambda: f"page {next(pages)}\n") as opened:
        yield opened


def test_the_page_is_read_again_and_again(port):
    for number in range(3):
        with urllib.request.urlopen(port.address, timeout=20) as answer:
            assert answer.read() == b"page %d\n" % number
            assert answer.headers["Content-Type"] == CONTENT_TYPE
    assert urllib.request.urlopen(port.address + "?x=1", timeout=20).status == 200


def test_it_is_on_loopback_alone(port):
    assert port.socket.getsockname()[0] == "127.0.0.1"
    assert port.address == f"http://127.0.0.1:{port.server_port}/metrics"


@pytest.mark.parametrize(
    "path", ["/", "/metrics/", "/metrics/x", "/v1/fleet/get-run", "/%6detrics", "/../metrics", "x"]
)
def test_other_paths_are_not_there(port, path):
    assert status(ask(port.server_port, head("GET", path)).replace(b"HTTP/1.0", b"HTTP/1.1")) == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "CONNECT", "get"])
def test_other_methods_are_not_there(port, method):
    answer = ask(port.server_port, head(method, "/metrics", "Content-Length: 0"))
    assert status(answer.replace(b"HTTP/1.0", b"HTTP/1.1")) == 501 and b"page" not in answer


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"\x00\xff\r\n\r\n",
        b"GET /metrics\r\n",
        b"x" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_leave_it_open(port, data):
    with connect(port.server_port) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            until_closed(connection)
        except ConnectionError:
            pass
    assert urllib.request.urlopen(port.address, timeout=20).status == 200


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"^--metrics-port {number}: .*Address already in use.*; give another port, or 0 for a",
        ):
            MetricsPort(number, str)


def test_who_says_nothing_is_hung_up_on_and_holds_nobody_up(port, monkeypatch):
    monkeypatch.setattr(metrics_port.Page, "timeout", 0.2)
    silent = [connect(port.server_port) for _ in range(READERS - 1)]
    assert urllib.request.urlopen(port.address, timeout=20).status == 200
    assert [until_closed(connection) for connection in silent] == [b""] * len(silent)
    for connection in silent:
        connection.close()


def test_there_are_no_more_readers_than_places_and_places_come_back(port, monkeypatch):
    silent = [connect(port.server_port) for _ in range(READERS)]
    wait_until(lambda: port._places._value == 0, 20)
    with connect(port.server_port) as late:
        assert until_closed(late) == b""
    for connection in silent:
        connection.close()
    wait_until(lambda: port._places._value == READERS, 20)
    assert urllib.request.urlopen(port.address, timeout=20).status == 200


def test_a_page_that_cannot_be_made_is_an_answer_and_the_next_one_comes():
    pages = iter([ValueError("broken"), "whole\n"])

    def page():
        made = next(pages)
        if isinstance(made, Exception):
            raise made
        return made

    with MetricsPort(0, page) as port:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            urllib.request.urlopen(port.address, timeout=20)
        assert urllib.request.urlopen(port.address, timeout=20).read() == b"whole\n"


def test_it_closes_at_once_though_a_reader_hangs():
    with MetricsPort(0, str) as port:
        hanging = connect(port.server_port)
        wait_until(lambda: port._places._value == READERS - 1, 20)
    with pytest.raises(OSError):
        connect(port.server_port)
    hanging.close()
