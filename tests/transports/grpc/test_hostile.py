"""The port under attack: hostile messages, connections and clients do not disturb other clients."""

import asyncio
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from cases import for_each
from grpc_ends import (
    INVITATION,
    LARGEST,
    Authority,
    Loop,
    Server,
    assignment,
    attend,
    attend_again,
    connect,
    needs_byte_counts,
    report,
    serving,
)
from one_server import one_server

from fedcomp.errors import UnreachableError
from fedcomp.messages import Assignment, Invitation, Presence
from fedcomp.server.transport import Lost
from fedcomp.transports.grpc import GrpcConnection, Refused, wire
from fedcomp.transports.grpc.options import client_options
from fedcomp.transports.grpc.traffic import ACKED, FLOOD_BYTES, SIZE, U64

HELLO = wire.encode_hello(wire.Hello(0, "1.2.3"))
CLIENT_0 = Invitation("", 0, "", "", "")
PRESENCE = b"".join(wire.encode(wire.Kind.PRESENCE, Presence(INVITATION.run, 0, "", ""), CLIENT_0))
WITHOUT_POINT = b"".join(
    wire.encode(wire.Kind.PRESENCE, Presence(INVITATION.run, 0, "", "", b"no point"), CLIENT_0)
)
JUNK = bytes([wire.Kind.REPORT]) + b"\xff" * 40


@contextmanager
def undisturbed(loop: Loop, **settings: Any) -> Iterator[Server]:
    """Yield a server with client 1. Check at the end that this client still takes part in rounds."""
    with serving(2, **settings) as server:
        loop.start(attend(connect(server, 1), 1))
        server.wait_for_clients(1)
        yield server
        check_client_1(server)


def check_client_1(server: Server) -> None:
    server.wait_for_clients(1)
    server.transport.send([assignment(1, 9)])
    assert server.answers(1) == {1: report(assignment(1, 9))}


def tcp(server: Server, timeout_s: float = 10) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.transport.port), timeout_s)


async def refusal_of(server: Server, messages: Sequence[bytes]) -> Refused | None:
    """Send gRPC messages on a stream without TLS. Return the server's refusal, or None if the stream ends without one."""
    async with grpc.aio.insecure_channel(server.target, options=client_options()) as channel:
        call = channel.stream_stream(wire.METHOD)()
        refused = None

        async def read() -> None:
            nonlocal refused
            async for data in call:
                if data[0] == wire.Kind.REFUSED:
                    refused = wire.decode_refused(wire.Reader(data[1:]))

        reading = asyncio.create_task(read())
        for message in messages:
            try:
                await call.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                break
        await asyncio.wait_for(reading, 30)
        return refused


@for_each(
    "messages",
    [
        [b""],
        [b"\xff\xff\xff"],
        [JUNK],
        [HELLO, HELLO],
        [PRESENCE],
        [HELLO, PRESENCE, JUNK],
        [HELLO, PRESENCE, bytes([wire.Kind.REPORT]) + wire.varint(1)],
        [HELLO, PRESENCE, bytes([wire.Kind.REPORT]) + wire.varint(0)],
        [HELLO, bytes([wire.Kind.BEGIN]) + wire.varint(1 << 30)],
        [HELLO, PRESENCE, bytes([wire.Kind.BEGIN]) + wire.varint(1000)],  # without an assignment
        [HELLO, WITHOUT_POINT],
        [HELLO, PRESENCE, wire.PING],
        [HELLO, PRESENCE, wire.PONG],
        [HELLO, PRESENCE, bytes([wire.Kind.FAREWELL, 0])],
        [bytes([wire.Kind.HELLO, wire.PROTOCOL, 0])],
        [HELLO, bytes([wire.Kind.PART]) + b"x" * 1000],
    ],
)
def test_unexpected_messages_close_the_stream_with_a_reason(loop, messages):
    with undisturbed(loop) as server:
        refused = loop.run(refusal_of(server, messages))
        assert "the server received a malformed message" in refused.reason


def test_a_report_larger_than_the_limit_ends_its_stream(loop):
    async def answer_too_much(connection: GrpcConnection):
        async with connection:
            async for message in connection.messages():
                if isinstance(message, Invitation):
                    await connection.send(Presence(message.run, 0, message.version, ""))
                elif isinstance(message, Assignment):
                    with suppress(UnreachableError):
                        await connection.send(report(message, bytes(2 * LARGEST)))
                elif isinstance(message, Refused):
                    return message

    with undisturbed(loop) as server:
        end = loop.start(answer_too_much(connect(server, 0)))
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0)])
        assert "announced" in end.result(20).reason
        lost = server.receive(1)[0].answer
        assert isinstance(lost, Lost) and "announced" in lost.reason
        check_client_1(server)
        assert any("client 0 sent a malformed message" in warning for warning in server.warnings)


