"""Bytes counted where they pass: at the socket."""

import socket
import threading
from typing import NamedTuple

Client = bytes | str  # a node's public key (PEM), or an address

CLIENTS = 10_000  # that are counted one by one
OTHERS = "others"  # the rest, together


class Traffic(NamedTuple):
    """Bytes that a socket gave and took: heads, bodies and, under TLS, handshakes and records. Not those of TCP and IP."""

    received_bytes: int = 0
    sent_bytes: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.received_bytes + other.received_bytes, self.sent_bytes + other.sent_bytes
        )

    def minus(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.received_bytes - other.received_bytes, self.sent_bytes - other.sent_bytes
        )


class CountedSocket(socket.socket):
    """Takes a socket over. Counts what asyncio's own loop moves through it; TLS is above it, so its bytes are in."""

    def __init__(self, taken: socket.socket):
        super().__init__(taken.family, taken.type, taken.proto, taken.detach())
        self.setblocking(False)
        self.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, True
        )  # a head and a body are two writes
        self.received_bytes = self.sent_bytes = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self.received_bytes, self.sent_bytes)

    def recv(self, *args, **options) -> bytes:
        data = super().recv(*args, **options)
        self.received_bytes += len(data)
        return data

    def recv_into(self, *args, **options) -> int:
        count = super().recv_into(*args, **options)
        self.received_bytes += count
        return count

    def send(self, *args, **options) -> int:
        count = super().send(*args, **options)
        self.sent_bytes += count
        return count

    def sendmsg(self, *args, **options) -> int:
        count = super().sendmsg(*args, **options)
        self.sent_bytes += count
        return count


class Account:
    """What one connection carried, and for whom: its address, until the SuperLink has believed a public key."""

    def __init__(self, socket: CountedSocket, address: str):
        self.socket = socket
        self.owner: Client = address
        self.settled = Traffic()

    @property
    def open(self) -> Traffic:
        return self.socket.traffic.minus(self.settled)


class Ledger:
    """Bytes by client. Connections keep it in one thread, anyone may read it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled: dict[Client, Traffic] = {}
        self._accounts: set[Account] = set()

    def open(self, account: Account) -> None:
        with self._lock:
            self._accounts.add(account)

    def settle(self, account: Account, owner: Client | None = None) -> None:
        """Book what the connection carried since it was last settled, on its owner, or on a new one from here on."""
        with self._lock:
            account.owner = account.owner if owner is None else owner
            carried = account.open
            account.settled = account.settled.plus(carried)
            self._add(self._settled, account.owner, carried)

    def close(self, account: Account) -> None:
        self.settle(account)
        with self._lock:
            self._accounts.discard(account)

    def read(self) -> dict[Client, Traffic]:
        """Up to this moment, connections that are open included."""
        with self._lock:
            clients = dict(self._settled)
            for account in self._accounts:
                self._add(clients, account.owner, account.open)
            return clients

    @staticmethod
    def _add(clients: dict[Client, Traffic], client: Client, carried: Traffic) -> None:
        if client not in clients and len(clients) >= CLIENTS:
            client = OTHERS
        clients[client] = clients.get(client, Traffic()).plus(carried)
