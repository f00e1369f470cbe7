"""The two sides of the gRPC transport for tests: certificates, a server, relays and clients."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fedcomp.errors import UnreachableError
from fedcomp.keys import certificates
from fedcomp.keys.registry import KeyStatus
from fedcomp.messages import (
    FRAMES,
    UPDATE,
    Assignment,
    Farewell,
    Invitation,
    Presence,
    Report,
    next_version,
    ticket,
)
from fedcomp.server.transport import Delivery, Lost
from fedcomp.transports.grpc import (
    Credentials,
    GrpcConnection,
    GrpcTransport,
    PortSettings,
    Relay,
    RelayTerms,
)
from fedcomp.transports.grpc.io_loop import io_loop
from fedcomp.transports.grpc.settings import peer_key
from fedcomp.transports.grpc.traffic import counts_bytes

RUN = "0123456789abcdef" * 2
VERSION = "00112233445566778899aabbccddeeff"
INVITATION = Invitation(RUN, -1, '{"lr":0.1}', "ab" * 16, VERSION)
LARGEST = 64 << 20
needs_byte_counts = pytest.mark.skipif(
    not counts_bytes(), reason="the platform does not count bytes of connections"
)


def assignment(client: int, round: int = 1, frames: list[bytes] | None = None) -> Assignment:
    frames = [b"f" * 50] if frames is None else frames
    version = VERSION
    for frame in frames:
        version = next_version(version, frame)
    return Assignment(round, "train", client, FRAMES, VERSION, version, "cd" * 16, frames, "")


def terms(clients: int, codec: str = "", shapes: str = "") -> RelayTerms:
    """Return the terms of a run for relays."""
    i = INVITATION
    return RelayTerms(
        i.run, i.options, i.layout, i.version, clients, LARGEST, LARGEST, codec, shapes
    )


def report(answered: Assignment, frame: bytes = b"u" * 50) -> Report:
    a = answered
    name = ticket(a.round, a.client, frame)
    return Report(
        a.round, a.phase, a.client, UPDATE, a.version, a.fingerprint, frame, name, 600, 1.25, "", ""
    )


class Authority:
    """A CA, which makes certificates of servers, relays and clients."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)
        self.ends = self.now + timedelta(days=30)
        self.key = ec.generate_private_key(ec.SECP384R1())
        self.ca = certificates.certificate_pem(
            certificates.ca_certificate(self.key, self.now, self.ends)
        )

    def server(self, relay: bool = False) -> Credentials:
        key = ec.generate_private_key(ec.SECP384R1())
        hosts = certificates.certificate_hosts([])
        made = certificates.server_certificate(
            key.public_key(), hosts, self.key, self.now, self.ends, relay=relay
        )
        return Credentials(
            certificates.certificate_pem(made), certificates.private_key_pem(key), self.ca
        )

    def client(self, ca: bytes | None = None) -> Credentials:
        key = ec.generate_private_key(ec.SECP384R1())
        names = [
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
            for name in ("fedcomp client", certificates.ISSUER)
        ]
        made = (
            x509.CertificateBuilder()
            .subject_name(names[0])
            .issuer_name(names[1])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.now - timedelta(hours=1))
            .not_valid_after(self.ends)
            .sign(self.key, hashes.SHA384())
        )
        return Credentials(
            certificates.certificate_pem(made), certificates.private_key_pem(key), ca or self.ca
        )


class Enrolled:
    """The enrolled keys of clients and of one relay, with the interface `settings.Keys`."""

    def __init__(self, authority: Authority, clients: int):
        self.credentials = [authority.client() for _ in range(clients)]
        self.keys = [peer_key(own.certificate) for own in self.credentials]
        self.ids = {key.hash: client for client, key in enumerate(self.keys)}
        self.revoked: set[int] = set()
        self.relay = authority.server(relay=True)
        self.relays = {peer_key(self.relay.certificate).hash: 0}
        self.problem = ""

    def ids_by_hash(self) -> dict[bytes, int]:
        return {hash: client for hash, client in self.ids.items() if client not in self.revoked}

    def find(self, key_hash: bytes) -> KeyStatus:
        client, relay = self.ids.get(key_hash), self.relays.get(key_hash)
        if client in self.revoked:
            return KeyStatus(reason=f"client {client} is revoked")
        if client is None and relay is None:
            return KeyStatus(reason="its key is not in the registry")
        return KeyStatus(client, relay)