def test_a_report_of_another_round_is_passed_to_the_round_loop(loop):
    with serving(1) as server:
        loop.start(attend(connect(server, 0), 0, lambda a: report(assignment(0, a.round + 1))))
        server.wait_for_clients(0)
        server.transport.send([assignment(0)])
        assert server.receive(1)[0].answer == report(assignment(0, 2))


def test_another_protocol_version_is_refused(loop):
    with serving(1) as server:
        newer = wire.encode_hello(wire.Hello(0, "9.1", wire.PROTOCOL + 1)) + b"more"
        refused = loop.run(refusal_of(server, [newer]))
        assert not refused.retry
        assert f"version {wire.PROTOCOL + 1} of the protocol (fedcomp 9.1)" in refused.reason


@pytest.mark.parametrize("client", [2, 1 << 40, -5])
def test_ids_outside_of_the_run_are_refused(loop, client):
    with serving(2) as server:
        refused = loop.run(attend(connect(server, client), client))
        assert not refused.retry
        assert "not part of this run, which has the clients 0 to 1" in refused.reason
        server.wait_for(lambda: len(server.warnings) == 1)


def test_a_client_without_a_claim_names_its_id_in_its_presence(loop):
    with serving(2) as server:
        loop.start(attend(connect(server), 1))
        check_client_1(server)


@pytest.mark.parametrize("reason", ["its data are missing", "because " * 50_000])
def test_a_client_that_cannot_take_part_is_warned_about(loop, reason):
    async def refuse(connection: GrpcConnection):
        async with connection:
            async for message in connection.messages():
                await connection.send(Presence(message.run, 0, "", reason))

    with serving(1) as server:
        with pytest.raises(UnreachableError):
            loop.run(refuse(connect(server, 0)))
        server.wait_for(lambda: server.warnings == [f"client 0 cannot take part: {reason[:1000]}"])
        assert not server.joined


def test_a_client_that_joins_too_often_must_wait(loop):
    with serving(1) as server:
        refused = [loop.run(refusal_of(server, [HELLO, JUNK])) for _ in range(12)]
        assert "joins too often" in refused[-1].reason and refused[-1].retry


# TLS.


def test_certificates_of_another_authority_are_refused(loop, authority, enrolled, secure):
    other = Authority()
    with serving(2, **secure) as server:
        loop.start(attend(connect(server, credentials=enrolled.credentials[1]), 1))
        foreign = other.client(ca=authority.ca)
        distrustful = replace(enrolled.credentials[0], ca=other.ca)
        for wrong in (foreign, distrustful, None):
            with pytest.raises(UnreachableError):
                loop.run(attend(connect(server, 0, wrong), 0))
        check_client_1(server)


def test_a_key_that_is_not_enrolled_is_refused(loop, authority, secure):
    with serving(2, **secure) as server:
        refused = loop.run(attend(connect(server, credentials=authority.client()), 0))
        assert refused == Refused("its key is not in the registry", False)


@pytest.mark.deploy
def test_connections_without_a_certificate_or_with_old_tls_are_refused(
    authority, enrolled, tmp_path
):
    """The server runs in a separate process, because fedcomp must set environment variables before gRPC is imported."""
    own = enrolled.credentials[0]
    (tmp_path / "its.crt").write_bytes(own.certificate)
    (tmp_path / "its.key").write_bytes(own.key)

    def shake_hands(certificate: bool, newest: ssl.TLSVersion) -> bytes:
        """Return the server's first bytes, or b"" if it ends the connection."""
        context = ssl.create_default_context(cadata=authority.ca.decode())
        context.maximum_version = newest
        context.set_alpn_protocols(["h2"])
        if certificate:
            context.load_cert_chain(tmp_path / "its.crt", tmp_path / "its.key")
        plain = socket.create_connection(("127.0.0.1", port), 10)
        with plain, suppress(ssl.SSLError, ConnectionError):
            with context.wrap_socket(plain, server_hostname="localhost") as tls:
                return tls.recv(100)
        return b""

    with one_server(authority.server()) as port:
        assert shake_hands(True, ssl.TLSVersion.TLSv1_3)
        assert not shake_hands(False, ssl.TLSVersion.TLSv1_3)
        assert not shake_hands(True, ssl.TLSVersion.TLSv1_2)


