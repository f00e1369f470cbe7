"""Bytes counted at the socket, and on whom they are booked."""

import socket

import pytest

from fedcomp.deployment import traffic
from fedcomp.deployment.traffic import OTHERS, Account, CountedSocket, Ledger, Traffic


@pytest.fixture
def pair():
    """A counted socket and the other end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with CountedSocket(near) as counted, far:
        yield counted, far


def test_every_way_through_the_socket_is_counted(pair):
    counted, far = pair
    far.sendall(b"12345")
    assert counted.recv(3) == b"123" and counted.recv_into(bytearray(10)) == 2
    assert counted.send(b"1234567") == 7 and counted.sendmsg([b"12", b"3"]) == 3
    with pytest.raises(BlockingIOError):
        counted.recv(1)
    assert counted.traffic == Traffic(received_bytes=5, sent_bytes=10)


def test_bytes_belong_to_the_address_until_a_key_is_believed_and_then_to_the_key(pair):
    counted, far = pair
    ledger, account = Ledger(), Account(counted, "10.0.0.1")
    ledger.open(account)
    counted.send(b"123")
    assert ledger.read() == {"10.0.0.1": (0, 3)}, "a connection that is open is in"
    ledger.settle(account, b"key")
    assert ledger.read() == {b"key": (0, 3)}
    counted.send(b"12345")
    ledger.settle(account)
    counted.send(b"1")
    assert ledger.read() == {b"key": (0, 9)}
    ledger.close(account)
    ledger.close(account)
    assert ledger.read() == {b"key": (0, 9)}, "nothing is booked twice"


def test_clients_beyond_the_room_there_is_are_counted_together(pair, monkeypatch):
    monkeypatch.setattr(traffic, "CLIENTS", 2)
    counted, _ = pair
    ledger, account = Ledger(), Account(counted, "address")
    ledger.open(account)
    for key in (b"a", b"b", b"c", b"d", b"a"):
        counted.send(b"1")
        ledger.settle(account, key)
    assert ledger.read() == {b"a": (0, 2), b"b": (0, 1), OTHERS: (0, 2)}