class Server:
    """A transport on a free port of loopback, and the calls of its callbacks."""

    def __init__(
        self,
        clients: int,
        enrolled: Enrolled | None = None,
        credentials: Credentials | None = None,
        largest: int = LARGEST,
        **more: Any,
    ):
        self.joined: list[tuple[int, Presence]] = []
        self.left: list[int] = []
        self.late_answers: list[int] = []
        self.warnings: list[str] = []
        self.transport = GrpcTransport(
            PortSettings(
                "127.0.0.1", 0, INVITATION, clients, largest, credentials, enrolled, **more
            ),
            on_joined=lambda client, presence: self.joined.append((client, presence)),
            on_left=self.left.append,
            on_late_answer=self.late_answers.append,
            warn=self.warnings.append,
        )
        self.transport.open()
        self.target = f"localhost:{self.transport.port}"

    def wait_for(self, true: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Handle events until a condition holds."""
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, (self.joined[-3:], self.left, self.warnings)
            self.transport.clients()
            time.sleep(0.005)

    def wait_for_clients(self, *clients: int, timeout_s: float = 20.0) -> None:
        self.wait_for(lambda: set(self.transport.clients()) == set(clients), timeout_s)

    def receive(self, count: int, timeout_s: float = 20.0) -> dict[int, Delivery]:
        """Wait for `count` deliveries. Return them by client."""
        deliveries: list[Delivery] = []
        deadline = time.monotonic() + timeout_s
        while len(deliveries) < count:
            assert time.monotonic() < deadline, (len(deliveries), self.left, self.warnings)
            deliveries += self.transport.receive(0.2)
        return {delivery.client: delivery for delivery in deliveries}

    def answers(self, count: int) -> dict[int, Report | Lost]:
        """Wait for `count` answers. Return them by client."""
        return {client: delivery.answer for client, delivery in self.receive(count).items()}


@contextmanager
def serving(clients: int, **more: Any) -> Iterator[Server]:
    server = Server(clients, **more)
    try:
        yield server
    finally:
        server.transport.close()


class Loop:
    """The event loop of all gRPC streams, in which tests run clients and relays until `close`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(self._tracked(work), io_loop())

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 30.0) -> Any:
        return self.start(work).result(timeout_s)

    def close(self) -> None:
        async def cancel_all() -> None:
            tasks = [*self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel_all(), io_loop()).result(10)

    async def _tracked(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)


class RelayEnd:
    """A relay on a free port of loopback, and the calls of its callbacks. `end` has its farewell or its error."""

    def __init__(
        self, loop: Loop, target: str, credentials: Credentials | None = None, port: int = 0
    ):
        self.warnings: list[str] = []
        self.clients = 0
        self._gone = threading.Event()
        opened: Future[int] = Future()

        def changed(clients: int) -> None:
            self.clients = clients

        relay = Relay(
            target,
            "127.0.0.1",
            port,
            credentials,
            opened=lambda port, terms: opened.set_result(port),
            changed=changed,
            warn=self.warnings.append,
        )
        self.end = loop.start(self._run(relay))
        wait([opened, self.end], 20, FIRST_COMPLETED)
        if self.end.done():
            self.end.result()
        self.port = opened.result(0)
        self.target = f"localhost:{self.port}"

    async def _run(self, relay: Relay) -> Farewell:
        try:
            return await relay.run()
        finally:
            self._gone.set()

    def wait_for_clients(self, count: int) -> None:
        """Wait until `count` clients are connected."""
        deadline = time.monotonic() + 20
        while self.clients != count:
            assert time.monotonic() < deadline, self.clients
            time.sleep(0.005)

    def stop(self) -> None:
        """End the relay without a farewell, as a kill does, and wait until its port is free."""
        self.end.cancel()
        assert self._gone.wait(20)


class Slow:
    """An `answer` of `attend` that waits until the test sets `proceed`."""

    def __init__(self, answer: Callable[[Assignment], Report | None] = report):
        self.answer = answer
        self.started, self.proceed = threading.Event(), threading.Event()
        self.asked: list[Assignment] = []

    def __call__(self, a: Assignment) -> Report | None:
        self.asked.append(a)
        self.started.set()
        assert self.proceed.wait(20)
        return self.answer(a)


async def attend(
    connection: GrpcConnection,
    client: int,
    answer: Callable[[Assignment], Report | None] = report,
    seen: list[Any] | None = None,
) -> Any:
    """Take part in a run until it ends. Return the last message. `answer` returns the report on an assignment, or None for no report."""
    async with connection:
        async for message in connection.messages():
            if seen is not None:
                seen.append(message)
            if isinstance(message, Invitation):
                await connection.send(Presence(message.run, client, message.version, ""))
            elif isinstance(message, Assignment):
                answered = await asyncio.to_thread(answer, message)
                if answered is not None:
                    await connection.send(answered)
            elif isinstance(message, Farewell):
                return message
        return message


async def attend_again(where: Server | RelayEnd, client: int, answer=report, **how: Any) -> Any:
    """Take part in a run until it ends. If the connection is lost, connect again."""
    while True:
        try:
            return await attend(connect(where, client, **how), client, answer)
        except UnreachableError:
            await asyncio.sleep(0.05)


def connect(
    server: Server | RelayEnd, client: int = -1, credentials: Credentials | None = None
) -> GrpcConnection:
    return GrpcConnection(server.target, largest=LARGEST, credentials=credentials, client=client)
