"""Byte counts of connections, on plain sockets instead of gRPC."""

import socket
import time

import pytest

from fedcomp.transports.grpc.traffic import NEW_FLOOD_BYTES, PortTraffic, counts_bytes

pytestmark = pytest.mark.skipif(not counts_bytes(), reason="the platform counts no bytes")


@pytest.fixture
def flooded():
    """Yield a PortTraffic, a connection with more unread bytes than a new connection may send, and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname(), 10) as client:
            accepted, peer = listening.accept()
            with accepted:
                client.sendall(bytes(NEW_FLOOD_BYTES + 1))
                traffic = PortTraffic()
                traffic.port = listening.getsockname()[1]
                yield traffic, accepted, peer


def wait_for_floods(traffic):
    end = time.monotonic() + 10
    while not (floods := traffic.floods([], ())):
        assert time.monotonic() < end
        time.sleep(0.01)
    return floods


def test_the_unread_data_of_a_connection_that_is_cut_are_discarded(flooded):
    traffic, accepted, peer = flooded
    assert wait_for_floods(traffic) == [(peer, None, NEW_FLOOD_BYTES + 1)]
    traffic.cut(peer)
    assert accepted.recv(1) == b""


def test_a_connection_is_reported_only_until_it_is_cut(flooded):
    traffic, _, peer = flooded
    wait_for_floods(traffic)
    assert traffic.floods([], ())
    traffic.cut(peer)
    assert traffic.floods([], ()) == [] and traffic.connections == 1


def test_bytes_of_a_client_that_joined_before_its_connection_was_found_are_counted(flooded):
    traffic, accepted, peer = flooded
    traffic.assign(peer, 3)
    assert traffic.report([]).by_client == {}
    traffic.find(peer)
    assert traffic.report([]).by_client[3].bytes_in == NEW_FLOOD_BYTES + 1
    accepted.close()
    assert traffic.connections == 0
    assert traffic.report([]).by_client[3].bytes_in == NEW_FLOOD_BYTES + 1
