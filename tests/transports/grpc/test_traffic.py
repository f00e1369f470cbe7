"""Byte counts and limits of connections, tested with plain sockets instead of gRPC."""

import contextlib
import socket
import time
from types import SimpleNamespace

import pytest

from fedcomp.transports.grpc.traffic import (
    MIN_NEW_FLOOD_BYTES,
    NEW_FLOOD_BYTES,
    PortTraffic,
    counts_bytes,
)

pytestmark = pytest.mark.skipif(not counts_bytes(), reason="the platform counts no bytes")


@pytest.fixture
def flooded():
    """Yield a PortTraffic, both ends of a connection with more unread bytes than a new connection may send, and its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname(), 10) as client:
            accepted, peer = listening.accept()
            with accepted:
                client.sendall(bytes(NEW_FLOOD_BYTES + 1))
                traffic = PortTraffic()
                traffic.port = listening.getsockname()[1]
                yield traffic, accepted, client, peer


def wait_for_floods(traffic, ended=()):
    end = time.monotonic() + 10
    while not (floods := traffic.floods([], dict(ended))):
        assert time.monotonic() < end
        time.sleep(0.01)
    return floods


def test_the_unread_data_of_a_connection_that_is_cut_are_discarded(flooded):
    traffic, accepted, _, peer = flooded
    assert wait_for_floods(traffic) == [(peer, None, NEW_FLOOD_BYTES + 1)]
    traffic.cut(peer)
    assert accepted.recv(1) == b""


def test_a_connection_is_reported_only_until_it_is_cut(flooded):
    traffic, _, _, peer = flooded
    wait_for_floods(traffic)
    assert traffic.floods([], {})
    traffic.cut(peer)
    assert traffic.floods([], {}) == [] and traffic.connections == 1


def test_data_that_arrive_on_a_frozen_connection_are_discarded(flooded):
    traffic, accepted, client, peer = flooded
    wait_for_floods(traffic)
    traffic.freeze(peer)
    client.sendall(b"more")
    accepted.settimeout(0.3)
    with pytest.raises(TimeoutError):
        accepted.recv(1)
    assert traffic.floods([], {}) == []


def test_a_frozen_connection_still_sends(flooded):
    traffic, accepted, client, peer = flooded
    wait_for_floods(traffic)
    traffic.freeze(peer)
    accepted.sendall(b"last words")
    assert client.recv(100) == b"last words"


def test_the_peer_cannot_end_a_frozen_connection(flooded):
    traffic, accepted, client, peer = flooded
    wait_for_floods(traffic)
    traffic.freeze(peer)
    client.close()
    time.sleep(0.1)
    assert not is_cut(accepted)


def test_a_frozen_connection_of_a_kernel_without_packet_filters_is_cut(flooded, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.SO_ATTACH_FILTER", -1)
    traffic, accepted, _, peer = flooded
    wait_for_floods(traffic)
    traffic.freeze(peer)
    assert accepted.recv(1) == b""


def test_a_connection_whose_stream_has_ended_may_not_flood(flooded, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.ENDED_FLOOD_BYTES", 1000)
    traffic, _, client, peer = flooded
    ended = {peer: wait_for_floods(traffic)[0][2]}
    client.sendall(bytes(1000))
    time.sleep(0.1)
    assert traffic.floods([], ended) == []
    client.sendall(b"1")
    wait_for_floods(traffic, ended=ended)


def test_a_flood_on_any_joined_connection_is_found_after_some_reads(monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.FLOOD_BYTES", 1000)
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.JOINED_READS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as sockets:
        traffic, streams = PortTraffic(), []
        traffic.port = listening.getsockname()[1]
        for _ in range(3):
            client = sockets.enter_context(socket.create_connection(listening.getsockname(), 10))
            connection, peer = listening.accept()
            sockets.enter_context(connection)
            streams.append(SimpleNamespace(peer=peer, joined=True, received_bytes=0))
        assert traffic.floods(streams, {}) == []
        client.sendall(bytes(1001))
        time.sleep(0.1)
        found = [traffic.floods(streams, {}) for _ in range(3)]
        assert sum(map(len, found)) >= 1 and traffic.floods(streams, {})[0][0] == peer


@pytest.fixture
def frozen():
    """Yield the listening socket, the PortTraffic and the server's ends of three frozen connections, the oldest first."""
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as sockets:
        traffic, accepted = PortTraffic(), []
        traffic.port = listening.getsockname()[1]
        for _ in range(3):
            sockets.enter_context(socket.create_connection(listening.getsockname(), 10))
            connection, peer = listening.accept()
            accepted.append(sockets.enter_context(connection))
            traffic.find(peer)
            traffic.freeze(peer)
        yield listening, traffic, accepted


