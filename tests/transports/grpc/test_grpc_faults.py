"""Clients that are disconnected, replaced, revoked or frozen."""

import asyncio
import math
import os
import signal
import socket
import threading
import time

import pytest
from grpc_ends import LARGEST, Slow, assignment, attend, connect, needs_byte_counts, report, serving
from one_client import one_client

from fedcomp.errors import UnreachableError
from fedcomp.messages import Presence
from fedcomp.server.transport import Lost
from fedcomp.transports.grpc import GrpcConnection, Refused

EXPELLED = "the key of this client or relay is no longer accepted"
GONE = "the client's connection ended, and the client did not reconnect in time"


async def until_assigned(connection: GrpcConnection, client: int):
    """Join, wait for an assignment, and leave without an answer."""
    async with connection:
        async for message in connection.messages():
            if hasattr(message, "options"):
                await connection.send(Presence(message.run, client, message.version, ""))
            else:
                return message


def test_a_client_that_reconnects_gets_its_assignment_again(loop):
    with serving(1) as server:
        first = loop.start(until_assigned(connect(server, 0), 0))
        server.wait_for_clients(0)
        sent = assignment(0, 4, [b"x" * (1 << 19)])
        server.transport.send([sent])
        assert first.result(20) == sent
        server.wait_for(lambda: server.left == [0])
        seen = []
        loop.start(attend(connect(server, 0), 0, seen=seen))
        assert server.receive(1)[0].answer == report(sent)
        assert seen[-1] == sent and len(server.joined) == 2


def test_the_assignment_of_a_client_that_does_not_reconnect_is_lost(loop):
    with serving(2, grace_s=0.2) as server:
        first = loop.start(until_assigned(connect(server, 0), 0))
        server.wait_for_clients(0)
        server.transport.send([assignment(0), assignment(1)])
        assert first.result(20)
        answers = server.receive(2)
        assert answers[0].answer == Lost(GONE, "reply")
        assert answers[1].answer == Lost(GONE, "send")  # client 1 never joined
        seen = []
        loop.start(attend(connect(server, 0), 0, seen=seen))
        server.wait_for_clients(0)
        server.transport.send([assignment(0, 2)])
        assert server.receive(1)[0].answer == report(assignment(0, 2))
        assert assignment(0, 1) not in seen


def test_without_a_time_limit_the_server_waits_for_a_disconnected_client(loop):
    with serving(2, grace_s=math.inf) as server:
        first = loop.start(until_assigned(connect(server, 0), 0))
        server.wait_for_clients(0)
        sent = [assignment(0), assignment(1)]  # client 1 has not joined yet
        server.transport.send(sent)
        assert first.result(20) == sent[0]
        server.wait_for(lambda: server.left == [0])
        assert server.transport.receive(0.5) == []
        for client in range(2):
            loop.start(attend(connect(server, client), client))
        got = server.receive(2)
        assert [got[client].answer for client in range(2)] == [report(a) for a in sent]


