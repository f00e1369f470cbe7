"""The states of virtual clients: the most recently used ones in memory, the others in the run's checkpoint.

The checkpoint contains every client's vectors in any case. A client that is evicted from memory is staged in the checkpoint if it has
changed since the last save, and the next save does not write it again. The results of a run do not depend on where the states are.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from ..clients.state import ClientState
from ..memories import Memory
from ..memories.base import Changes
from ..server.checkpoint import Checkpoint
from .placement import IN_MEMORY, Placement

OBJECT_BYTES = 4096  # estimate of a state's size without its vectors and its record


class ClientStore:
    """The states of clients by logical id. A new state has a memory from `make_memory` and is at `version`."""

    def __init__(
        self, make_memory: Callable[[], Memory], version: str, placement: Placement = IN_MEMORY
    ):
        self.make_memory, self.version, self.placement = make_memory, version, placement
        self.states: dict[int, ClientState] = {}  # in memory, least recently used first
        self.changed: set[int] = set()  # clients in memory that changed since the last checkpoint
        self.checkpoint: Checkpoint | None = None  # None: all clients stay in memory
        self.client_bytes = placement.client_bytes + OBJECT_BYTES  # of the largest state so far
        self._on_device: set[int] = set()  # clients of the last call of `ensure_loaded`

    def at(self, client: int) -> ClientState:
        """Return the state of a client. Raises CheckpointError if it cannot be read."""
        if client not in self.states:
            self.states[client] = self._read(client) or ClientState(
                self.make_memory(), self.version
            )
        return self.states[client]

    def ensure_loaded(self, clients: Sequence[int]) -> None:
        """Load clients into memory, and onto the device if they train there. Evict other clients to stay within the budget.

        Raises CheckpointError if a client cannot be read or the disk is full.
        """
        clients = list(dict.fromkeys(clients))
        loaded = [client for client in clients if client in self.states]
        self.states |= {client: self.states.pop(client) for client in loaded}
        capacity = max(self.placement.budget_bytes / self.client_bytes, len(clients))
        surplus = len(self.states) - len(loaded) + len(clients) - capacity
        if surplus > 0 and self.checkpoint is not None:
            self._evict(list(itertools.islice(self.states, math.ceil(surplus))))
        for client in clients:
            self.at(client)
        if self.placement.training_device is not None:
            self._move(set(clients), self.placement.training_device)

    def mark_changed(self, clients: Iterable[int]) -> None:
        """Mark clients in memory as changed since the last checkpoint."""
        changed = self.states.keys() & set(clients)
        self.changed |= changed
        if self.placement.budget_bytes < math.inf:
            self._pack(itertools.islice(changed, 1))  # measures one state

    def take_changes(self) -> Changes:
        """Return vectors and values of the clients in memory that changed since the last call. Evicted clients are staged already."""
        vectors, values = self._pack(sorted(self.changed))
        self.changed.clear()
        return vectors, {**values}

    def clear(self) -> None:
        """Drop all states in memory, so that they are read from the checkpoint."""
        self.states.clear()
        self.changed.clear()

    def _read(self, client: int) -> ClientState | None:
        """Return a client's state from the checkpoint, None if the checkpoint has no state of it."""
        if self.checkpoint is None:
            return None
        name = record_name(client)
        record = self.checkpoint.value(name)
        if record is None:
            return None
        return ClientState.unpack(name, record, self.checkpoint.vector, self.make_memory)

    def _evict(self, clients: Collection[int]) -> None:
        """Stage the changed ones of these clients in the checkpoint, then remove all of them from memory."""
        vectors, values = self._pack([client for client in clients if client in self.changed])
        if values:
            assert self.checkpoint is not None
            self.checkpoint.stage(vectors, values)
        for client in clients:
            del self.states[client]
        self.changed.difference_update(clients)

    def _pack(self, clients: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, bytes]]:
        """Return vectors and values of clients in memory, and update `client_bytes`."""
        vectors: dict[str, Tensor] = {}
        values: dict[str, bytes] = {}
        for client in clients:
            name = record_name(client)
            client_vectors, record = self.states[client].pack(name)
            vectors |= client_vectors
            values[name] = b"".join(record)
            vector_bytes = sum(vector.nbytes for vector in client_vectors.values())
            state_bytes = vector_bytes + sum(map(len, record)) + OBJECT_BYTES
            self.client_bytes = max(self.client_bytes, state_bytes)
        return vectors, values

    def _move(self, clients: set[int], device: torch.device) -> None:
        """Move the vectors of these clients to the device, and those of the previous clients to the host."""
        for client in self._on_device - clients:
            if client in self.states:
                self.states[client].move(lambda vector: vector.cpu())
        for client in clients - self._on_device:
            self.states[client].move(lambda vector: vector.to(device, non_blocking=True))
        self._on_device = clients


def record_name(client: int) -> str:
    """Return the name of a client's record in a checkpoint. Its vectors have names such as `client/7.residual`."""
    return f"client/{client}"
