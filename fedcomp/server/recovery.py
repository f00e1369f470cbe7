"""Saving and restoring a run: the server's state and, in a simulation, the clients' state."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..errors import CheckpointError, RunFolderError
from ..memories.base import Changes
from ..messages import compact
from ..tasks import Data
from .checkpoint import Checkpoint
from .round_loop import RoundLoop, RoundResult
from .run_folder import CHECKPOINT, METRICS, RunFolder

# Names in the checkpoint, and prefixes of names.
RUN, WEIGHTS, DOWNLINK_MEMORY, CLIENT = "run", "weights", "downlink.", "server/"
STRATEGY, COUNTERPART, OPTIMIZER, LOOP = "strategy/", "counterpart/", "optimizer/", "loop/"

T = TypeVar("T")


class Clients(Protocol):
    """The clients of a run, as far as their state is part of the checkpoint."""

    data: Data  # training data

    def use_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Set the checkpoint in which clients that do not fit into memory are staged, and from which they are read."""

    def take_changes(self) -> Changes:
        """Return the vectors and values that changed since the last call, by name."""

    def restore(self, weights: Tensor, version: str, passed: Iterable[str]) -> None:
        """Return to the state of the checkpoint. `passed`: versions that the cached broadcasts start from."""


class Stateful(Protocol):
    """An object with its own state in the checkpoint: a strategy, its optimizer, a counterpart, or a virtual network."""

    def take_changes(self) -> Changes:
        """Return the vectors and values that changed since the last call, by name."""

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        """Restore the state. `vector` and `value` return an entry by its name, None if there is none."""


class RemoteClients:
    """Real clients, which keep their state on their own machines."""

    def __init__(self, data: Data):
        self.data = data

    def use_checkpoint(self, checkpoint: Checkpoint) -> None: ...

    def take_changes(self) -> Changes:
        return {}, {}

    def restore(self, *stored: object) -> None: ...


