"""The process of `fedcomp relay`. A relay forwards messages between a server and a group of clients.

The process keeps the relay connected to its server, and logs messages for the operator.
"""

import asyncio
import functools
import queue
from collections.abc import Callable, Sequence

from ..callbacks import LogMessage
from ..errors import FedcompError, UnreachableError
from ..keys.connection import join_address
from ..transports.grpc import Relay, RelayTerms, io_tasks
from . import log_messages
from .client_process import RETRY_S, Retries, Target
from .ports import listen


class RelayProcess:
    """A relay that connects to the server `target` and serves clients at `address` and `port` of this machine.

    `log_message`, `patience_s`, `stay` and `retry_s` have the same meaning as in ClientProcess. `opened` is called with the port number
    when clients can connect, in the thread of the gRPC event loop.
    """

    def __init__(
        self,
        target: Target,
        address: str,
        port: int,
        log_message: Callable[[str], None],
        *,
        patience_s: float | None = None,
        stay: bool = False,
        retry_s: Sequence[float] = RETRY_S,
        opened: Callable[[int], None] = lambda port: None,
    ):
        self.target, self.address, self.port, self.log_message = target, address, port, log_message
        self.patience_s = patience_s
        self.stay, self.retry_s, self.opened = stay, retry_s, opened
        self._retries = Retries()
        # Log messages. The last item is an error, which `run` raises, or None, after which `run` returns.
        self._messages: queue.SimpleQueue[str | FedcompError | None] = queue.SimpleQueue()
        self._clients = 0  # number of connected clients to report, or -1 after it was reported

    def end(self) -> None:
        """Make `run` return. Any thread may call this method."""
        self._messages.put(None)

    def run(self) -> None:
        """Forward messages until the run is over. If `stay` is True, wait for the next run instead of returning.

        Raises UserError if the port cannot be opened, or if the server refuses the relay or cannot be reached in time.
        """
        listen(self.address, self.port).close()
        with io_tasks([self._serve()]):
            while (message := self._messages.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                self.log_message(message)

    # Methods that run in the thread of the gRPC event loop.

    async def _serve(self) -> None:
        try:
            while await self._serve_once() or self.stay:
                pass
            self.end()
        except FedcompError as error:
            self._messages.put(error)
        except Exception as error:
            self._messages.put(FedcompError(f"{type(error).__name__}: {error}"))

    async def _serve_once(self) -> bool:
        """Forward messages until the run is over or the connection to the server is lost. Return whether it was lost."""
        where = self.target.address, self.address, self.port, self.target.credentials
        warn = functools.partial(self._report, event="warning")
        relay = Relay(*where, opened=self._opened, changed=self._changed, warn=warn)
        try:
            farewell = await relay.run()
        except UnreachableError as error:
            try:
                if error.cause == "network":
                    await asyncio.to_thread(self.target.check)
            except UnreachableError as cause:  # a more precise error
                error = cause
            pause_s, entry = self._retries.pause(error, self.retry_s, self.patience_s)
            if entry:
                self._messages.put(entry)
            await asyncio.sleep(pause_s)
            return True
        self._messages.put(log_messages.over(farewell, self.stay))
        if self.stay:
            await asyncio.sleep(self.retry_s[-2])  # reconnect after the server has exited
        return False

    def _opened(self, port: int, terms: RelayTerms) -> None:
        self._retries = Retries()
        self.port = port  # clients know this port, so the relay uses it again after a reconnection
        how = "adds up their encoded updates" if terms.codec else "forwards each encoded update"
        server, where = self.target.address, join_address(self.address, port)
        sentence = f"the relay connects clients at {where} with the server {server} in a run of {terms.clients} clients, and {how}"
        values = {"run": terms.run, "server": server, "port": port, "clients": terms.clients}
        self._report(sentence, "relaying", **values)
        self.opened(port)

    def _changed(self, clients: int) -> None:
        """Report the new number of connected clients if it does not change again within one second."""
        self._clients = clients
        asyncio.get_running_loop().call_later(1.0, self._report_clients, clients)

    def _report_clients(self, clients: int) -> None:
        if clients == self._clients:
            self._clients = -1
            sentence = f"{clients} client{'s' * (clients != 1)} connected"
            self._report(sentence, "connected_clients", clients=clients)

    def _report(self, sentence: str, event: str, **values: object) -> None:
        self._messages.put(LogMessage(sentence, event, **values))