def is_cut(connection):
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def test_a_few_frozen_connections_stay_open_for_some_seconds(frozen, monkeypatch):
    _, traffic, accepted = frozen
    assert not traffic.cut_frozen() and not any(map(is_cut, accepted))
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.FROZEN_S", 0.0)
    assert traffic.cut_frozen()
    assert [*map(is_cut, accepted)] == [True, False, False]


def test_the_oldest_of_many_frozen_connections_is_cut(frozen, monkeypatch):
    _, traffic, accepted = frozen
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.MAX_FROZEN", 3)
    assert [traffic.cut_frozen(), traffic.cut_frozen()] == [True, False]
    assert [*map(is_cut, accepted)] == [True, False, False]


def test_connections_whose_bytes_grpc_may_keep_are_cut_early(flooded, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.MAX_FROZEN_BYTES", NEW_FLOOD_BYTES)
    traffic, accepted, _, peer = flooded
    wait_for_floods(traffic)
    traffic.freeze(peer)  # gRPC keeps none of the received bytes
    traffic.floods([], {})
    assert not traffic.cut_frozen() and not is_cut(accepted)
    traffic.freeze(peer, NEW_FLOOD_BYTES)
    assert traffic.cut_frozen() and is_cut(accepted)


def test_many_frozen_connections_stay_open_while_new_connections_are_checked(frozen, monkeypatch):
    listening, traffic, accepted = frozen
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.MAX_FROZEN", 3)
    with socket.create_connection(listening.getsockname(), 10):
        new, _ = listening.accept()
        with new:
            assert traffic.floods([], {}) == []
            assert not traffic.cut_frozen() and not any(map(is_cut, accepted))


def test_no_connections_are_accepted_while_many_are_frozen(frozen, monkeypatch):
    listening, traffic, _ = frozen
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.MAX_FROZEN", 3)
    traffic.cut_frozen()
    with pytest.raises(TimeoutError):
        socket.create_connection(listening.getsockname(), 0.3)
    traffic.read_all()
    traffic.cut_frozen()
    socket.create_connection(listening.getsockname(), 10).close()


def test_an_ended_connection_does_not_count_as_frozen(frozen, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.FROZEN_S", 0.0)
    _, traffic, accepted = frozen
    for connection in accepted:
        connection.close()
    assert traffic.connections == 0 and not traffic.cut_frozen()


def test_bytes_of_a_client_that_joined_before_its_connection_was_found_are_counted(flooded):
    traffic, accepted, _, peer = flooded
    traffic.assign(peer, 3)
    assert traffic.report([]).by_client == {}
    traffic.find(peer)
    assert traffic.report([]).by_client[3].bytes_in == NEW_FLOOD_BYTES + 1
    accepted.close()
    assert traffic.connections == 0
    assert traffic.report([]).by_client[3].bytes_in == NEW_FLOOD_BYTES + 1


def test_many_new_connections_may_each_send_less(monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.traffic.NEW_BYTES", 3 * MIN_NEW_FLOOD_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as sockets:
        traffic = PortTraffic()
        traffic.port = listening.getsockname()[1]
        for opened in range(1, 4):
            client = sockets.enter_context(socket.create_connection(listening.getsockname(), 10))
            sockets.enter_context(listening.accept()[0])
            client.sendall(bytes(MIN_NEW_FLOOD_BYTES + 1))
            time.sleep(0.1)
            traffic.floods([], {})
            assert len(traffic.floods([], {})) == (opened if opened == 3 else 0)


def test_the_oldest_half_open_connections_of_one_host_are_cut():
    with socket.create_server(("127.0.0.1", 0)) as listening, contextlib.ExitStack() as sockets:
        traffic, accepted = PortTraffic(), []
        traffic.port = listening.getsockname()[1]
        for host in ("127.0.0.2", "127.0.0.1", "127.0.0.1", "127.0.0.1"):
            client = socket.create_connection(listening.getsockname(), 10, (host, 0))
            sockets.enter_context(client)
            connection, _ = listening.accept()
            accepted.append(sockets.enter_context(connection))
            traffic.floods([], {})
        assert traffic.cut_half_open(4) == 0
        assert traffic.cut_half_open(2) == 2
        assert [is_cut(connection) for connection in accepted] == [False, True, True, False]
        traffic.floods([], {})
        assert traffic.cut_half_open(2) == 0
