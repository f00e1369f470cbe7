"""Clients behind a relay, over real sockets: the server receives the same answers as without the relay."""

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace

import grpc
import pytest
import torch
from grpc_ends import (
    RUN,
    Loop,
    RelayEnd,
    Server,
    Slow,
    assignment,
    attend,
    attend_again,
    connect,
    needs_byte_counts,
    report,
    serving,
    terms,
)
from tcp_proxy import TcpProxy

from fedcomp import Layout, codec
from fedcomp.errors import UnreachableError, UserError
from fedcomp.keys.enrolment import key_hash
from fedcomp.keys.keyring import verifier
from fedcomp.messages import FAILED, Assignment, Farewell, Invitation, Presence, Report
from fedcomp.server.exchange import Exchange, Traffic
from fedcomp.server.transport import Lost
from fedcomp.strategies import Average, Phase, StrategyConfig
from fedcomp.strategies.base import RoundCompletion
from fedcomp.transports.grpc import Credentials, Refused, RelayTerms, relay_wire, wire
from fedcomp.transports.grpc.relay import RelayConnection
from fedcomp.transports.grpc.wire import Kind

GONE = "the client's connection ended, and the client did not reconnect in time"


def behind(
    loop: Loop, server: Server, *answers: Callable[[Assignment], Report | None], first: int = 0
) -> RelayEnd:
    """Start a relay and one client for each function in `answers`, and wait until the clients have joined.

    The ids of the clients are `first`, `first` + 1, and so on.
    """
    relay = RelayEnd(loop, server.target)
    for client, answer in enumerate(answers, first):
        loop.start(attend(connect(relay, client), client, answer))
    server.wait_for(lambda: relay.clients == len(answers) <= len(server.transport.clients()))
    return relay


def reports(*sent: Assignment) -> dict[int, Report]:
    return {a.client: report(a) for a in sent}


def refused(end: "Future[Refused]", again: bool = False) -> str:
    """Return the reason for which a client was refused. `again`: whether it may try again."""
    message = end.result(20)
    assert isinstance(message, Refused) and message.retry is again
    return message.reason


# Rounds.


def test_rounds_with_clients_behind_a_relay_and_at_the_server(loop):
    with serving(4, relay_terms=terms(4)) as server:
        relay, seen = RelayEnd(loop, server.target), []
        where = [relay, relay, relay, server]
        ends = [
            loop.start(attend(connect(at, client), client, seen=seen))
            for client, at in enumerate(where)
        ]
        server.wait_for_clients(0, 1, 2, 3)
        assert {m.client for m in seen if isinstance(m, Invitation)} == {0, 1, 2, 3}
        assert server.transport.figures().relays == 1
        for round in (1, 2, 3):
            sent = [assignment(client, round) for client in range(4)]
            server.transport.send(sent)
            assert server.answers(4) == reports(*sent)
            assert all(a in seen for a in sent)
        server.transport.send_farewell(3)
        assert [end.result(10) for end in ends] == [Farewell(RUN, 3)] * 4
        assert relay.end.result(10) == Farewell(RUN, 3)
        server.wait_for_clients()
        assert sorted(server.left) == [0, 1, 2, 3]
        assert not server.warnings and not relay.warnings


def test_clients_behind_a_relay_are_identified_by_their_keys(loop, enrolled, secure):
    with serving(3, relay_terms=terms(3), **secure) as server:
        relay = RelayEnd(loop, server.target, enrolled.relay)
        for client, own in enumerate(enrolled.credentials):
            loop.start(attend(connect(relay, credentials=own), client))
        server.wait_for_clients(0, 1, 2)
        sent = [assignment(client) for client in range(3)]
        server.transport.send(sent)
        assert server.answers(3) == reports(*sent)
        for client in range(3):
            key = verifier(server.transport.public_key(client))
            assert enrolled.find(key_hash(key)).client == client


def test_without_tls_a_relay_forwards_the_key_of_the_presence(loop, enrolled):
    point = enrolled.keys[0].point

    async def join() -> None:
        async with connect(relay, 0) as connection:
            async for message in connection.messages():
                await connection.send(Presence(message.run, 0, message.version, "", point))

    with serving(1, relay_terms=terms(1)) as server:
        relay = RelayEnd(loop, server.target)
        loop.start(join())
        server.wait_for_clients(0)
        assert server.transport.public_key(0) == point


def test_large_messages_in_both_directions(loop):
    frame = bytes(range(256)) * (1 << 12) + b"odd"
    with serving(3, relay_terms=terms(3)) as server:
        behind(loop, server, *[lambda a: report(a, a.frames[0][::-1])] * 3)
        for round in (1, 2):
            sent = [assignment(client, round, [frame, b"x" * client]) for client in range(3)]
            server.transport.send(sent)
            assert server.answers(3) == {a.client: report(a, frame[::-1]) for a in sent}


@needs_byte_counts
def test_a_broadcast_is_sent_to_a_relay_once(loop):
    clients, frame = range(6), bytes(range(250)) * 1200  # 300 kB
    with serving(6, relay_terms=terms(6)) as server:
        relay, seen = RelayEnd(loop, server.target), []
        for client in clients:
            loop.start(attend(connect(relay, client), client, seen=seen))
        server.wait_for_clients(*clients)
        before = server.transport.traffic()
        for round in (1, 2):  # in the second round the relay has the frame
            sent = [assignment(client, round, [frame]) for client in clients]
            server.transport.send(sent)
            assert server.answers(6) == reports(*sent)
            assert all(a in seen for a in sent)
        after = server.transport.traffic()
        spent = after.total.minus(before.total)
        assert len(frame) < spent.bytes_out < 1.1 * len(frame)
        assert 12 * 50 < spent.bytes_in < 12 * 50 + 10_000
        assert not after.by_client


def test_a_report_with_the_id_of_another_client_answers_its_senders_assignment(loop):
    with serving(2, relay_terms=terms(2)) as server:
        wrong = [lambda a: replace(report(a), client=1), lambda a: replace(report(a), client=-1)]
        behind(loop, server, *wrong)
        server.transport.send([assignment(0), assignment(1)])
        assert server.answers(2) == {i: wrong[i](assignment(i)) for i in range(2)}


