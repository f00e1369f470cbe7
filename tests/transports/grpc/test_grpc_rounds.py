"""Rounds of the gRPC transport over real sockets."""

import time

import pytest
from grpc_ends import (
    LARGEST,
    RUN,
    Slow,
    assignment,
    attend,
    connect,
    needs_byte_counts,
    report,
    serving,
)

from fedcomp.errors import ConfigError
from fedcomp.messages import Assignment, Farewell, Invitation
from fedcomp.transports.grpc import GrpcTransport, PortSettings


def test_rounds_of_several_clients(loop):
    with serving(3) as server:
        ends = [loop.start(attend(connect(server, client), client)) for client in range(3)]
        server.wait_for_clients(0, 1, 2)
        assert {client for client, _ in server.joined} == {0, 1, 2}
        for round in (1, 2, 3):
            sent = {client: assignment(client, round) for client in range(3)}
            server.transport.send([*sent.values()])
            assert server.answers(3) == {client: report(a) for client, a in sent.items()}
        server.transport.send_farewell(3)
        assert [end.result(10) for end in ends] == [Farewell(RUN, 3)] * 3
        server.wait_for_clients()
        assert sorted(server.left) == [0, 1, 2] and not server.warnings


def test_clients_are_identified_by_their_keys(loop, enrolled, secure):
    with serving(3, **secure) as server:
        seen = []
        for client, own in enumerate(enrolled.credentials):
            loop.start(attend(connect(server, credentials=own), client, seen=seen))
        server.wait_for_clients(0, 1, 2)
        assert {m.client for m in seen if isinstance(m, Invitation)} == {0, 1, 2}
        server.transport.send([assignment(client) for client in range(3)])
        assert server.receive(3)[1].answer == report(assignment(1))
        assert server.transport.public_key(2) == enrolled.keys[2].point
        with pytest.raises(KeyError):
            server.transport.public_key(3)


def test_a_claim_does_not_replace_a_key(loop, enrolled, secure):
    with serving(3, **secure) as server:
        connection = connect(server, 2, enrolled.credentials[0])
        end = loop.start(attend(connection, 2))
        assert "cannot take part as client 2" in end.result(20).reason
        assert server.transport.clients() == []


def test_large_messages_in_both_directions(loop):
    frame = bytes(range(256)) * (1 << 14) + b"odd"
    with serving(2) as server:
        for client in (0, 1):
            answer = lambda a: report(a, a.frames[0][::-1])  # noqa: E731
            loop.start(attend(connect(server, client), client, answer))
        server.wait_for_clients(0, 1)
        for round in (1, 2):
            sent = [assignment(client, round, [frame]) for client in (0, 1)]
            server.transport.send(sent)
            assert server.answers(2) == {a.client: report(a, frame[::-1]) for a in sent}


def test_a_newer_assignment_replaces_an_older_one(loop):
    slow, seen = Slow(), []
    with serving(1) as server:
        connection = connect(server, 0)
        answer = lambda a: slow(a) if a.round == 1 else report(a)  # noqa: E731
        loop.start(attend(connection, 0, answer, seen))
        server.wait_for_clients(0)
        server.transport.send([assignment(0, 1, [b"x" * (1 << 20)])])
        assert slow.started.wait(20)
        for newer in (2, 3):
            server.transport.send([assignment(0, newer)])
            server.wait_for(lambda a=newer: [w.round for _, w in connection._unread] == [a])
        assert server.transport.receive(0.0) == []
        slow.proceed.set()
        assert server.receive(1)[0].answer == report(assignment(0, 3))
        assert server.late_answers == [0]  # round 1; round 2 was replaced before the client read it
        assert [a.round for a in seen if isinstance(a, Assignment)] == [1, 3]


def test_reports_on_cancelled_assignments_are_late_answers(loop):
    slow = Slow()
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        server.transport.cancel([0, 5])
        slow.proceed.set()
        server.wait_for(lambda: server.late_answers == [0])
        assert server.transport.receive(0.1) == []


def test_a_report_that_arrives_just_before_its_assignment_is_cancelled_is_not_delivered(loop):
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        time.sleep(0.5)  # the report has arrived, but the main thread has not read it
        server.transport.cancel([0])
        assert server.transport.receive(0.1) == [] and server.late_answers == [0]
        server.transport.send([assignment(0, 2)])
        assert server.receive(1)[0].answer.round == 2


def test_a_report_that_was_received_before_its_assignment_is_cancelled_is_not_delivered(loop):
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        server.wait_for(lambda: bool(server.transport._deliveries))
        server.transport.cancel([0])
        assert server.transport.receive(0.0) == [] and server.late_answers == [0]


def test_deliveries_carry_the_time_of_arrival(loop):
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0))
        server.wait_for_clients(0)
        before = server.transport.clock.now()
        server.transport.send([assignment(0)])
        delivery = server.receive(1)[0]
        assert before <= delivery.arrived_s <= server.transport.clock.now()


@needs_byte_counts
def test_an_exchange_of_messages_adds_few_bytes_to_its_frames(loop, enrolled, secure):
    rounds, size = 10, 50
    with serving(3, **secure) as server:
        for client, own in enumerate(enrolled.credentials):
            loop.start(attend(connect(server, credentials=own), client))
        server.wait_for_clients(0, 1, 2)
        time.sleep(0.5)  # the last bytes of the join
        before = server.transport.traffic()
        assert sum(before.total) / 3 <= 6000
        for round in range(1, rounds + 1):
            server.transport.send([assignment(client, round) for client in range(3)])
            server.receive(3)
        after = server.transport.traffic()
        spent = after.total.minus(before.total)
        assert 2 * size < sum(spent) / 3 / rounds <= 2 * size + 225
        assert after.by_client.keys() == {0, 1, 2}
        by_client = [sum(traffic) for traffic in after.by_client.values()]
        assert sum(by_client) == sum(after.total)


@needs_byte_counts
def test_traffic_of_ended_connections_is_kept(loop):
    frame = b"x" * 100_000
    with serving(1) as server:
        for _ in range(2):
            end = loop.start(attend(connect(server, 0), 0))
            server.wait_for_clients(0)
            server.transport.send([assignment(0, 1, [frame])])
            server.receive(1)
            end.cancel()
            server.wait_for_clients()
        traffic = server.transport.traffic()
        assert 200_000 < traffic.total.bytes_out < 290_000  # a busy kernel may send a segment twice
        assert 200_000 < traffic.by_client[0].bytes_out <= traffic.total.bytes_out
        server.transport.close()
        assert server.transport.traffic().total.bytes_out >= traffic.total.bytes_out


def test_the_figures_of_a_port_count_clients_and_refusals(loop):
    with serving(2) as server:
        loop.start(attend(connect(server, 0), 0))
        loop.run(attend(connect(server, 7), 7))
        server.wait_for_clients(0)
        figures = server.transport.figures()
        assert figures.clients == 1 and figures.refused["no place"] == 1


def test_a_port_in_use_is_an_error():
    with serving(1) as server:
        port, invitation = server.transport.port, server.transport.invitation
        second = GrpcTransport(PortSettings("127.0.0.1", port, invitation, 1, LARGEST))
        with pytest.raises(ConfigError, match="cannot be opened"):
            second.open()


def test_a_transport_can_be_closed_twice(loop):
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0))
        server.wait_for_clients(0)
        server.transport.close()
        server.transport.close()
