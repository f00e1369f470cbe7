"""The public port in front of a SuperLink that listens on loopback.

The SuperLink serves clients (/v1/fleet), those who submit code (/v1/control) and its own processes (/v1/runtime) on one
port, and asks the latter two for nothing. The guard lets an exact list of requests through (heads.py), ends TLS, streams
bodies in both directions, counts bytes by client at the socket (traffic.py) and holds everybody to limits (limits.py).
Whatever it refuses gets a status, no body, and the end of its connection.

Every connection of a client has its own connection to the SuperLink, so no answer can reach another client.
"""

import asyncio
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Self

from .http_connection import LINGER_S, Visit
from .limits import Buckets, Limits, address_of
from .ports import files_for, listen, server_context
from .traffic import Client, CountedSocket, Ledger, Traffic

TURNED_AWAY = 32  # connections over a limit that are told so at once; the rest are closed unheard

log = logging.getLogger(__name__)


class Guard:
    """A thread that serves the public port between `start()` and `stop()`. Raises ConfigError where it cannot.

    `admits(public_key)`, the key as PEM, decides before a body is read whether a node may go on (else 401), in the guard's
    thread: it must be quick. That the node owns the key is for the SuperLink to verify. Plain HTTP without a certificate.
    """

    def __init__(
        self,
        listen_host: str,
        listen_port: int,
        upstream_port: int,
        *,
        certificate: Path | None = None,
        key: Path | None = None,
        limits: Limits | None = None,
        admits: Callable[[bytes], bool] | None = None,
    ):
        self.host, self.port, self.upstream_port = (
            listen_host,
            listen_port,
            upstream_port,
        )  # port 0: a free one, once started
        self.limits, self.admits = limits or Limits(), admits
        self.tls = server_context(certificate, key)
        self.refused: Counter[int] = Counter()  # by status
        self.ledger = Ledger()
        self.buckets = Buckets(self.limits)
        self.visits: set[Visit] = set()
        self.turned_away: set[Visit] = set()
        self.by_address: Counter[str] = Counter()
        self.in_hand_bytes = 0  # of bodies, as announced
        self._thread: threading.Thread | None = None

    @property
    def traffic(self) -> dict[Client, Traffic]:
        """Received and sent bytes of each client: of a node's public key that the SuperLink believed, or else of an address."""
        return self.ledger.read()

    def start(self) -> None:
        self._connections = min(self.limits.connections, files_for(self.limits.connections))
        self._listener = listen(self.host, self.port)
        self.port = self._listener.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="fedcomp-guard", daemon=True
        )
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Close the port and every connection; a request in hand gets a second to end."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self, started: threading.Event) -> None:
        # asyncio's own loop and no other: it moves every byte through the methods of CountedSocket.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda loop, context: log.debug("%s", context))
        accepting = asyncio.create_task(self._accept())
        started.set()
        await self._ending.wait()
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        self._listener.close()
        if busy := [visit.task for visit in self.visits if visit.busy]:
            await asyncio.wait(busy, timeout=LINGER_S)
        left = [visit.task for visit in self.visits | self.turned_away]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                accepted, peer = await self._loop.sock_accept(self._listener)
            except OSError as error:
                log.debug("accept: %s", error)
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    await asyncio.sleep(0.1)  # until somebody leaves
                continue
            try:
                self._admit(CountedSocket(accepted), address_of(peer[0]))
            except Exception:
                log.exception("a connection of %s was given up", peer)
                accepted.close()

    def _admit(self, client: CountedSocket, address: str) -> None:
        full = (
            len(self.visits) >= self._connections
            or self.by_address[address] >= self.limits.connections_per_address
        )
        if full and len(self.turned_away) >= TURNED_AWAY:
            self.refused[HTTPStatus.SERVICE_UNAVAILABLE] += 1
            client.close()
            return
        visit = Visit(self, client, address, HTTPStatus.SERVICE_UNAVAILABLE if full else None)
        (self.turned_away if full else self.visits).add(visit)
        self.by_address[address] += not full
        visit.task = self._loop.create_task(visit.run())
        visit.task.add_done_callback(lambda task: self._leave(visit))

    def _leave(self, visit: Visit) -> None:
        visit.client.close()
        self.turned_away.discard(visit)
        if visit in self.visits:
            self.visits.remove(visit)
            self.by_address[visit.address] -= 1
            if not self.by_address[visit.address]:
                del self.by_address[visit.address]