def test_a_newer_assignment_replaces_an_older_one(loop):
    slow = Slow()
    with serving(1, relay_terms=terms(1)) as server:
        behind(loop, server, lambda a: slow(a) if a.round == 1 else report(a))
        server.transport.send([assignment(0, 1)])
        assert slow.started.wait(20)
        server.transport.send([assignment(0, 2)])
        server.transport.send([assignment(0, 3)])
        slow.proceed.set()
        assert server.answers(1) == reports(assignment(0, 3))
        # The report on round 1 is late. The report on round 2 is late too if the client read this assignment before round 3 arrived.
        server.wait_for(lambda: server.late_answers in ([0], [0, 0]))


def test_a_late_report_on_a_cancelled_assignment_is_not_delivered(loop):
    slow = Slow()
    with serving(2, relay_terms=terms(2)) as server:
        behind(loop, server, slow)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        server.transport.cancel([0, 1])
        slow.proceed.set()
        server.wait_for(lambda: server.late_answers == [0])
        assert server.transport.receive(0.1) == []
        server.transport.send([assignment(0, 2)])
        assert server.answers(1) == reports(assignment(0, 2))


def test_a_malformed_report_loses_only_its_clients_assignment(loop):
    async def send_junk() -> Refused:
        async with connect(relay, 0) as connection:
            async for message in connection.messages():
                if isinstance(message, Invitation):
                    await connection.send(Presence(message.run, 0, message.version, ""))
                elif isinstance(message, Assignment):
                    junk = bytes([Kind.REPORT]) + wire.varint(connection._assigned[0]) + b"\xff\xff"
                    await connection.write([junk])
                elif isinstance(message, Refused):
                    return message

    with serving(2, relay_terms=terms(2)) as server:
        relay = behind(loop, server, report, first=1)
        end = loop.start(send_junk())
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0), assignment(1)])
        got = server.answers(2)
        assert got[1] == report(assignment(1))
        assert isinstance(got[0], Lost) and "a message ends 1 bytes too early" in got[0].reason
        assert "malformed message" in refused(end, again=True)
        assert "client 0 sent a malformed message" in relay.warnings[0]
        server.wait_for_clients(1)


def test_a_malformed_key_disconnects_only_its_client(loop):
    async def join() -> Refused:
        async with connect(relay, 0) as connection:
            async for message in connection.messages():
                if isinstance(message, Refused):
                    return message
                await connection.send(Presence(message.run, 0, message.version, "", b"no point"))

    with serving(2, relay_terms=terms(2)) as server:
        relay = behind(loop, server, report, first=1)
        assert "not a point of the elliptic curve P-384" in refused(loop.start(join()), again=True)
        server.transport.send([assignment(1)])
        assert server.answers(1) == reports(assignment(1)) and not server.left


def test_long_texts_of_clients_do_not_end_the_stream_of_their_relay(loop):
    async def join_with_a_long_version() -> Refused:
        async with connect(relay, 0) as connection:
            async for message in connection.messages():
                if isinstance(message, Refused):
                    return message
                await connection.send(Presence(message.run, 0, "v" + "é" * 131_000, ""))

    def fail(a: Assignment) -> Report:
        reason = "".join(chr(0x10000 + i * (a.client + 7) % 65536) for i in range(50_000))
        return replace(report(a, b""), kind=FAILED, stage="train", reason=reason, ticket="")

    with serving(
        9, largest=100_000, relay_terms=replace(terms(9), largest_report=300_000)
    ) as server:
        relay = behind(loop, server, *[fail] * 8, first=1)
        end = loop.start(join_with_a_long_version())
        assert "'version' of a Presence has more than 128 bytes" in refused(end, again=True)
        sent = [assignment(client) for client in range(1, 9)]
        server.transport.send(sent)
        expected = {a.client: replace(fail(a), reason=fail(a).reason[:1000]) for a in sent}
        assert server.answers(8) == expected and not server.left


# Admission.


def test_an_unknown_key_is_refused_at_the_relay(loop, authority, enrolled, secure):
    with serving(3, relay_terms=terms(3), **secure) as server:
        relay = RelayEnd(loop, server.target, enrolled.relay)
        end = loop.start(attend(connect(relay, credentials=authority.client()), 0))
        assert "the server of this relay does not accept the key of this client" in refused(end)
        loop.start(attend(connect(relay, credentials=enrolled.credentials[1]), 1))
        server.wait_for_clients(1)


def test_a_client_cannot_claim_another_id_at_a_relay(loop, enrolled, secure):
    with serving(3, relay_terms=terms(3), **secure) as server:
        relay = RelayEnd(loop, server.target, enrolled.relay)
        end = loop.start(attend(connect(relay, 2, enrolled.credentials[0]), 2))
        assert "cannot take part as client 2" in refused(end)
        assert server.transport.clients() == []


def test_a_client_whose_key_is_revoked_is_disconnected_from_its_relay(loop, enrolled, secure):
    with serving(3, relay_terms=terms(3), **secure) as server:
        relay = RelayEnd(loop, server.target, enrolled.relay)
        slow, revoked = Slow(), Slow(lambda a: None)
        ends = [
            loop.start(attend(connect(relay, credentials=own), client, answer))
            for client, own, answer in zip(range(2), enrolled.credentials, (slow, revoked))
        ]
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0), assignment(1)])
        assert slow.started.wait(20) and revoked.started.wait(20)
        enrolled.revoked.add(1)
        server.transport.recheck_keys()
        assert server.answers(1) == {
            1: Lost("the key of this client or relay is no longer accepted")
        }
        server.wait_for_clients(0)
        slow.proceed.set(), revoked.proceed.set()
        assert refused(ends[1]) == "client 1 is revoked"
        assert server.answers(1) == reports(assignment(0))
        again = loop.start(attend(connect(relay, credentials=enrolled.credentials[1]), 1))
        assert "was revoked" in refused(again)

        enrolled.revoked.clear()
        server.transport.recheck_keys()
        server.wait_for_clients(0)
        loop.start(attend(connect(relay, credentials=enrolled.credentials[1]), 1))
        server.wait_for_clients(0, 1)


def test_a_relay_whose_key_is_revoked_is_disconnected(loop, enrolled, secure):
    with serving(3, relay_terms=terms(3), **secure) as server:
        relay = RelayEnd(loop, server.target, enrolled.relay)
        loop.start(attend_again(relay, -1, credentials=enrolled.credentials[0]))
        enrolled.relays.clear()
        server.transport.recheck_keys()
        with pytest.raises(UserError, match="its key is not in the registry"):
            relay.end.result(20)
        server.wait_for_clients()
        assert server.transport.figures().relays == 0


