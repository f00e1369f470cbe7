"""Virtual clients at rest: those lately used are in memory, all others where the run's checkpoint has them.

A checkpoint holds every client's vectors anyway: a client that has to make room is forgotten if the last checkpoint has it as it is, and
else staged, so that the next checkpoint takes it over without writing it again. Clients of the rounds to come are read ahead by a thread.
What a run computes does not depend on where its clients were.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ..clients.state import ClientState
from ..memories import Memory
from ..memories.base import Changes
from .placement import HERE, Placement

AHEAD = 1 / 2  # of the budget, for clients that are read ahead
OBJECTS = 4096  # bytes of a state's objects, about


class Shelf(Protocol):
    """A checkpoint, as far as clients are put into it. Reading may be done in another thread."""

    def vector(self, name: str) -> Tensor | None: ...

    def value(self, name: str) -> bytes | None: ...

    def stage(self, vectors: Mapping[str, Tensor], values: Mapping[str, bytes]) -> None: ...


class ClientStore:
    """The states of clients by logical id; one that was never asked for is made when it is: a memory of `make_memory`, at `version`."""

    def __init__(self, make_memory: Callable[[], Memory], version: str, home: Placement = HERE):
        self.make_memory, self.version, self.home = make_memory, version, home
        self.states: dict[int, ClientState] = {}  # in memory, those used last at the end
        self.changed: set[int] = set()  # of these, since the last checkpoint
        self.shelf: Shelf | None = None  # without one, all stay in memory
        self.client_bytes = (
            home.client_bytes + OBJECTS
        )  # of the largest state that was measured so far
        self._working: set[int] = set()  # brought last
        self._ahead: dict[int, Future[ClientState | None]] = {}
        self._reader: ThreadPoolExecutor | None = None

    def at(self, client: int) -> ClientState:
        """The state of a client. Raises CheckpointError when it cannot be read back."""
        if client not in self.states:
            coming = self._ahead.pop(client, None)
            found = self._read(client) if coming is None or coming.cancel() else coming.result()
            self.states[client] = found or ClientState(self.make_memory(), self.version)
        return self.states[client]

    def bring(self, clients: Sequence[int]) -> None:
        """See that these are in memory, and of the others no more than there is room for.

        Raises CheckpointError when one cannot be read back, or when the disk is full.
        """
        clients = list(dict.fromkeys(clients))
        here = [client for client in clients if client in self.states]
        self.states |= {client: self.states.pop(client) for client in here}
        room = max((1 - AHEAD) * self.home.budget_bytes / self.client_bytes, len(clients))
        surplus = len(self.states) - len(here) + len(clients) - room
        if surplus > 0 and self.shelf is not None:
            self._put_away(list(itertools.islice(self.states, math.ceil(surplus))))
        for client in clients:
            self.at(client)
        if self.home.moves_to is not None:
            self._move(set(clients), self.home.moves_to)

    def expect(self, clients: Sequence[int]) -> None:
        """These will be asked for, in this order: read ahead as many as there is room for."""
        if self.shelf is None or not self.home.reads_ahead:
            return
        for client in self._ahead.keys() - set(clients):
            self._ahead.pop(client).cancel()
        room = int(AHEAD * self.home.budget_bytes / self.client_bytes) - len(self._ahead)
        missing = (
            client
            for client in dict.fromkeys(clients)
            if client not in self.states and client not in self._ahead
        )
        self._reader = self._reader or ThreadPoolExecutor(1, "clients-ahead")
        self._ahead |= {
            client: self._reader.submit(self._read, client)
            for client in itertools.islice(missing, max(0, room))
        }

    def touch(self, clients: Iterable[int]) -> None:
        """These are not as the last checkpoint has them."""
        touched = self.states.keys() & set(clients)
        self.changed |= touched
        self._packed(itertools.islice(touched, 1))  # one is measured

    def take_changes(self) -> Changes:
        """Vectors and values of the clients that changed since the last call and are in memory; the shelf has the others."""
        changes = self._packed(sorted(self.changed))
        self.changed.clear()
        return changes

    def clear(self) -> None:
        """Stand where the shelf stands."""
        self.expect(())
        self.states.clear()
        self.changed.clear()

    def close(self) -> None:
        """Read nothing more."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def _read(self, client: int) -> ClientState | None:
        """As the shelf has it; None if it has not. In any thread."""
        name = name_of(client)
        record = self.shelf.value(name) if self.shelf is not None else None
        return (
            None
            if record is None
            else ClientState.unpack(name, record, self.shelf.vector, self.make_memory)
        )

    def _put_away(self, clients: Collection[int]) -> None:
        vectors, values = self._packed([client for client in clients if client in self.changed])
        if values:
            self.shelf.stage(vectors, values)
        for client in clients:
            del self.states[client]
        self.changed.difference_update(clients)

    def _packed(self, clients: Iterable[int]) -> Changes:
        vectors: dict[str, Tensor] = {}
        values: dict[str, bytes | None] = {}
        for client in clients:
            name = name_of(client)
            mine, values[name] = self.states[client].pack(name)
            vectors |= mine
            self.client_bytes = max(
                self.client_bytes,
                sum(v.nbytes for v in mine.values()) + len(values[name]) + OBJECTS,
            )
        return vectors, values

    def _move(self, clients: set[int], device: torch.device) -> None:
        """Have the vectors of these on the device, and those of the clients before them in pinned memory of the host."""
        for client in self._working - clients:
            if client in self.states:
                self.states[client].move(_pinned)
        for client in clients - self._working:
            self.states[client].move(lambda vector: vector.to(device, non_blocking=True))
        self._working = clients


def name_of(client: int) -> str:
    """Return the name of a client's record in a checkpoint; its vectors are named `client/7.residual`."""
    return f"client/{client}"


def _pinned(vector: Tensor) -> Tensor:
    """A vector in memory of the host from which the device copies by itself."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda).copy_(vector)
