"""Virtual clients: the session that simulates them, with the states of all clients in a `ClientStore`."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from ..clients.replica import Replica
from ..clients.session import ClientHook, ClientSession
from ..clients.trainer import Trainer
from ..memories import Memory
from ..memories.base import Changes
from ..messages import Assignment, Report
from ..server.checkpoint import Checkpoint
from ..strategies.client_algorithm import ClientAlgorithm
from .client_store import ClientStore
from .placement import IN_MEMORY, Placement
from .update_watch import UpdateWatch


class VirtualClients:
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
    ):
        self.trainer = trainer
        self.store = ClientStore(make_memory, replica.version, placement)
        self.session = ClientSession(
            replica,
            self.store,
            trainer,
            algorithm,
            seed,
            hook=hook,
            watch=UpdateWatch(warn),
        )

    @property
    def clients(self) -> int:
        return len(self.trainer.shards)

    @property
    def at_once(self) -> int:
        """Assignments to handle together."""
        session = self.session
        whole = session.hook.needs_whole_cohort or session.algorithm.trains_on_partitions
        return self.clients if whole else self.trainer.at_once

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        return self.session.handle(assignments)

    # Checkpoints.

    def use_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.store.checkpoint = checkpoint

    def take_changes(self) -> Changes:
        return self.store.take_changes()

    def restore(self, weights: Tensor, version: str, passed: Iterable[str]) -> None:
        """Return to the state of the checkpoint. States of clients are read when they are first used."""
        self.session.replica.restore(weights, version, passed)
        self.store.clear()