class Recovery:
    """Saves and restores a run whose loop has not begun. Call `restore` first, `mark_changed` after each round, and `save` when due."""

    def __init__(
        self,
        folder: RunFolder,
        loop: RoundLoop,
        clients: Clients,
        rounds: int,
        others: Mapping[str, Stateful] | None = None,
    ):
        """`others`: further objects with their own state, by the prefix of their names in the checkpoint."""
        self.folder, self.loop, self.clients, self.rounds = folder, loop, clients, rounds
        self.checkpoint = Checkpoint(folder.path / CHECKPOINT, flushed=[folder.path / METRICS])
        self.saved_round = 0
        self.others = dict(others or {})
        clients.use_checkpoint(self.checkpoint)
        self.changed: set[int] = set()  # clients that took part since the last checkpoint

    def close(self) -> None:
        """Close the checkpoint."""
        self.checkpoint.close()

    def restore(self) -> int:
        """Restore loop, clients and metrics from the checkpoint, or save a new run. Return the round of the checkpoint, 0 for a new run.

        Raises RunFolderError if the task's model or data are not those of the run or more than `rounds` rounds are done, and
        CheckpointError if the checkpoint is damaged.
        """
        stored = self.checkpoint.value(RUN)
        if stored is None:
            if self.folder.records():
                raise CheckpointError(
                    f"{self.checkpoint.folder} holds no checkpoint of the run; start a new run with another --out"
                )
            self.save(0, 0)
            return 0
        try:
            return self._restore(json.loads(stored))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.checkpoint.folder} is damaged; start a new run with another --out"
            ) from error

    def _restore(self, run: dict[str, Any]) -> int:
        where = f"the run in {self.folder.path}"
        for difference, value in self._identity.items():
            if run[difference] != value:
                raise RunFolderError(
                    f"{where} had {difference}; undo the change to the task, or give another --out"
                )
        if run["round"] > self.rounds:
            raise RunFolderError(
                f"{where} has done {run['round']} rounds; give --rounds {run['round']} or more"
            )
        self._restore_server(run)
        self.folder.truncate_metrics(run["metrics_length"])
        passed = [broadcast.base for broadcast in self.loop.broadcasts.cache]
        self.clients.restore(self._vector(WEIGHTS), run["version"], passed)
        self.saved_round = run["round"]
        return self.saved_round

    def mark_changed(self, outcome: RoundResult) -> None:
        """Mark the clients of a round. The next `save` writes their records."""
        self.changed |= set(outcome.cohort)

    def save(self, round: int, metrics_length: int) -> None:
        """Save the state after a round. `metrics_length`: bytes of metrics.jsonl after it."""
        loop, broadcasts = self.loop, self.loop.broadcasts
        cache = broadcasts.cache
        vectors, values = self.clients.take_changes()
        vectors[WEIGHTS] = broadcasts.weights
        memory = broadcasts.memory.state_dict(copy=False)
        is_vector = {name: isinstance(value, Tensor) for name, value in memory.items()}
        for name, value in memory.items():
            if isinstance(value, Tensor):
                vectors[DOWNLINK_MEMORY + name] = value
            else:
                values[DOWNLINK_MEMORY + name] = value
        for client in self.changed:
            dropped = loop.dropped.get(client, b"").hex()
            record = [
                loop.versions.get(client),
                loop.tickets.get(client),
                dropped,
                loop.examples.get(client),
            ]
            values[f"{CLIENT}{client}"] = compact(record).encode()
        for prefix, part in self._parts():
            own_vectors, own_values = part.take_changes()
            vectors |= {prefix + name: vector for name, vector in own_vectors.items()}
            values |= {prefix + name: value for name, value in own_values.items()}
        run = {
            "round": round,
            "metrics_length": metrics_length,
            "version": broadcasts.version,
            "newest_bytes": broadcasts.newest_bytes,
            "downlink_memory": is_vector,
        }
        values[RUN] = json.dumps(run | self._identity).encode()
        new = [broadcast for broadcast in cache if broadcast.round > self.saved_round]
        self.checkpoint.save(vectors, values, new, oldest=cache[0].round if cache else round + 1)
        self.changed.clear()
        self.saved_round = round

    def _restore_server(self, run: dict[str, Any]) -> None:
        loop = self.loop
        read = {True: self._vector, False: self.checkpoint.value}
        memory = {
            name: read[is_vector](DOWNLINK_MEMORY + name)
            for name, is_vector in run["downlink_memory"].items()
        }
        cache = self.checkpoint.broadcasts(until=run["round"])
        loop.broadcasts.restore(
            self._vector(WEIGHTS), memory, cache, run["version"], run["newest_bytes"]
        )
        for client, record in self.checkpoint.values(CLIENT).items():
            version, ticket, dropped, examples = json.loads(record)
            if version is not None:
                loop.versions[int(client)] = version
            if ticket is not None:
                loop.tickets[int(client)] = ticket
            if dropped:
                loop.dropped[int(client)] = bytes.fromhex(dropped)
            if examples is not None:
                loop.examples[int(client)] = examples
        for prefix, part in self._parts():
            part.restore(
                _prefixed(prefix, self.checkpoint.vector), _prefixed(prefix, self.checkpoint.value)
            )

    def _parts(self) -> list[tuple[str, Stateful]]:
        """Return the objects with their own state in the checkpoint, each with the prefix of its names."""
        loop, counterpart = self.loop, self.loop.strategy.counterpart
        parts: list[tuple[str, Stateful]] = [
            (STRATEGY, loop.strategy),
            (OPTIMIZER, loop.optimizer),
            (LOOP, loop),
        ]
        if counterpart is not None:
            parts.append((COUNTERPART, counterpart))
        return [*parts, *self.others.items()]

    def _vector(self, name: str) -> Tensor:
        vector = self.checkpoint.vector(name)
        if vector is None:
            raise CheckpointError(
                f"the checkpoint in {self.checkpoint.folder} lacks '{name}'; start a new run with another --out"
            )
        return vector

    @cached_property
    def _identity(self) -> dict[str, str]:
        """Properties that must not change when a run is resumed, by the words for a difference in the error message."""
        return {
            "another model": self.loop.broadcasts.layout.fingerprint,
            "other examples": self.clients.data.digest,
        }


def _prefixed(prefix: str, read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a function that reads the entry of a name with `prefix` before it."""
    return lambda name: read(prefix + name)