def test_a_client_that_is_replaced_while_it_trains_receives_the_reason(loop):
    """The client cannot send its report. Without the reason, it would reconnect and replace the newer client."""
    slow = Slow(lambda a: report(a, bytes(1 << 20)))
    with serving(1) as server:
        older = loop.start(attend(connect(server, 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        loop.start(attend(connect(server, 0), 0))
        assert server.receive(1)[0].answer == report(assignment(0))
        server.wait_for(lambda: server.transport.figures().streams == 1)
        slow.proceed.set()
        refused = older.result(20)
        assert isinstance(refused, Refused) and "the server keeps only the newest" in refused.reason


def test_a_newer_stream_replaces_the_older(loop, enrolled, secure):
    own = enrolled.credentials[1]
    with serving(3, **secure) as server:
        older = loop.start(attend(connect(server, credentials=own), 1))
        server.wait_for_clients(1)
        loop.start(attend(connect(server, credentials=own), 1))
        refused = older.result(20)
        assert isinstance(refused, Refused) and not refused.retry
        assert "the server keeps only the newest" in refused.reason
        server.transport.send([assignment(1)])
        assert server.receive(1)[1].answer == report(assignment(1))
        server.wait_for_clients(1)


def test_the_newer_stream_of_a_client_receives_the_open_assignment(loop):
    slow = Slow(lambda a: None)
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        loop.start(attend(connect(server, 0), 0))
        assert server.receive(1)[0].answer == report(assignment(0))
        slow.proceed.set()


def test_a_revoked_client_is_disconnected(loop, enrolled, secure):
    slow = Slow(lambda a: None)
    with serving(3, **secure) as server:
        ends = [
            loop.start(attend(connect(server, credentials=own), client, slow))
            for client, own in enumerate(enrolled.credentials[:2])
        ]
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(1)])
        assert slow.started.wait(20)
        enrolled.revoked.add(1)
        server.transport.recheck_keys()
        # The client may have received the assignment before the server notes that it was sent, so the stage is "send" or "reply".
        assert server.answers(1)[1].reason == EXPELLED
        server.wait_for_clients(0)
        slow.proceed.set()
        assert ends[1].result(20) == Refused("client 1 is revoked", False)
        refused = loop.run(attend(connect(server, credentials=enrolled.credentials[1]), 1))
        assert refused == Refused("client 1 is revoked", False)
        enrolled.revoked.clear()
        loop.start(attend(connect(server, credentials=enrolled.credentials[1]), 1))
        server.wait_for_clients(0, 1)


def test_a_malformed_registry_disconnects_no_client(loop, enrolled, secure):
    with serving(3, **secure) as server:
        own, late = enrolled.credentials[:2]
        loop.start(attend(connect(server, credentials=own), 0))
        server.wait_for_clients(0)
        enrolled.problem = "the registry is malformed"
        enrolled.revoked |= {0, 1}
        server.transport.recheck_keys()
        refused = loop.run(attend(connect(server, credentials=late), 1))
        assert refused == Refused("client 1 is revoked", True)
        server.transport.send([assignment(0)])
        assert server.receive(1)[0].answer == report(assignment(0))
        enrolled.problem = ""
        server.transport.recheck_keys()
        server.wait_for_clients()


def test_the_assignment_of_a_revoked_disconnected_client_is_lost(loop, enrolled, secure):
    with serving(3, grace_s=0.5, **secure) as server:
        own = enrolled.credentials[0]
        first = loop.start(until_assigned(connect(server, credentials=own), 0))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert first.result(20)
        enrolled.revoked.add(0)
        server.transport.recheck_keys()
        assert server.answers(1) == {0: Lost(EXPELLED)}
        assert server.transport.receive(1.0) == []


def test_a_client_whose_write_fails_receives_the_reason(loop):
    """`send` raises the status with which the stream ended, not the error of the failed write."""

    async def answer_late(connection: GrpcConnection):
        async with connection:
            async for message in connection.messages():
                if hasattr(message, "options"):
                    await connection.send(Presence(message.run, 0, message.version, ""))
                else:
                    await asyncio.to_thread(ended.wait, 20)
                    while True:
                        await connection.send(report(message, b"x" * (1 << 20)))

    ended = threading.Event()
    with serving(1) as server:
        end = loop.start(answer_late(connect(server, 0)))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        time.sleep(0.2)
        server.transport.close()
    ended.set()
    with pytest.raises(UnreachableError) as caught:
        end.result(20)
    assert caught.value.cause in UnreachableError.transient


def to_nobody() -> GrpcConnection:
    """Return a connection to a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as trial:
        port = trial.getsockname()[1]
    return GrpcConnection(f"localhost:{port}", largest=LARGEST, client=0)


def test_a_server_that_does_not_run_cannot_be_reached(loop):
    with pytest.raises(UnreachableError, match="cannot be reached") as caught:
        loop.run(attend(to_nobody(), 0))
    assert caught.value.cause in UnreachableError.transient


@pytest.mark.parametrize("iterations", range(3))
def test_a_client_that_is_cancelled_while_its_connection_fails_ends(loop, iterations):
    """The client is cancelled `iterations` iterations of the event loop after the failure."""

    async def cancelled() -> bool:
        connection = to_nobody()
        task = asyncio.create_task(connection.__aenter__())
        while connection._error is None:
            await asyncio.sleep(0)
        for _ in range(iterations):
            await asyncio.sleep(0)
        assert task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert loop.run(cancelled())


def test_clients_notice_that_their_server_has_ended(loop):
    with serving(1) as server:
        end = loop.start(attend(connect(server, 0), 0))
        server.wait_for_clients(0)
    with pytest.raises(UnreachableError) as caught:
        end.result(20)
    assert caught.value.cause in UnreachableError.transient


@pytest.mark.deploy
@pytest.mark.parametrize(
    "size, every_s", [(50, 5), (8 << 20, 5), (50, 0.25)], ids=["small", "large", "several"]
)
def test_a_frozen_client_is_noticed_while_it_holds_an_assignment(size, every_s):
    with serving(1, silence_s=1) as server, one_client(server.target) as client:
        server.wait_for_clients(0, timeout_s=60)
        os.kill(client.pid, signal.SIGSTOP)
        deliveries, deadline = [], time.monotonic() + 10
        while not deliveries:  # newer assignments must not hide that the client is frozen
            assert time.monotonic() < deadline
            server.transport.send([assignment(0, 1, [b"x" * size])])
            deliveries = server.transport.receive(every_s)
        lost = deliveries[0].answer
        assert isinstance(lost, Lost) and "the client sent nothing for" in lost.reason
        server.wait_for_clients(timeout_s=1)
        assert server.transport.figures().streams == 0
        os.kill(client.pid, signal.SIGCONT)  # the client reconnects, as a client process does
        server.wait_for_clients(0)
        server.transport.send([assignment(0, 2)])
        assert server.receive(1)[0].answer == report(assignment(0, 2))


@pytest.mark.deploy
def test_without_a_limit_a_frozen_client_is_noticed_and_keeps_its_assignment():
    with serving(1, silence_s=1, grace_s=math.inf) as server, one_client(server.target) as client:
        server.wait_for_clients(0, timeout_s=60)
        os.kill(client.pid, signal.SIGSTOP)
        server.transport.send([assignment(0)])
        server.wait_for_clients()
        assert server.transport.receive(0.5) == []
        os.kill(client.pid, signal.SIGCONT)
        assert server.receive(1)[0].answer == report(assignment(0))


@pytest.mark.deploy
@needs_byte_counts
def test_bytes_of_a_killed_client_are_counted():
    with serving(1) as server:
        with one_client(server.target):
            server.wait_for_clients(0, timeout_s=60)
            server.transport.send([assignment(0, 1, [b"x" * 100_000])])
            server.receive(1)
        server.wait_for_clients()
        traffic = server.transport.traffic()
        assert traffic.total.bytes_out > 100_000 and traffic.by_client[0].bytes_out > 100_000


def test_a_client_that_trains_for_long_is_not_lost(loop):
    def compute(a):
        time.sleep(1.5)
        return report(a)

    with serving(1, silence_s=0.5) as server:
        loop.start(attend(connect(server, 0), 0, compute))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert server.receive(1)[0].answer == report(assignment(0))
        assert not server.left