def test_a_relay_with_a_clients_key_and_a_client_with_a_relays_key_are_refused(
    loop, enrolled, secure
):
    with serving(3, relay_terms=terms(3), **secure) as server:
        with pytest.raises(UserError) as caught:
            RelayEnd(loop, server.target, enrolled.credentials[2])
        assert str(caught.value) == (
            "the key of this relay is the key of client 2; make a key for the relay with: fedcomp keys add --relay --host HOST"
        )
        end = loop.start(attend(connect(server, credentials=enrolled.relay), 0))
        assert refused(end) == (
            "the key of this client is the key of relay 0; start the relay with fedcomp relay, and give each client its own enrolment"
        )
        relay = RelayEnd(loop, server.target, enrolled.relay)
        end = loop.start(attend(connect(relay, credentials=enrolled.relay), 0))
        assert "does not accept the key of this client" in refused(end)
        assert server.transport.figures().relays == 1 and not server.joined


@pytest.mark.parametrize("tls", [False, True], ids=["insecure", "TLS"])
def test_a_relay_behind_a_relay_is_refused(loop, enrolled, secure, tls):
    with serving(3, relay_terms=terms(3), **(secure if tls else {})) as server:
        credentials = enrolled.relay if tls else None
        relay = RelayEnd(loop, server.target, credentials)
        with pytest.raises(UserError, match="relays cannot connect to another relay"):
            RelayEnd(loop, relay.target, credentials)
        assert not relay.end.done()


def test_a_server_without_relays_refuses_them(loop):
    with serving(1) as server, pytest.raises(UserError, match="relays cannot connect"):
        RelayEnd(loop, server.target)


def test_a_newer_relay_with_the_same_key_replaces_the_older(loop, enrolled, secure):
    with serving(3, relay_terms=terms(3), **secure) as server:
        older = RelayEnd(loop, server.target, enrolled.relay)
        loop.start(attend(connect(older, credentials=enrolled.credentials[0]), 0))
        server.wait_for_clients(0)
        newer = RelayEnd(loop, server.target, enrolled.relay)
        with pytest.raises(UserError, match="newer connection.*keys add --relay"):
            older.end.result(20)
        loop.start(attend(connect(newer, credentials=enrolled.credentials[0]), 0))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert server.answers(1) == reports(assignment(0))


# Faults.


def test_a_restarted_relay_loses_no_report(loop):
    slow = Slow()
    with serving(3, relay_terms=terms(3)) as server:
        relay = RelayEnd(loop, server.target)
        for client in range(3):
            loop.start(attend_again(relay, client, slow if client else report))
        server.wait_for_clients(0, 1, 2)
        sent = [assignment(client) for client in range(3)]
        server.transport.send(sent)
        assert server.answers(1) == reports(sent[0])
        server.wait_for(lambda: len(slow.asked) == 2)
        relay.stop()
        server.wait_for_clients()
        assert server.transport.receive(0.2) == []
        slow.proceed.set()
        RelayEnd(loop, server.target, port=relay.port)
        assert server.answers(2) == reports(*sent[1:])
        server.wait_for_clients(0, 1, 2)
        assert server.transport.receive(0.2) == []
        server.transport.send([assignment(client, 2) for client in range(3)])
        assert server.answers(3) == reports(*(assignment(client, 2) for client in range(3)))


def test_when_the_server_ends_its_relay_and_the_relays_clients_end(loop):
    with serving(1, relay_terms=terms(1)) as server:
        relay = RelayEnd(loop, server.target)
        end = loop.start(attend(connect(relay, 0), 0))
        server.wait_for_clients(0)
    for one in (relay.end, end):
        with pytest.raises(UnreachableError) as caught:
            one.result(20)
        assert caught.value.cause in UnreachableError.transient


@pytest.mark.parametrize("to_server", [True, False], ids=["to the server", "to a relay"])
def test_a_client_that_moves_receives_its_open_assignment_again(loop, to_server):
    slow = Slow(lambda a: None)
    with serving(2, relay_terms=terms(2)) as server:
        relay = RelayEnd(loop, server.target)
        one, other = (relay, server) if to_server else (server, relay)
        older = loop.start(attend(connect(one, 0), 0, slow))
        loop.start(attend(connect(relay, 1), 1))
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        loop.start(attend(connect(other, 0), 0))
        assert server.answers(1) == reports(assignment(0))
        slow.proceed.set()
        assert "the server keeps only the newest" in refused(older)
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0, 2), assignment(1, 2)])
        assert server.answers(2) == reports(assignment(0, 2), assignment(1, 2))
        assert server.transport.receive(0.2) == []