def test_a_client_with_tls_cannot_join_at_a_port_without_tls(loop, enrolled):
    with serving(3) as server:
        with pytest.raises(UnreachableError):
            loop.run(attend(connect(server, credentials=enrolled.credentials[0]), 0))


# Connections.


def test_half_open_connections_do_not_keep_clients_out(loop, enrolled, secure):
    with serving(3, **secure) as server, ExitStack() as sockets:
        for _ in range(2000):
            sockets.enter_context(tcp(server))
        loop.start(attend_again(server, 1, credentials=enrolled.credentials[1]))
        check_client_1(server)


def test_bytes_that_are_not_http_do_not_disturb_others(loop):
    with ExitStack() as sockets, undisturbed(loop) as server:
        for data in (
            b"\x00" * 100_000,
            b"GET / HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            wrong = sockets.enter_context(tcp(server))
            with suppress(ConnectionError):  # the server may close the connection
                wrong.sendall(data)


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return an HTTP/2 frame."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
HEADERS = (
    b"\x83\x86"  # :method POST, :scheme http
    + b"\x04" + bytes([len(wire.METHOD)]) + wire.METHOD.encode()
    + b"\x01\x01x"  # :authority
    + b"\x00\x0ccontent-type\x10application/grpc"
    + b"\x00\x02te\x08trailers"
)  # fmt: skip


def test_rapid_stream_resets_do_not_disturb_others(loop):
    with ExitStack() as sockets, undisturbed(loop) as server:
        fast = sockets.enter_context(tcp(server))
        with suppress(ConnectionError):  # the server may close the connection
            fast.sendall(PREFACE)
            for stream in range(1, 20_001, 2):
                fast.sendall(frame(1, 4, stream, HEADERS) + frame(3, 0, stream, b"\0\0\0\x08"))
        check_client_1(server)
        server.wait_for(lambda: server.transport.figures().streams == 1)


def test_connections_that_are_reset_while_bytes_are_counted_do_not_disturb_others(loop):
    def reset_connections() -> None:
        for _ in range(250):
            with tcp(server) as reset, suppress(ConnectionError):
                reset.sendall(PREFACE)
                time.sleep(0.0005)
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with undisturbed(loop) as server:
        threads = [threading.Thread(target=reset_connections) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            server.transport.figures()


@needs_byte_counts
def test_a_connection_without_a_stream_is_cut_when_it_is_flooded(loop):
    with ExitStack() as sockets, undisturbed(loop, silence_s=0.5) as server:
        flooding = sockets.enter_context(tcp(server, 2))
        flooding.sendall(PREFACE)
        priorities = frame(2, 0, 1, bytes(5)) * 1000
        with pytest.raises(OSError):
            for _ in range(10_000):
                flooding.sendall(priorities)


@needs_byte_counts
def test_a_flood_of_headers_is_stopped_before_it_fills_the_memory(loop):
    """gRPC stores the headers of a stream until they end, and needs many times their size."""
    with ExitStack() as sockets, undisturbed(loop) as server:
        fields = frame(9, 0, 1, b"\0\1a\1b" * 800)  # header fields "a: b" without END_HEADERS
        for n in range(1, 4):
            flooding = sockets.enter_context(tcp(server, 2))
            flooding.sendall(PREFACE + frame(1, 0, 1, HEADERS))
            n_frames = 0
            while server.transport.figures().refused.get("flood", 0) < n:
                assert n_frames < FLOOD_BYTES // len(fields)
                flooding.sendall(fields)
                n_frames += 1
                time.sleep(0.005)
        check_client_1(server)
        [warning] = server.warnings
        assert warning.startswith("a connection from 127.0.0.1 on which no client has joined sent ")


@needs_byte_counts
def test_clients_join_while_a_host_opens_many_connections(loop, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.options.MIN_HALF_OPEN", 10)
    monkeypatch.setattr("fedcomp.transports.grpc.options.SPARE_CONNECTIONS", 10)
    with serving(2) as server, ExitStack() as sockets:
        for _ in range(100):
            sockets.enter_context(tcp(server, 2))
        loop.start(attend_again(server, 1))
        check_client_1(server)
        server.wait_for(lambda: server.transport.figures().refused.get("half open", 0) > 0)


@needs_byte_counts
def test_a_client_that_floods_its_connection_with_http2_frames_is_cut_off(loop):
    with ExitStack() as sockets, undisturbed(loop, silence_s=0.5) as server:
        flooding = sockets.enter_context(tcp(server, 2))
        flooding.sendall(PREFACE + frame(1, 4, 1, HEADERS))
        for message in (HELLO, PRESENCE):
            flooding.sendall(frame(0, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message))
        server.wait_for_clients(0, 1)
        pongs = frame(6, 1, 0, bytes(8)) * 1000  # answers to pings that the server did not send
        with pytest.raises(OSError):  # the server cut the connection, or no longer reads from it
            for _ in range(10_000):
                flooding.sendall(pongs)
        check_client_1(server)
        assert server.left == [0] and server.transport.figures().refused["flood"] == 1
        assert server.warnings[0].startswith("client 0 sent ")
        refused = loop.run(refusal_of(server, [HELLO]))
        assert refused.retry and "client 0 joins too often" in refused.reason


@needs_byte_counts
def test_a_refused_client_that_does_not_read_its_refusal_may_not_flood(loop, monkeypatch):
    monkeypatch.setattr("fedcomp.transports.grpc.port.CLOSE_S", 600.0)
    with ExitStack() as sockets, undisturbed(loop) as server:
        flooding = sockets.enter_context(tcp(server, 2))
        no_window = frame(4, 0, 0, struct.pack(">HI", 4, 0))
        hello = wire.encode_hello(wire.Hello(5, "1.2.3"))
        message = b"\0" + len(hello).to_bytes(4, "big") + hello
        flooding.sendall(PREFACE + no_window + frame(1, 4, 1, HEADERS) + frame(0, 0, 1, message))
        server.wait_for(lambda: sum(server.transport.figures().refused.values()) == 1)
        priorities = frame(2, 0, 3, bytes(5)) * 1000
        with pytest.raises(OSError):
            for _ in range(10_000):
                flooding.sendall(priorities)


def test_a_second_stream_on_a_connection_is_refused(loop):
    async def twice() -> list[Refused]:
        refused = []
        async with grpc.aio.insecure_channel(server.target, options=client_options()) as channel:
            for message in (wire.encode_hello(wire.Hello(5, "0.2", wire.PROTOCOL)), HELLO):
                call = channel.stream_stream(wire.METHOD)()
                await call.write(message)
                async for data in call:
                    refused.append(wire.decode_refused(wire.Reader(data[1:])))
        return refused

    with undisturbed(loop) as server:
        first, second = loop.run(twice())
        assert "not part of this run" in first.reason
        assert second.retry and "open a new connection" in second.reason


@needs_byte_counts
def test_data_after_a_malformed_message_are_discarded(loop):
    with ExitStack() as sockets, undisturbed(loop) as server:
        flooding = sockets.enter_context(tcp(server, 2))
        message = b"\0" + len(JUNK).to_bytes(4, "big") + JUNK
        flooding.sendall(PREFACE + frame(1, 4, 1, HEADERS) + frame(0, 0, 1, message))
        server.wait_for(lambda: server.transport.figures().refused.get("malformed message") == 1)
        flooding.sendall(frame(0, 0, 1, bytes(16_000)))
        check_client_1(server)
        time.sleep(0.1)
        tcp_info = flooding.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
        # The server's kernel acknowledged only the first message.
        assert U64.unpack_from(tcp_info, ACKED)[0] < 1000


def test_a_stream_that_does_not_join_is_closed(loop):
    with undisturbed(loop, join_s=0.5) as server:
        refused = loop.run(refusal_of(server, [HELLO]))
        assert refused.retry and "did not join within 0.5 s" in refused.reason


def test_a_client_may_begin_one_report_per_assignment(loop):
    begin = bytes([wire.Kind.BEGIN]) + wire.varint(1 << 20)

    async def begin_again() -> Refused | None:
        async with grpc.aio.insecure_channel(server.target, options=client_options()) as channel:
            call = channel.stream_stream(wire.METHOD)()
            for message in (HELLO, PRESENCE):
                await call.write(message)
            async for data in call:
                if data[0] == wire.Kind.ASSIGNMENT:
                    for _ in range(2):
                        await call.write(begin)
                if data[0] == wire.Kind.REFUSED:
                    return wire.decode_refused(wire.Reader(data[1:]))

    with undisturbed(loop) as server:
        end = loop.start(begin_again())
        server.wait_for_clients(0, 1)
        server.transport.send([assignment(0)])
        assert "at most 0 bytes are allowed" in end.result(20).reason
        lost = server.receive(1)[0].answer
        assert isinstance(lost, Lost) and "at most 0 bytes are allowed" in lost.reason
