"""The virtual clients of a simulation, the store of their states, and a monitor of their error-feedback residuals."""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from ..clients.evaluation import ClientEvaluator
from ..clients.replica import Replica
from ..clients.session import ClientHook, ClientSession
from ..clients.state import ClientState
from ..clients.trainer import Trainer
from ..memories import Memory
from ..memories.base import Changes, ReadValue, ReadVector
from ..messages import Assignment
from ..server.broadcasts import Broadcasts
from ..server.checkpoint import Checkpoint
from ..strategies.base import ClientAlgorithm
from .placement import IN_MEMORY, Placement

GROWTH = "residual growth"  # `kind` of ResidualMonitor's warning
# Factor by which a residual's norm may exceed the sum of the updates' norms, since random codecs satisfy the bound only on average.
MARGIN = 10.0
# Monitor at least MIN_CLIENTS clients. Monitor further clients, up to MAX_CLIENTS, until the updates of the monitored clients have
# MAX_COORDINATES coordinates in total. A few clients are enough, since all clients use the same codec.
MIN_CLIENTS, MAX_CLIENTS, MAX_COORDINATES = 4, 16, 1 << 24
OBJECT_BYTES = 4096  # estimated size of the Python objects of a client's state


class ClientStore:
    """The states of all clients, such as residuals. Recently used states are in memory, and the other states are in the run's checkpoint.

    A changed state is written to the checkpoint once: when it is evicted from memory, or else at the next save. The results of a run do not
    depend on where the states are stored. The state of a new client has an error-feedback memory from `make_memory` and the model version
    `version`.
    """

    def __init__(
        self, make_memory: Callable[[], Memory], version: str, placement: Placement = IN_MEMORY
    ):
        self.make_memory, self.version, self.placement = make_memory, version, placement
        self.states: dict[int, ClientState] = {}  # states in memory, least recently used first
        # Clients whose state in memory changed since the last checkpoint.
        self.changed: set[int] = set()
        self.checkpoint: Checkpoint | None = None  # None: the states of all clients stay in memory
        # Size in bytes of the largest client state so far.
        self.client_bytes = placement.client_bytes + OBJECT_BYTES
        self._on_device: set[int] = set()  # clients whose vectors are on the training device

    def at(self, client: int) -> ClientState:
        """Return the state of a client. Raises CheckpointError if the state cannot be read."""
        if client not in self.states:
            self.states[client] = self._read(client) or ClientState(
                self.make_memory(), self.version
            )
        return self.states[client]

    def ensure_loaded(self, clients: Sequence[int]) -> None:
        """Load the states of clients into memory, and move their vectors to `placement.training_device` unless it is None.

        The states of other clients are evicted to stay within the memory budget. Raises CheckpointError if a state cannot be read or the
        disk is full.
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
        changed = self.states.keys() & set(clients)
        self.changed |= changed
        if self.placement.budget_bytes < math.inf:
            self._pack(itertools.islice(changed, 1))  # to update self.client_bytes

    def take_changes(self) -> Changes:
        """Return the vectors and values of the states that changed since the last call and are not yet in the checkpoint."""
        vectors, values = self._pack(sorted(self.changed))
        self.changed.clear()
        return vectors, {**values}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Do nothing, since the state of a client is read from the checkpoint on first use."""

    def _read(self, client: int) -> ClientState | None:
        if self.checkpoint is None:
            return None
        name = record_name(client)
        record = self.checkpoint.value(name)
        if record is None:
            return None
        return ClientState.unpack(name, record, self.checkpoint.vector, self.make_memory)

    def _evict(self, clients: Collection[int]) -> None:
        """Write each of these clients' states to the checkpoint if the state changed, and remove the state from memory."""
        vectors, values = self._pack([client for client in clients if client in self.changed])
        if values:
            assert self.checkpoint is not None
            self.checkpoint.stage(vectors, values)
        for client in clients:
            del self.states[client]
        self.changed.difference_update(clients)

    def _pack(self, clients: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, bytes]]:
        """Return the vectors and values by which a checkpoint stores the states of these clients, and update `client_bytes`."""
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
        """Move the vectors of `clients` to the device, and move the vectors that earlier calls left on the device back to main memory."""
        for client in self._on_device - clients:
            if client in self.states:
                self.states[client].move(lambda vector: vector.cpu())
        for client in clients - self._on_device:
            self.states[client].move(lambda vector: vector.to(device, non_blocking=True))
        self._on_device = clients


def record_name(client: int) -> str:
    """Return the name under which a checkpoint stores a client's state. The client's vectors have names such as `client/7.residual`."""
    return f"client/{client}"


class ResidualMonitor:
    """Monitor of the residuals of the first clients of a run, which warns once if a residual grows without bound.

    If a codec C satisfies ‖a − C(a)‖ ≤ ‖a‖ for every vector a, the residual e of error feedback is bounded: ‖e‖ ≤ Σ‖x‖ over the client's
    updates x, even if some updates are lost. If ‖e‖ is much larger than Σ‖x‖, the codec violates this condition, and the
    residual will keep growing. After a restart, the sum Σ‖x‖ starts with the norm of the current residual.
    """

    def __init__(self, warn: Callable[..., None]):
        self.warn, self.warned = warn, False
        # Maps a client to the sum of the norms of its updates.
        self.norm_sums: dict[int, float] = {}

    def __call__(
        self, assignments: Sequence[Assignment], memories: Sequence[Memory], updates: Tensor
    ) -> None:
        for a, memory, update in zip(assignments, memories, updates, strict=True):
            monitored = len(self.norm_sums)
            few = monitored < MIN_CLIENTS or monitored * len(update) < MAX_COORDINATES
            has_room = monitored < MAX_CLIENTS and few
            if not self.warned and (a.client in self.norm_sums or has_room):
                self._check(a.client, memory, update)

    def _check(self, client: int, memory: Memory, update: Tensor) -> None:
        residual_norm = 0.0 if memory.residual is None else float(memory.residual.norm())
        norm_sum, norm = self.norm_sums.get(client, residual_norm), float(update.norm())
        if residual_norm > MARGIN * memory.gain * norm_sum:
            self.warned = True
            self.warn(
                f"the residual of client {client} grows without bound: its norm is {residual_norm:.3g}, but the norms of all its "
                f"updates add up to only {norm_sum:.3g}; with {memory.codec}, the compression error is larger than the vector; use "
                "--uplink stc, or --memory none",
                kind=GROWTH,
            )
        self.norm_sums[client] = norm_sum + (norm if math.isfinite(norm) else 0.0)


class VirtualClients(ClientSession):
    """The virtual clients of a simulation, identified by their ids."""

    def __init__(
        self,
        replica: Replica,
        trainer: Trainer,
        make_memory: Callable[[], Memory],
        algorithm: ClientAlgorithm,
        seed: int,
        *,
        warn: Callable[[str], None] = lambda sentence: None,
        hook: ClientHook | None = None,
        placement: Placement = IN_MEMORY,
        evaluator: ClientEvaluator | None = None,
    ):
        self.store = ClientStore(make_memory, replica.version, placement)
        self.clients = len(trainer.shards)
        super().__init__(
            replica,
            self.store,
            trainer,
            algorithm,
            seed,
            hook=hook,
            watch=ResidualMonitor(warn),
            evaluator=evaluator,
        )

    def restore(self, broadcasts: Broadcasts) -> None:
        """Restore the model of a resumed run. The states of the clients are read from the checkpoint on first use."""
        past_versions = [broadcast.base for broadcast in broadcasts.cache]
        self.replica.restore(broadcasts.weights, broadcasts.version, past_versions)