def test_a_newer_stream_at_a_relay_replaces_the_older(loop):
    slow = Slow(lambda a: None)
    with serving(1, relay_terms=terms(1)) as server:
        relay = RelayEnd(loop, server.target)
        older = loop.start(attend(connect(relay, 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        newer = loop.start(attend(connect(relay, 0), 0))
        assert server.answers(1) == reports(assignment(0))
        slow.proceed.set()
        assert "the server keeps only the newest" in refused(older)
        for round in (2, 3):
            server.transport.send([assignment(0, round)])
            assert server.answers(1) == reports(assignment(0, round))
        assert not newer.done() and not server.left


def test_a_client_that_moves_to_another_relay_receives_its_assignment_again(loop):
    slow = Slow(lambda a: None)
    with serving(1, relay_terms=terms(1)) as server:
        relays = [RelayEnd(loop, server.target) for _ in range(2)]
        older = loop.start(attend(connect(relays[0], 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        loop.start(attend(connect(relays[1], 0), 0))
        assert server.answers(1) == reports(assignment(0))
        slow.proceed.set()
        assert "the server keeps only the newest" in refused(older)
        assert server.transport.figures().relays == 2


def test_a_client_that_reconnects_to_its_relay_gets_its_assignment_again(loop):
    slow = Slow()
    with serving(1, relay_terms=terms(1)) as server:
        relay = RelayEnd(loop, server.target)
        first = loop.start(attend(connect(relay, 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        first.cancel()
        slow.proceed.set()
        server.wait_for(lambda: server.left == [0])
        loop.start(attend(connect(relay, 0), 0))
        assert server.answers(1) == reports(assignment(0)) and len(server.joined) == 2


def test_only_a_client_that_does_not_reconnect_to_its_relay_is_lost(loop):
    slow = Slow()
    with serving(2, relay_terms=replace(terms(2), grace_s=0.2)) as server:
        relay = RelayEnd(loop, server.target)
        first = loop.start(attend(connect(relay, 0), 0, slow))
        loop.start(attend(connect(relay, 1), 1))
        server.wait_for_clients(0, 1)
        sent = [assignment(0), assignment(1)]
        server.transport.send(sent)
        assert slow.started.wait(20)
        first.cancel()
        slow.proceed.set()
        assert server.answers(1) == reports(sent[1])
        assert server.answers(1) == {0: Lost(GONE, "reply")}
        server.transport.send([assignment(1, 2)])
        assert server.answers(1) == reports(assignment(1, 2)) and server.left == [0]


@pytest.mark.parametrize("lost", ["client", "relay"])
def test_without_a_time_limit_the_server_waits_for_clients_behind_a_relay(loop, lost):
    slow = Slow()
    patient = {"grace_s": math.inf}
    with serving(2, relay_terms=replace(terms(2), **patient), **patient) as server:
        relay = RelayEnd(loop, server.target)
        first = loop.start(attend(connect(relay, 0), 0, slow))
        server.wait_for_clients(0)
        sent = [assignment(0), assignment(1)]
        server.transport.send(sent)
        assert slow.started.wait(20)
        if lost == "client":
            first.cancel()
        else:
            relay.stop()
        slow.proceed.set()
        server.wait_for_clients()
        assert server.transport.receive(0.5) == []
        if lost == "relay":
            relay = RelayEnd(loop, server.target)
        for client in range(2):
            loop.start(attend(connect(relay, client), client))
        assert server.answers(2) == reports(*sent)


def test_clients_of_a_relay_that_does_not_return_are_lost_after_the_longer_grace_period(
    loop, monkeypatch
):
    monkeypatch.setattr("fedcomp.transports.grpc.port.RELAY_GRACE_S", 1.5)
    slow = Slow(lambda a: None)
    with serving(2, relay_terms=terms(2), grace_s=0.5) as server:
        relay = behind(loop, server, slow, slow)
        sent = [assignment(0), assignment(1)]
        server.transport.send(sent)
        server.wait_for(lambda: len(slow.asked) == 2)
        relay.stop()
        slow.proceed.set()
        server.wait_for_clients()
        assert server.transport.receive(1.0) == []
        loop.start(attend(connect(server, 0), 0))
        assert server.answers(1) == reports(sent[0])
        assert server.answers(1) == {1: Lost(GONE, "reply")}


# A relay whose messages the test sends.


Script = Callable[[RelayConnection, AsyncIterator[object]], object]


class Unresponsive(RelayConnection):
    """A relay's connection that answers no PING."""

    async def _handle(self, kind: Kind, reader: wire.Reader) -> None:
        if kind is not Kind.PING:
            await super()._handle(kind, reader)


async def script(
    server: Server | TcpProxy,
    say: Script,
    kind: type = RelayConnection,
    credentials: Credentials | None = None,
) -> None:
    """Connect as a relay, and call `say` with the connection and the messages that follow the terms and the keys."""
    async with kind(server.target, credentials) as connection:
        messages = connection.messages()
        assert isinstance(await anext(messages), RelayTerms)
        assert isinstance(await anext(messages), dict)
        await say(connection, messages)
        async for _ in messages:
            pass


def announce(presence: Presence, connection: int = 1) -> list[bytes]:
    return relay_wire.encode_entries(Kind.JOINED, [(connection, presence)])


def joined(client: int, connection: int = 1) -> list[bytes]:
    return announce(Presence(RUN, client, "", ""), connection)


async def next_bundle(messages: AsyncIterator[object]) -> relay_wire.Bundle:
    async for message in messages:
        if isinstance(message, relay_wire.Bundle):
            return message
    raise AssertionError


def test_a_report_on_an_assignment_that_a_relay_does_not_have_is_ignored(loop):
    slow, sequence = Slow(), 1

    async def interfere(connection, messages):
        for number in (sequence, sequence + 1):
            forged = replace(report(assignment(0)), examples=7)
            await connection.write(relay_wire.encode_reports([(number, forged, assignment(0))]))
            await connection.write(
                relay_wire.encode_entries(Kind.LOST, [(0, number, "reply", "forged")])
            )
        for kind in (Kind.ANSWERED_LATE, Kind.LEFT):
            await connection.write(relay_wire.encode_entries(kind, [(0,)]))
            await connection.write(relay_wire.encode_entries(kind, [(5,)]))
        await connection.write(joined(1))

    with serving(2, relay_terms=terms(2)) as server:
        loop.start(attend(connect(server, 0), 0, slow))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert slow.started.wait(20)
        loop.start(script(server, interfere))
        server.wait_for_clients(0, 1)  # all messages of the relay have arrived
        assert server.transport.receive(0.1) == [] and not server.left and not server.late_answers
        slow.proceed.set()
        assert server.answers(1) == reports(assignment(0))


def test_the_server_checks_the_keys_of_a_relays_clients(loop, enrolled, secure):
    points = [key.point for key in enrolled.keys]
    disconnects = []

    async def let_in(connection, messages):
        for presence in (
            Presence(RUN, 1, "", "", points[0]),  # the key of another client
            Presence(RUN, 2, "", "", points[2]),  # a key that is revoked
            Presence(RUN, 0, "", ""),  # no key
            Presence(RUN, 3, "", "", points[0]),  # a client that is not in the run
            Presence("ab" * 16, 0, "", "", points[0]),  # another run
        ):
            await connection.write(announce(presence, 7 + len(disconnects)))
            disconnects.append(await anext(messages))
        await connection.write(announce(Presence(RUN, 0, "", "", points[0])))

    with serving(3, relay_terms=terms(3), **secure) as server:
        enrolled.revoked.add(2)
        loop.start(script(server, let_in, credentials=enrolled.relay))
        server.wait_for_clients(0)
        assert [client for client, _ in server.joined] == [0]
        assert all(isinstance(message, relay_wire.Disconnect) for message in disconnects)
        assert [(d.client, d.connection, d.refused.reason) for d in disconnects] == [
            (
                1,
                7,
                "this client showed the key of another client; give each client its own enrolment",
            ),
            (2, 8, "client 2 is revoked"),
            (0, 9, "its key is not in the registry"),
            (3, 10, "client 3 is not part of this run, which has the clients 0 to 2"),
            (0, 11, "the client answered the invitation of another run"),
        ]
        assert not any(message.refused.retry for message in disconnects)


@pytest.mark.parametrize(
    "message",
    [
        b"\x63",
        bytes([Kind.REPORTS]) + b"\xff\xff",
        bytes([Kind.BEGIN]) + wire.varint(1 << 40),
        wire.encode_hello(wire.Hello(0, "1")),
        b"".join(announce(Presence(RUN, 1, "", "", b"no point"))),
        b"".join(joined(-1)),
    ],
    ids=["unknown", "REPORTS", "BEGIN", "HELLO", "no point", "negative id"],
)
def test_a_malformed_message_ends_the_stream_of_its_relay(loop, message):
    async def misbehave(connection, messages):
        await connection.write(joined(0))
        await next_bundle(messages)
        await connection.write([message])

    with serving(2, relay_terms=terms(2)) as server:
        loop.start(script(server, misbehave))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        server.wait_for(lambda: server.left == [0])
        (warning,) = server.warnings
        assert warning.startswith("a relay sent a malformed message, and its connection was closed")
        loop.start(attend(connect(server, 0), 0))
        assert server.answers(1) == reports(assignment(0))
        assert server.transport.figures().relays == 0


def test_a_malformed_report_invalidates_the_reports_before_it_in_its_message(loop):
    """One of the reports in a message may carry the sum of all their updates."""

    async def misbehave(connection, messages):
        await connection.write(joined(0))
        await connection.write(joined(1))
        while len(asked) < 2:
            asked.extend((await next_bundle(messages)).assignments)
        entries = [(s, report(a), a) for s, a in asked]
        await connection.write([*relay_wire.encode_reports(entries), b"\xff"])

    asked = []
    with serving(2, relay_terms=terms(2)) as server:
        loop.start(script(server, misbehave))
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0), assignment(1)])
        server.wait_for(lambda: len(server.left) == 2)
        assert len(asked) == 2 and server.transport.receive(0.1) == []


def test_two_reports_of_one_client_in_a_message_are_refused(loop):
    async def repeat(connection, messages):
        await connection.write(joined(0))
        ((sequence, asked),) = (await next_bundle(messages)).assignments
        entries = [(sequence, report(asked, frame), asked) for frame in (b"one", b"two")]
        await connection.write(relay_wire.encode_reports(entries))

    with serving(1, relay_terms=terms(1)) as server:
        loop.start(script(server, repeat))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        server.wait_for(lambda: server.left == [0])
        assert "two reports of client 0" in server.warnings[0]
        assert server.transport.receive(0.1) == []


@pytest.mark.parametrize("kind", [Kind.ANSWERED_LATE, Kind.REPORTS])
def test_a_relay_reports_one_late_answer_for_each_assignment(loop, kind):
    """Otherwise a malicious relay could fill the memory of the server with events."""

    async def flood(connection, messages):
        await connection.write(joined(0))
        for _ in range(2):
            bundles.append(await next_bundle(messages))
        message = relay_wire.encode_entries(Kind.ANSWERED_LATE, [(0,)])
        if kind is Kind.REPORTS:
            late = [(7, report(assignment(0)), assignment(0))] * 10
            message = relay_wire.encode_reports(late)
        for _ in range(1000):
            await connection.write(message)
        await connection.write(joined(1))

    bundles = []
    with serving(2, relay_terms=terms(2)) as server:
        loop.start(script(server, flood))
        server.wait_for_clients(0)
        for round in (1, 2):
            server.transport.send([assignment(0, round)])
            server.wait_for(lambda count=round: len(bundles) == count)
        server.wait_for_clients(0, 1)  # all messages of the relay have arrived
        assert server.late_answers == [0, 0]


@pytest.mark.parametrize(("clients", "size"), [(12, 200_000), (1, 300_000)])
def test_reports_sent_together_stay_below_the_limit_of_a_single_report(loop, clients, size):
    frame = bytes(size)
    with serving(clients, largest=300_000, relay_terms=terms(clients)) as server:
        behind(loop, server, *[lambda a: report(a, frame)] * clients)
        sent = [assignment(client) for client in range(clients)]
        server.transport.send(sent)
        assert server.answers(clients) == {a.client: report(a, frame) for a in sent}


def test_the_largest_report_fits_into_a_sum_of_many_clients(loop):
    clients, asked = range(300), []

    async def add(connection, messages):
        for client in clients:
            await connection.write(joined(client))
        while len(asked) < len(clients):
            asked.extend((await next_bundle(messages)).assignments)
        entries = [(s, report(a, b"" if a.client else bytes(300_000)), a) for s, a in sorted(asked)]
        await connection.write(relay_wire.encode_reports(entries))

    with serving(len(clients), largest=300_000, relay_terms=terms(len(clients))) as server:
        loop.start(script(server, add))
        server.wait_for_clients(*clients)
        server.transport.send([assignment(client) for client in clients])
        assert len(server.answers(len(clients))[0].frame) == 300_000


def test_a_silent_relay_with_open_assignments_is_disconnected(loop):
    async def freeze(connection, messages):
        await connection.write(joined(0))
        await next_bundle(messages)
        await connection.write(relay_wire.encode_entries(Kind.LEFT, [(0,)]))  # its last message

    with serving(1, relay_terms=terms(1), silence_s=0.5) as server:
        loop.start(script(server, freeze, Unresponsive))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        server.wait_for(lambda: server.left == [0])
        server.wait_for(lambda: server.transport.figures().relays == 0)
        loop.start(attend(connect(server, 0), 0))
        assert server.answers(1) == reports(assignment(0))


def test_a_farewell_reaches_a_relay_that_connects_late_and_its_clients(loop, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.port.FAREWELL_S", 0.2)
    with serving(1, relay_terms=terms(1)) as server:
        server.transport.send_farewell(7)
        relay = RelayEnd(loop, server.target)
        assert loop.run(attend(connect(relay, 0), 0)) == Farewell(RUN, 7)
        assert relay.end.result(20) == Farewell(RUN, 7)


def test_a_relay_that_does_not_read_is_disconnected(loop, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.streams.MAX_QUEUED", 1000)
    monkeypatch.setattr("fedcomp.transports.grpc.port.CLOSE_S", 0.5)
    # The refusals that are not read soon fill this small window.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]

    async def flood() -> None:
        async with grpc.aio.insecure_channel(server.target, options=options) as channel:
            call = channel.stream_stream(wire.METHOD)()
            await call.write(wire.encode_hello(wire.Hello(wire.RELAY, "1.2.3")))
            refused = b"".join(joined(7))  # this client is not part of the run
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                for _ in range(200_000):
                    await call.write(refused)

    with serving(2, relay_terms=terms(2)) as server:
        loop.start(attend(connect(server, 1), 1))
        loop.run(flood(), 120)
        assert server.transport.figures().refused["messages not read"] == 1
        server.wait_for_clients(1)
        server.transport.send([assignment(1)])
        assert server.answers(1) == reports(assignment(1))


def test_assignments_do_not_pile_up_for_a_relay_that_does_not_read(loop):
    rounds, seen = 40, []

    async def listen(connection, messages):
        await connection.write(joined(0))
        async for message in messages:
            if isinstance(message, relay_wire.Bundle):
                seen.extend(assignment.round for _, assignment in message.assignments)

    with serving(1, relay_terms=terms(1)) as server:
        proxy = TcpProxy(server.transport.port)
        loop.start(script(proxy, listen))
        server.wait_for_clients(0)
        proxy.flows_down.clear()
        for round in range(1, rounds + 1):
            server.transport.send([assignment(0, round, [bytes([round]) * (2 << 20)])])
            time.sleep(0.02)
        proxy.flows_down.set()
        server.wait_for(lambda: seen[-1:] == [rounds])
        assert len(seen) < rounds / 2
        proxy.close()


def test_a_late_disconnect_does_not_end_a_newer_connection(loop):
    """The server's DISCONNECT for a client's first connection reaches the relay after the client's second connection."""
    with serving(1, relay_terms=terms(1)) as server:
        proxy = TcpProxy(server.transport.port)
        relay = RelayEnd(loop, proxy.target)
        first = loop.start(attend(connect(relay, 0), 0))
        server.wait_for_clients(0)
        proxy.flows_down.clear()
        direct = loop.start(attend(connect(server, 0), 0))  # the server disconnects the first one
        server.wait_for(lambda: len(server.joined) == 2)
        first.cancel()
        relay.wait_for_clients(0)
        second = loop.start(attend(connect(relay, 0), 0))
        assert "the server keeps only the newest" in refused(direct)
        proxy.flows_down.set()
        for round in (1, 2):
            server.transport.send([assignment(0, round)])
            assert server.answers(1) == reports(assignment(0, round))
        assert not second.done() and server.transport.clients() == [0]
        proxy.close()


def test_a_relay_ends_the_connection_with_the_number_that_the_server_names(loop):
    """The server's DISCONNECT for a client's second connection ends this connection."""
    with serving(1, relay_terms=terms(1)) as server:
        relay = RelayEnd(loop, server.target)
        first = loop.start(attend(connect(relay, 0), 0))
        server.wait_for_clients(0)
        first.cancel()
        server.wait_for_clients()
        second = loop.start(attend(connect(relay, 0), 0))
        server.wait_for_clients(0)
        loop.start(attend(connect(server, 0), 0))
        assert "the server keeps only the newest" in refused(second)
        server.wait_for_clients(0)


# Adding.


SHAPES = {"weight": (5, 8), "bias": (2,)}
LAYOUT = Layout.from_shapes(SHAPES)
IDENTITY = codec("identity")
ADDING = ("identity", json.dumps(SHAPES))


def vector(client: int, round: int = 1) -> torch.Tensor:
    return torch.arange(42, dtype=torch.float32) * (client + 1) + round


def update(a: Assignment) -> Report:
    return report(a, IDENTITY.encode(vector(a.client, a.round)))


def summed(frame: bytes) -> torch.Tensor:
    return IDENTITY.decode(frame, numel=42)


def in_one_batch(server: Server, timeout_s: float = 20.0) -> dict[int, Report | Lost]:
    """Return the next deliveries that arrive together."""
    deadline = time.monotonic() + timeout_s
    while not (deliveries := server.transport.receive(0.2)):
        assert time.monotonic() < deadline
    return {delivery.client: delivery.answer for delivery in deliveries}


def test_a_relay_adds_the_frames_of_its_clients(loop):
    with serving(4, relay_terms=terms(4, *ADDING)) as server:
        relay = RelayEnd(loop, server.target)
        for client in (3, 1, 2):
            loop.start(attend(connect(relay, client), client, update))
        server.wait_for_clients(1, 2, 3)
        for round in (1, 2):
            sent = [assignment(client, round) for client in (1, 2, 3)]
            server.transport.send(sent)
            got = in_one_batch(server)
            assert [*got] == [1, 2, 3]
            assert got[2] == replace(update(sent[1]), frame=b"")
            assert got[3] == replace(update(sent[2]), frame=b"")
            assert got[1] == replace(update(sent[0]), frame=got[1].frame)
            expected = sum(vector(client, round) for client in (1, 2, 3))
            assert torch.equal(summed(got[1].frame), expected)


def test_failed_clients_do_not_delay_the_sum_of_the_others(loop):
    def fail(a: Assignment) -> Report:
        return replace(report(a, b""), kind=FAILED, stage="train", reason="no", ticket="")

    def nothing(a: Assignment) -> Report:
        return report(a, b"")

    with serving(5, relay_terms=terms(5, *ADDING)) as server:
        relay = RelayEnd(loop, server.target)
        for client, answer in enumerate([fail, nothing, update, update]):
            loop.start(attend(connect(relay, client), client, answer))
        loop.start(attend(connect(relay, 4), 4, lambda a: report(a, b"garbage")))
        server.wait_for_clients(*range(5))
        sent = [assignment(client) for client in range(5)]
        server.transport.send(sent)
        got = server.answers(5)
        assert got[0] == fail(sent[0]) and got[1] == nothing(sent[1])
        assert torch.equal(summed(got[2].frame), vector(2) + vector(3))
        assert got[3] == replace(update(sent[3]), frame=b"")
        assert (got[4].kind, got[4].stage) == (FAILED, "relay")


def test_a_report_that_does_not_answer_its_assignment_is_not_added(loop):
    """The server rejects such a report. If the relay added it, the server would reject the whole sum, or accept the update."""
    wrong = [
        {"round": 9},
        {"phase": "other"},
        {"client": 5},
        {"version": "00" * 16},
        {"fingerprint": "00" * 16},
        {"examples": 0},
    ]
    clients = range(len(wrong) + 2)
    with serving(len(clients), relay_terms=terms(len(clients), *ADDING)) as server:
        relay = RelayEnd(loop, server.target)
        for client in clients:
            change = wrong[client] if client < len(wrong) else {}
            answer = lambda a, change=change: replace(update(a), **change)  # noqa: E731
            loop.start(attend(connect(relay, client), client, answer))
        server.wait_for_clients(*clients)
        sent = [assignment(client) for client in clients]
        server.transport.send(sent)
        got = server.answers(len(clients))
        for client, change in enumerate(wrong):
            assert got[client] == replace(update(sent[client]), **change)
        first, second = clients[-2:]
        assert torch.equal(summed(got[first].frame), vector(first) + vector(second))
        assert got[second].frame == b""


def test_a_silent_client_delays_the_sum_of_the_others_up_to_the_time_limit(loop):
    slow = Slow(update)
    with serving(3, relay_terms=terms(3, *ADDING)) as server:
        behind(loop, server, update, slow, update)
        sent = [assignment(client) for client in range(3)]
        server.transport.clock.begin(1.0)
        server.transport.send(sent)
        got = in_one_batch(server)
        assert got.keys() == {0, 2}
        assert torch.equal(summed(got[0].frame), vector(0) + vector(2))
        slow.proceed.set()
        assert in_one_batch(server) == {1: update(sent[1])}


def test_after_the_time_limit_a_late_frame_does_not_wait_for_others(loop):
    slow = [Slow(update), Slow(update)]
    with serving(3, relay_terms=terms(3, *ADDING)) as server:
        behind(loop, server, update, *slow)
        server.transport.clock.begin(0.5)
        server.transport.send([assignment(client) for client in range(3)])
        assert in_one_batch(server) == {0: update(assignment(0))}
        slow[0].proceed.set()
        assert in_one_batch(server) == {1: update(assignment(1))}
        slow[1].proceed.set()
        assert in_one_batch(server) == {2: update(assignment(2))}


def test_the_time_limit_of_one_phase_does_not_end_the_next(loop):
    slow = Slow(update)
    with serving(2, relay_terms=terms(2, *ADDING)) as server:
        behind(loop, server, update, lambda a: slow(a) if a.round == 2 else update(a))
        server.transport.clock.begin(0.5)
        server.transport.send([assignment(0), assignment(1)])
        assert in_one_batch(server).keys() == {0, 1}
        server.transport.clock.begin(None)
        server.transport.send([assignment(0, 2), assignment(1, 2)])
        assert server.transport.receive(0.8) == []
        slow.proceed.set()
        assert in_one_batch(server).keys() == {0, 1}


def test_a_later_assignment_leaves_a_relay_less_time(loop):
    waits_s = []

    async def listen(connection, messages):
        for client in (0, 1):
            await connection.write(joined(client))
            waits_s.append((await next_bundle(messages)).wait_s)

    with serving(2, relay_terms=terms(2, *ADDING)) as server:
        server.transport.clock.begin(100.0)
        server.transport.send([assignment(0), assignment(1)])
        loop.start(script(server, listen))
        server.wait_for(lambda: len(waits_s) == 2)
        assert 80 >= waits_s[0] > waits_s[1] > 0


def test_if_a_sum_is_rejected_all_its_updates_are_rejected(loop):
    """With codecs that add exactly, any frame is a valid sum. The relay of this test therefore sends a malformed sum."""

    async def add(connection, messages):
        for client in range(3):
            await connection.write(joined(client))
        while len(asked) < 3:
            asked.extend((await next_bundle(messages)).assignments)
        frames = [b"no sum", b"", b""]
        sent = [(s, replace(update(a), frame=frames[a.client]), a) for s, a in sorted(asked)]
        await connection.write(relay_wire.encode_reports(sent))

    asked, answered = [], []
    with serving(4, relay_terms=terms(4, *ADDING)) as server:
        loop.start(script(server, add))
        loop.start(attend(connect(server, 3), 3, update))
        server.wait_for_clients(0, 1, 2, 3)
        strategy = Average(StrategyConfig(uplink="identity"), LAYOUT)
        exchange = Exchange(
            server.transport, None, strategy, Phase(), Traffic(), lambda report: None
        )
        exchange.run(
            [assignment(client) for client in range(4)],
            RoundCompletion(),
            lambda count, of: answered.append(count),
        )
    assert [*exchange.accepted] == [3] and sorted(exchange.rejected) == [0, 1, 2]
    assert answered == [1, 2, 3, 4]
    assert [exchange.rejected[client].stage for client in range(3)] == ["reply", "relay", "relay"]
    first, second, third = (exchange.rejected[client].reason for client in range(3))
    assert second == third and second.endswith(
        f"to the update of client 0; the sum was rejected: {first}"
    )


def test_a_relay_cannot_make_the_server_lose_the_sum_of_another(loop):
    async def interfere(connection, messages):
        forged = [
            (1, report(assignment(0)), assignment(0)),
            (2, report(assignment(1)), assignment(1)),
        ]
        await connection.write(relay_wire.encode_reports(forged))
        await connection.write(joined(2))

    with serving(3, relay_terms=terms(3, *ADDING)) as server:
        behind(loop, server, update, update)
        server.transport.send([assignment(0), assignment(1)])
        server.wait_for(lambda: len(server.transport._deliveries) == 2)
        loop.start(script(server, interfere))
        server.wait_for_clients(0, 1, 2)  # all messages of the other relay have arrived
        got = in_one_batch(server)
        assert torch.equal(summed(got[0].frame), vector(0) + vector(1)) and got[1].frame == b""


@pytest.mark.parametrize("seen", [False, True])
def test_a_sum_received_before_one_of_its_assignments_is_cancelled_is_not_accepted(loop, seen):
    with serving(3, relay_terms=terms(3, *ADDING)) as server:
        behind(loop, server, update, update, update)
        server.transport.send([assignment(client) for client in range(3)])
        if seen:
            server.wait_for(lambda: len(server.transport._deliveries) == 3)
        else:
            time.sleep(0.5)
        server.transport.cancel([1])
        got = in_one_batch(server)
        assert got.keys() == {0, 2} and server.late_answers == [1]
        assert all(isinstance(answer, Lost) and answer.stage == "relay" for answer in got.values())


def test_a_relay_that_cannot_add_ends_with_the_reason(loop):
    with serving(1, relay_terms=terms(1, "stc", json.dumps(SHAPES))) as server:
        relay = behind(loop, server, update)
        server.transport.send([assignment(0)])
        with pytest.raises(UserError, match="cannot be merged"):
            relay.end.result(20)


@contextmanager
def waiting_for(loop: Loop, last: int) -> Iterator[tuple[Server, Slow]]:
    """Yield a server whose relay has the updates of two clients and waits for the update of client `last`."""
    slow = Slow(update)
    with serving(3, relay_terms=terms(3, *ADDING)) as server:
        behind(loop, server, *[slow if client == last else update for client in range(3)])
        server.transport.send([assignment(client) for client in range(3)])
        assert slow.started.wait(20)
        assert server.transport.receive(0.3) == []
        yield server, slow


def test_a_withdrawn_assignment_does_not_delay_the_sum(loop):
    with waiting_for(loop, 1) as (server, slow):
        server.transport.cancel([1])
        got = in_one_batch(server)
        assert torch.equal(summed(got[0].frame), vector(0) + vector(2)) and got.keys() == {0, 2}
        slow.proceed.set()
        server.wait_for(lambda: server.late_answers == [1])


def test_a_client_that_moves_does_not_delay_the_sum(loop):
    slow = Slow(lambda a: None)
    with serving(2, relay_terms=terms(2, *ADDING)) as server:
        behind(loop, server, update, slow)
        server.transport.send([assignment(0), assignment(1)])
        assert slow.started.wait(20)
        loop.start(attend(connect(server, 1), 1, update))
        assert server.answers(2) == {i: update(assignment(i)) for i in range(2)}
        slow.proceed.set()


def test_a_client_that_moves_while_its_update_waits_to_be_added_counts_once(loop):
    with waiting_for(loop, 2) as (server, slow):
        loop.start(attend(connect(server, 0), 0, update))
        assert server.answers(1) == {0: update(assignment(0))}
        slow.proceed.set()
        got = in_one_batch(server)
        assert got.keys() == {1, 2} and torch.equal(summed(got[1].frame), vector(1) + vector(2))


def test_a_report_that_waits_to_be_added_can_be_withdrawn(loop):
    with waiting_for(loop, 1) as (server, slow):
        server.transport.cancel([0])
        server.wait_for(lambda: server.late_answers == [0])
        slow.proceed.set()
        got = in_one_batch(server)
        assert torch.equal(summed(got[1].frame), vector(1) + vector(2)) and got.keys() == {1, 2}


@pytest.mark.parametrize("arrived", [False, True], ids=["on its way", "arrived"])
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_sum_that_contains_a_withdrawn_update_is_not_accepted(loop, gone, arrived):
    """All updates of the sum count as lost, so that the clients return them to their error-feedback memories."""
    asked, proceed = [], threading.Event()

    async def add_late(connection, messages):
        for client in range(3):
            await connection.write(joined(client))
        while len(asked) < 3:
            asked.extend((await next_bundle(messages)).assignments)
        await asyncio.to_thread(proceed.wait, 20)
        frame = IDENTITY.encode(sum(vector(client) for client in range(3)))
        entries = [
            (s, replace(update(a), frame=b"" if a.client else frame), a) for s, a in sorted(asked)
        ]
        await connection.write(relay_wire.encode_reports(entries))

    with serving(3, relay_terms=terms(3, *ADDING)) as server:
        loop.start(script(server, add_late))
        server.wait_for_clients(0, 1, 2)
        server.transport.send([assignment(client) for client in range(3)])
        server.wait_for(lambda: len(asked) == 3)
        if arrived:
            proceed.set()
            time.sleep(0.3)  # the answers have arrived, but the main thread has not read them
        server.transport.cancel([gone])
        proceed.set()
        got = in_one_batch(server)
        assert got.keys() == {0, 1, 2} - {gone}
        assert all(isinstance(answer, Lost) and answer.stage == "relay" for answer in got.values())
        assert all(f"client {gone}" in answer.reason for answer in got.values())
        server.wait_for(lambda: server.late_answers == [gone])


def test_a_relay_adds_s2_tables(loop):
    c = codec("topk:density=1/4+s2:union=4")

    def table(a: Assignment) -> Report:
        return report(a, c.encode(vector(a.client), seed=a.round))

    with serving(3, relay_terms=terms(3, str(c), json.dumps(SHAPES))) as server:
        behind(loop, server, table, table, table)
        sent = [assignment(client) for client in range(3)]
        server.transport.send(sent)
        got = in_one_batch(server)
        expected = sum(c.decode(table(a).frame, numel=42) for a in sent)
        assert torch.allclose(c.decode(got[0].frame, numel=42), expected, atol=1e-4)
        assert [len(got[client].frame) for client in (1, 2)] == [0, 0]


def test_a_farewell_ends_a_relay_whose_clients_are_training(loop):
    slow = Slow()
    with serving(2, relay_terms=terms(2)) as server:
        relay = RelayEnd(loop, server.target)
        ends = [loop.start(attend(connect(relay, i), i, slow if i else report)) for i in range(2)]
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(1)])
        assert slow.started.wait(20)
        farewell = threading.Thread(target=lambda: server.transport.send_farewell(1))
        farewell.start()
        assert ends[0].result(20) == Farewell(RUN, 1)
        slow.proceed.set()
        assert ends[1].result(20) == Farewell(RUN, 1)
        assert relay.end.result(20) == Farewell(RUN, 1)
        farewell.join(20)
        server.wait_for_clients()


def test_a_relay_adds_the_updates_of_100_clients(loop):
    count = 100
    with serving(count, relay_terms=terms(count, *ADDING)) as server:
        relay = behind(loop, server, *[update] * count)
        sent = [assignment(client) for client in range(count)]
        server.transport.send(sent)
        got = in_one_batch(server)
        assert [*got] == [*range(count)]
        expected = sum(vector(client) for client in range(count))
        assert torch.allclose(summed(got[0].frame), expected)
        server.transport.send_farewell(1)
        relay.end.result(20)
