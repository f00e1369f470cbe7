"""The port of the metrics page listens on loopback only, and stays open after a failed request."""

import socket
import urllib.error
import urllib.parse
import urllib.request
from contextlib import AbstractContextManager

import pytest
from loopback import connect, until_closed
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fedcomp.errors import ConfigError
from fedcomp.server.metrics import serve


class Reads(Collector):
    """A gauge that counts how often it was read; the readings in `broken` fail."""

    def __init__(self, broken=()):
        self.count, self.broken = 0, broken

    def collect(self):
        self.count += 1
        if self.count in self.broken:
            raise ValueError("broken")
        yield GaugeMetricFamily("reads", "Readings.", self.count)


def opened(*broken: int) -> AbstractContextManager[str]:
    registry = CollectorRegistry()
    registry.register(Reads(broken))
    return serve(registry, 0)


@pytest.fixture
def address():
    with opened() as address:
        yield address


def read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read()


def number(address: str) -> int:
    assert address.startswith("http://127.0.0.1:") and address.endswith("/metrics")
    return urllib.parse.urlsplit(address).port


def test_every_request_reads_the_current_metrics(address):
    for count in (1, 2, 3):
        assert b"\nreads %d.0\n" % count in read(address)


def test_the_metrics_port_listens_on_loopback_only(address):
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", number(address)), 5):
        pass


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
def test_bytes_that_are_not_a_request_do_not_close_the_port(address, data):
    with connect(number(address)) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        try:
            until_closed(connection)
        except ConnectionError:
            pass
    assert read(address)


def test_a_port_in_use_is_one_error_message():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=f"^--metrics-port {port}: .*Address already in use.*; give another port, or 0 for a",
        ):
            with serve(CollectorRegistry(), port):
                pass


def test_a_request_after_a_failed_one_is_answered():
    with opened(1) as address:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            read(address)
        assert b"\nreads 2.0\n" in read(address)


def test_the_port_closes_at_once_even_if_a_reader_hangs():
    with opened() as address:
        hanging = connect(number(address))
        assert read(address)
    with pytest.raises(OSError):
        connect(number(address))
    hanging.close()
