"""The port of the metrics: on loopback only, and a silent reader delays no other."""

import socket
import urllib.error
import urllib.request

import pytest
from loopback import connect, until_closed, wait_until
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fedcomp.errors import ConfigError
from fedcomp.server import metrics_port
from fedcomp.server.metrics_port import MAX_CONNECTIONS, MetricsPort


class Reads(Collector):
    """A gauge that counts how often it was read; the readings in `broken` fail."""

    def __init__(self, broken=()):
        self.count, self.broken = 0, broken

    def collect(self):
        self.count += 1
        if self.count in self.broken:
            raise ValueError("broken")
        yield GaugeMetricFamily("reads", "Readings.", self.count)


def opened(*broken: int) -> MetricsPort:
    registry = CollectorRegistry()
    registry.register(Reads(broken))
    return MetricsPort(0, registry)


@pytest.fixture
def port():
    with opened() as port:
        yield port


def read(port: MetricsPort) -> bytes:
    with urllib.request.urlopen(port.address, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read()


def test_every_request_reads_the_current_metrics(port):
    for count in (1, 2, 3):
        assert b"\nreads %d.0\n" % count in read(port)


def test_it_listens_on_loopback_only(port):
    assert port.socket.getsockname()[0] == "127.0.0.1"
    assert port.address == f"http://127.0.0.1:{port.server_port}/metrics"


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
    assert read(port)


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"^--metrics-port {number}: .*Address already in use.*; give another port, or 0 for a",
        ):
            MetricsPort(number, CollectorRegistry())


def test_silent_readers_are_disconnected_and_delay_no_request(port, monkeypatch):
    monkeypatch.setattr(metrics_port.RequestHandler, "timeout", 0.2)
    silent = [connect(port.server_port) for _ in range(MAX_CONNECTIONS - 1)]
    assert read(port)
    assert [until_closed(connection) for connection in silent] == [b""] * len(silent)
    for connection in silent:
        connection.close()


def test_there_are_no_more_readers_than_places_and_places_come_back(port):
    silent = [connect(port.server_port) for _ in range(MAX_CONNECTIONS)]
    wait_until(lambda: port._connections._value == 0, 20)
    with connect(port.server_port) as late:
        assert until_closed(late) == b""
    for connection in silent:
        connection.close()
    wait_until(lambda: port._connections._value == MAX_CONNECTIONS, 20)
    assert read(port)


def test_metrics_that_cannot_be_read_are_an_error_and_the_next_request_is_answered():
    with opened(1) as port:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            read(port)
        assert b"\nreads 2.0\n" in read(port)


def test_it_closes_at_once_though_a_reader_hangs():
    with opened() as other:
        hanging = connect(other.server_port)
        wait_until(lambda: other._connections._value == MAX_CONNECTIONS - 1, 20)
    with pytest.raises(OSError):
        connect(other.server_port)
    hanging.close()
