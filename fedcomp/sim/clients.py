"""Virtual clients: the client session of a simulation, with the states of all clients in a `ClientStore`."""

from collections.abc import Callable, Iterable

from torch import Tensor

from ..clients.evaluation import ClientEvaluator
from ..clients.replica import Replica
from ..clients.session import ClientHook, ClientSession
from ..clients.trainer import Trainer
from ..memories import Memory
from ..memories.base import Changes
from ..server.checkpoint import Checkpoint
from ..strategies.base import ClientAlgorithm
from .client_store import ClientStore
from .placement import IN_MEMORY, Placement
from .residual_monitor import ResidualMonitor


class VirtualClients(ClientSession):
    """The clients of a simulation, by logical id."""

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

    # Checkpoints.

    def use_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.store.checkpoint = checkpoint

    def take_changes(self) -> Changes:
        return self.store.take_changes()

    def restore(self, weights: Tensor, version: str, past_versions: Iterable[str]) -> None:
        """Restore the state of the checkpoint. States of clients are read on first use."""
        self.replica.restore(weights, version, past_versions)
        self.store.clear()
