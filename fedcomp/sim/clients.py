"""The virtual clients of a simulation, and the store of their states."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from ..clients.session import ClientSession, ClientStates
from ..clients.state import ClientState
from ..memories import Memory
from ..memories.base import Changes, ReadValue, ReadVector
from ..server.broadcasts import Broadcasts
from ..server.checkpoint import Checkpoint
from .placement import IN_MEMORY, Placement

OBJECT_BYTES = 4096  # estimated size of the Python objects of a client's state


class ClientStore(ClientStates):
    """A store of the data that each client keeps between rounds (its state), such as its error-feedback residual.

    Recently used states are in memory, and all other states are in the checkpoint. A changed state is written to the checkpoint when the
    run is saved, or earlier if the state is evicted from memory. The results of a run do not depend on where the states are stored. A
    client that trains for the first time gets an error-feedback memory from `make_memory`, and `version` as the version of its model.
    """

    def __init__(
        self, make_memory: Callable[[], Memory], version: str, placement: Placement = IN_MEMORY
    ):
        super().__init__()  # `by_client` has the states in memory, least recently used first
        self.make_memory, self.version, self.placement = make_memory, version, placement
        self.changed: set[int] = set()  # clients whose states are newer than the checkpoint
        self.checkpoint: Checkpoint | None = None  # None: no state is evicted from memory
        # Size of the largest client state so far. The initial value is an estimate.
        self.client_bytes = placement.client_bytes + OBJECT_BYTES
        self._on_device: set[int] = set()  # clients whose vectors are on the training device

    def at(self, client: int) -> ClientState:
        """Return the state of a client. Raises CheckpointError if the state cannot be read."""
        if client not in self.by_client:
            self.by_client[client] = self._read(client) or ClientState(
                self.make_memory(), self.version
            )
        return self.by_client[client]

    def ensure_loaded(self, clients: Sequence[int]) -> None:
        """Load the states of clients into memory, and move their vectors to `placement.training_device` unless it is None.

        If the states exceed `placement.budget_bytes`, the least recently used states of other clients are evicted. Raises CheckpointError
        if a state cannot be read or the disk is full.
        """
        clients = list(dict.fromkeys(clients))
        loaded = [client for client in clients if client in self.by_client]
        self.by_client |= {client: self.by_client.pop(client) for client in loaded}
        capacity = max(self.placement.budget_bytes / self.client_bytes, len(clients))
        surplus = len(self.by_client) - len(loaded) + len(clients) - capacity
        if surplus > 0 and self.checkpoint is not None:
            self._evict(list(itertools.islice(self.by_client, math.ceil(surplus))))
        for client in clients:
            self.at(client)
        if self.placement.training_device is not None:
            self._move(set(clients), self.placement.training_device)

    def mark_changed(self, clients: Iterable[int]) -> None:
        changed = self.by_client.keys() & set(clients)
        self.changed |= changed
        if self.placement.budget_bytes < math.inf:
            self._pack(itertools.islice(changed, 1))  # measures one state to update `client_bytes`

    def take_changes(self) -> Changes:
        """Return the states that are newer than the checkpoint, as tensors and byte strings by name."""
        vectors, values = self._pack(sorted(self.changed))
        self.changed.clear()
        return vectors, {**values}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Do nothing, since `at` reads the state of a client from the checkpoint on first use."""

    def _read(self, client: int) -> ClientState | None:
        if self.checkpoint is None:
            return None
        name = record_name(client)
        record = self.checkpoint.value(name)
        if record is None:
            return None
        return ClientState.unpack(name, record, self.checkpoint.vector, self.make_memory)

    def _evict(self, clients: Collection[int]) -> None:
        """Write the changed states among these to the checkpoint, and remove all of them from memory."""
        vectors, values = self._pack([client for client in clients if client in self.changed])
        if values:
            assert self.checkpoint is not None
            self.checkpoint.stage(vectors, values)
        for client in clients:
            del self.by_client[client]
        self.changed.difference_update(clients)

    def _pack(self, clients: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, bytes]]:
        """Serialise states as tensors and byte strings by name, and update `client_bytes`."""
        vectors: dict[str, Tensor] = {}
        values: dict[str, bytes] = {}
        for client in clients:
            name = record_name(client)
            client_vectors, record = self.by_client[client].pack(name)
            vectors |= client_vectors
            values[name] = b"".join(record)
            vector_bytes = sum(vector.nbytes for vector in client_vectors.values())
            state_bytes = vector_bytes + sum(map(len, record)) + OBJECT_BYTES
            self.client_bytes = max(self.client_bytes, state_bytes)
        return vectors, values

    def _move(self, clients: set[int], device: torch.device) -> None:
        """Move the vectors of `clients` to the device, and those of all other clients to main memory."""
        for client in self._on_device - clients:
            if client in self.by_client:
                self.by_client[client].move(lambda vector: vector.cpu())
        for client in clients - self._on_device:
            self.by_client[client].move(lambda vector: vector.to(device, non_blocking=True))
        self._on_device = clients


def record_name(client: int) -> str:
    """Return the name of a client's state in a checkpoint. Names of vectors are longer, such as `client/7.residual`."""
    return f"client/{client}"


class VirtualClients(ClientSession):
    """The virtual clients of a simulation. Their ids are 0 to `clients` − 1."""

    states: ClientStore

    @property
    def clients(self) -> int:
        return len(self.trainer.shards)

    def restore(self, broadcasts: Broadcasts) -> None:
        """Restore the global model of a resumed run. The store reads the clients' states later, on first use."""
        past_versions = [broadcast.base for broadcast in broadcasts.cache]
        self.replica.restore(broadcasts.weights, broadcasts.version, past_versions)
